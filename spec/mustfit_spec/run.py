"""Running a scenario on the specification: from scenario to trace."""

from __future__ import annotations

from mustfit_spec.scenario import Operation, Scenario
from mustfit_spec.scheduler import Scheduler, SchedulerFailure, StepOutcome
from mustfit_spec.state import State, initial_state
from mustfit_spec.trace import StepTrace, Trace, TraceError


def run(
    scenario: Scenario,
    scheduler: Scheduler,
    *,
    failures: tuple[type[Exception], ...] = (SchedulerFailure,),
) -> Trace:
    """What the scheduler does with the scenario, at profile ``identity``.

    Args:
        scenario: What is done to it.
        scheduler: Whom it is done to.
        failures: What the scheduler raises where it contradicts itself. The trace ends there and
            says so.
    """
    state = initial_state(scheduler.config)
    steps: list[StepTrace] = []
    error: TraceError | None = None
    try:
        for operation in scenario.operations:
            if operation.op == "step":
                state, outcome = scheduler.step(state)
                steps.append(observe(state, outcome))
            else:
                state = apply(scenario, scheduler, state, operation)
    except failures as failure:
        error = TraceError(step=len(steps), kind=type(failure).__name__, message=str(failure))
    return Trace(scenario_id=scenario.scenario_id, steps=tuple(steps), error=error)


def apply(scenario: Scenario, scheduler: Scheduler, state: State, operation: Operation) -> State:
    """The state after an operation that is not a step."""
    if operation.op == "reset_prefix_cache":
        return scheduler.reset_prefix_cache(
            state, reset_running_requests=operation.reset_running_requests
        )
    request_id = str(operation.request_id)
    if operation.op == "add":
        return scheduler.add_request(state, scenario.request(request_id))
    return scheduler.abort(state, request_id)


def observe(state: State, outcome: StepOutcome) -> StepTrace:
    """What can be seen of a step: what it did, and the state after it."""
    running = {request_id: state.request(request_id) for request_id in state.running}
    return StepTrace(
        num_scheduled_tokens=dict(outcome.num_scheduled_tokens),
        preempted=outcome.preempted,
        finished=tuple(request_id for request_id, _ in outcome.finished),
        running=state.running,
        waiting=state.waiting,
        num_free_blocks=state.num_free_blocks,
        num_cached_tokens=dict(outcome.num_cached_tokens),
        num_blocks={request_id: len(r.block_ids) for request_id, r in running.items()},
        finish_reasons=dict(outcome.finished),
        block_ids={request_id: r.block_ids for request_id, r in running.items()},
        free_block_ids=state.free_block_queue,
        cached_block_ids=cached_by_content(state),
    )


def cached_by_content(state: State) -> tuple[tuple[int, ...], ...]:
    """The blocks in the prefix cache, those of equal content together, first cached first."""
    by_content: dict[object, list[int]] = {}
    for block_id in state.cached_block_ids:
        by_content.setdefault(state.blocks[block_id].block_hash, []).append(block_id)
    return tuple(sorted(tuple(block_ids) for block_ids in by_content.values()))
