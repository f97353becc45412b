"""Running a scenario on the implementation, step by step or in strides: from scenario to trace."""

from __future__ import annotations

import attrs

from mustfit_impl.scheduler import Scheduler
from mustfit_impl.semantics import NEWEST
from mustfit_spec import Operation, Scenario, SchedulerFailure, StepTrace, Trace, TraceError


@attrs.frozen(kw_only=True)
class RunLengthTrace:
    """A trace in which equal consecutive steps stand once.

    Attributes:
        scenario_id: The scenario that this answers.
        runs: The steps, each with how many times it was taken in a row. Neighbours may be equal.
        error: The step in which the scheduler itself failed, if it did.
    """

    scenario_id: str
    runs: tuple[tuple[StepTrace, int], ...]
    error: TraceError | None = None

    def expand(self) -> Trace:
        """The same, step by step."""
        return Trace(
            scenario_id=self.scenario_id,
            steps=tuple(step for step, count in self.runs for _ in range(count)),
            error=self.error,
        )


def run(scenario: Scenario, *, revision: str = NEWEST) -> Trace:
    """What the scheduler does with the scenario, step by step, at profile ``identity``.

    Raises:
        ConfigError: The revision doesn't have a field that the scenario's configuration sets.
    """
    return _run(scenario, revision, stride=1).expand()


def run_in_strides(scenario: Scenario, *, revision: str = NEWEST) -> RunLengthTrace:
    """The same, with equal steps taken in one stride.

    Raises:
        ConfigError: The revision doesn't have a field that the scenario's configuration sets.
    """
    return _run(scenario, revision, stride=None)


def _run(scenario: Scenario, revision: str, *, stride: int | None) -> RunLengthTrace:
    """What the scheduler does, at most so many steps in a stride."""
    # What reaches vLLM's scheduler itself, past its front end, is part of the semantics.
    scheduler = Scheduler(config=scenario.config, revision=revision, refuse_overlong=False)
    requests = {request.request_id: request for request in scenario.requests}
    runs: list[tuple[StepTrace, int]] = []
    error: TraceError | None = None
    taken = 0
    try:
        for operation, count in _grouped(scenario.operations):
            request_id = str(operation.request_id)
            if operation.op == "step":
                left = count
                while left:
                    outcome, steps = scheduler.advance(min(left, stride or left), same_blocks=True)
                    runs.append((scheduler.observe(outcome), steps))
                    left -= steps
                    taken += steps
            elif operation.op == "add":
                scheduler.add_request(requests[request_id])
            elif operation.op == "abort":
                scheduler.abort(request_id)
            else:
                scheduler.reset_prefix_cache(
                    reset_running_requests=operation.reset_running_requests
                )
    except SchedulerFailure as failure:
        error = TraceError(step=taken, kind=type(failure).__name__, message=str(failure))
    return RunLengthTrace(scenario_id=scenario.scenario_id, runs=tuple(runs), error=error)


def _grouped(operations: tuple[Operation, ...]) -> list[tuple[Operation, int]]:
    """The operations, with how many times each is done in a row; only steps are grouped."""
    grouped: list[tuple[Operation, int]] = []
    for operation in operations:
        if operation.op == "step" and grouped and grouped[-1][0].op == "step":
            grouped[-1] = (operation, grouped[-1][1] + 1)
        else:
            grouped.append((operation, 1))
    return grouped
