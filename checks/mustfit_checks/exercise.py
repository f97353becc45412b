"""Which rules a scenario exercises.

A rule counts as exercised when its method ran *and* what the rule says mattered there: the gate
when it refused, a victim when there was a choice, a lookup when it found something. So a count of
zero means that a scheduler could get that rule wrong and not be found out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from mustfit_spec import (
    Config,
    Request,
    RequestStatus,
    Scenario,
    Scheduler,
    State,
    StepOutcome,
    Trace,
    rules_of,
    run,
)
from mustfit_spec.scheduler import Step

#: Decides from the scheduler, the method's result, and its arguments.
Decisive = Callable[..., bool]


def exercised(scenario: Scenario, revision: type[Scheduler]) -> tuple[Trace, frozenset[str]]:
    """What a revision does with a scenario, and the IDs of the rules that mattered."""
    made, seen = watched(revision)
    trace = run(scenario, made(scenario.config))
    return trace, frozenset(seen)


def watched(revision: type[Scheduler]) -> tuple[type[Scheduler], set[str]]:
    """The revision, made to note the IDs of the rules that matter, and the set they are put in."""
    made, notes = _watched(revision)  # type: ignore[arg-type]  # classes hash by identity
    notes.seen.clear()
    return made, notes.seen


@attrs.define
class _Notes:
    """What a watched scheduler notes: rules that mattered, and whether it is being asked.

    While it is asked whether a rule mattered, what it does to answer says nothing of the scenario.
    """

    seen: set[str] = attrs.field(factory=set)
    asked: bool = False


@functools.cache
def _watched(revision: type[Scheduler]) -> tuple[type[Scheduler], _Notes]:
    """The revision, made to note the rules that matter; and what it notes."""
    notes = _Notes()
    methods = {
        rule.method: _watch(getattr(revision, rule.method), rule_id, notes)
        for rule_id, rule in rules_of(revision).items()
    }
    return type(revision.__name__, (revision,), methods), notes


def _watch(method: Callable[..., Any], rule_id: str, notes: _Notes) -> Callable[..., Any]:
    decisive = DECISIVE[rule_id]

    @functools.wraps(method)
    def watched(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        try:
            result = method(self, *args, **kwargs)
        except Exception:
            # It passes through every method on its way out; it says something of one of them.
            if decisive is _never:
                notes.seen.add(rule_id)
            raise
        if rule_id in notes.seen or notes.asked:
            return result
        notes.asked = True
        try:
            if decisive(self, result, *args, **kwargs):
                notes.seen.add(rule_id)
        finally:
            notes.asked = False
        return result

    return watched


def _always(*_: object, **__: object) -> bool:
    return True


def _never(*_: object, **__: object) -> bool:
    """Only failing counts."""
    return False


def _refused(_: Scheduler, result: object, *__: object, **___: object) -> bool:
    return result is False or result is None


def _changed(_: Scheduler, result: object, state: State, *__: object, **___: object) -> bool:
    return result is not state


def _gate_length(scheduler: Scheduler, _: int, request: Request) -> bool:
    beyond = request.num_tokens > scheduler.config.max_model_len
    return beyond or (request.num_output_tokens > 0 and request.status is RequestStatus.PREEMPTED)


def _slots(_: Scheduler, result: int, request: Request, new: int, hit: int, ahead: int) -> bool:
    return ahead > 0 or result < request.num_computed_tokens + hit + new


def _watermark(scheduler: Scheduler, result: int, *_: object, **__: object) -> bool:
    return result > 0 or "watermark" in scheduler.lacks


def _hit_and_new(
    _: Scheduler, result: State, __: State, request: Request, ___: int, hit: tuple[int, ...]
) -> bool:
    new = len(result.request(request.request_id).block_ids) - len(request.block_ids) - len(hit)
    return bool(hit) and new > 0


def _several_cached(
    _: Scheduler, __: int | None, state: State, block_hash: tuple[int, ...]
) -> bool:
    found = [b for b in state.cached_block_ids if state.blocks[b].block_hash == block_hash]
    return len(found) > 1


def _cached_already(
    _: Scheduler, __: State, state: State, ___: int, block_hash: tuple[int, ...]
) -> bool:
    return any(state.blocks[b].block_hash == block_hash for b in state.cached_block_ids)


def _inactive_hit(_: Scheduler, __: State, state: State, block_ids: tuple[int, ...]) -> bool:
    return any(state.blocks[b].ref_cnt == 0 for b in block_ids)


def _whole_hit(scheduler: Scheduler, _: int, request: Request) -> bool:
    return request.num_tokens % scheduler.config.block_size == 0


def _budget(scheduler: Scheduler, *_: object, **__: object) -> bool:
    limit = scheduler.config.max_num_scheduled_tokens
    return limit is not None and limit != scheduler.config.max_num_batched_tokens


def _threshold(scheduler: Scheduler, result: int, state: State) -> bool:
    """It limits somebody, or would as it is configured, were it not spared or adapted."""
    configured = scheduler.config.long_prefill_token_threshold
    most = max((r.num_tokens - r.num_computed_tokens for r in state.requests), default=0)
    return 0 < result < most or (result != configured and 0 < configured < most)


def _gate_decides(scheduler: Scheduler, result: Step | None, *_: object) -> bool:
    return result is None or not scheduler.config.scheduler_reserve_full_isl


def _waiting_limited(
    _: Scheduler, result: int | None, __: Step, request: Request, ___: int
) -> bool:
    return result is None or result < request.num_tokens


def _both_queues(_: Scheduler, __: object, state: State) -> bool:
    return bool(state.running and state.waiting)


def _configured(field: str) -> Decisive:
    def decisive(scheduler: Scheduler, *_: object, **__: object) -> bool:
        config: Config = scheduler.config
        return bool(getattr(config, field))

    return decisive


def _positive(_: Scheduler, result: int, *__: object, **___: object) -> bool:
    return result > 0


def _not_empty(_: Scheduler, result: object, *__: object, **___: object) -> bool:
    return bool(result)


def _choice_of_blocks(_: Scheduler, __: object, state: State, num_blocks: int) -> bool:
    return num_blocks > 0 and state.num_free_blocks > 1


def _has_blocks(
    _: Scheduler, __: int, ___: State, request: Request, ____: int, hit: tuple[int, ...]
) -> bool:
    return bool(request.block_ids or hit)


def _had_blocks(_: Scheduler, __: object, ___: State, request: Request) -> bool:
    return bool(request.block_ids)


def _several_blocks(_: Scheduler, __: object, ___: State, block_ids: tuple[int, ...]) -> bool:
    return len(block_ids) > 1


def _has_cached(_: Scheduler, __: object, state: State) -> bool:
    return bool(state.cached_block_ids)


def _scheduled(_: Scheduler, __: object, ___: State, outcome: StepOutcome) -> bool:
    return bool(outcome.num_scheduled_tokens)


def _finished(_: Scheduler, result: tuple[State, StepOutcome], *__: object) -> bool:
    return bool(result[1].finished)


def _somebody(_: Scheduler, __: object, state: State, request_id: str) -> bool:
    return state.has(request_id)


def _reset_running(
    _: Scheduler, __: object, state: State, *, reset_running_requests: bool = False
) -> bool:
    return reset_running_requests and bool(state.running)


def _several_running(_: Scheduler, __: object, step: Step) -> bool:
    return len(step.state.running) > 1


def _choice_of_victim(_: Scheduler, __: object, state: State) -> bool:
    return len(state.running) > 1


def _limited(_: Scheduler, result: int, __: Step, request: Request) -> bool:
    return result < request.num_tokens - request.num_computed_tokens


def _model_end(_: Scheduler, result: int, request: Request) -> bool:
    return result < request.num_tokens - request.num_computed_tokens


def _preempted(_: Scheduler, result: Step, step: Step, *__: object) -> bool:
    return len(result.preempted) > len(step.preempted)


def _gate_would_refuse(
    scheduler: Scheduler, result: State | None, state: State, request: Request, _: int
) -> bool:
    return result is not None and not scheduler.full_sequence_fits(state, request, (), 0)


def _refunded(_: Scheduler, __: Step, step: Step, victim: str) -> bool:
    return any(request_id == victim for request_id, _ in step.num_scheduled_tokens)


def _index_moved(_: Scheduler, result: int, step: Step, __: str) -> bool:
    return result != step.req_index


def _several_waiting(_: Scheduler, result: State, *__: object) -> bool:
    return len(result.waiting) > 1


def _barred(_: Scheduler, result: bool, step: Step) -> bool:  # noqa: FBT001
    return result and len(step.state.waiting) > len(step.preempted)


def _left_waiting(_: Scheduler, result: Step, __: Step) -> bool:
    return len(result.state.waiting) > 1


def _would_wait(scheduler: Scheduler, result: bool, *_: object) -> bool:  # noqa: FBT001
    return result and not scheduler.config.enable_chunked_prefill


DECISIVE: dict[str, Decisive] = {
    "ALLOC-CHUNK": _refused,
    "ALLOC-COUNT": _has_blocks,
    "ALLOC-FREE": _had_blocks,
    "ALLOC-FREE-ORDER": _several_blocks,
    "ALLOC-GATE": _refused,
    "ALLOC-GATE-LENGTH": _gate_length,
    "ALLOC-HEAD": _choice_of_blocks,
    "ALLOC-INACTIVE-HIT": _positive,
    "ALLOC-REFUSE": _refused,
    "ALLOC-SLOTS": _slots,
    "ALLOC-TAKE": _hit_and_new,
    "ALLOC-WATERMARK": _watermark,
    "CACHE-AT-ALLOCATION": _changed,
    "CACHE-DUPLICATE": _cached_already,
    "CACHE-EVICT": _changed,
    "CACHE-FIRST": _several_cached,
    "CACHE-FULL": _changed,
    "CACHE-HASH": _always,
    "CACHE-LAST-TOKEN": _whole_hit,
    "CACHE-LOOKUP": _not_empty,
    "CACHE-RESET": _has_cached,
    "CACHE-TOUCH": _inactive_hit,
    "PREEMPT-FREE": _always,
    "PREEMPT-INDEX": _index_moved,
    "PREEMPT-REFUND": _refunded,
    "PREEMPT-REQUEUE": _several_waiting,
    "PREEMPT-SELF": _always,
    "PREEMPT-VICTIM": _choice_of_victim,
    "RUN-MODEL-LEN": _model_end,
    "RUN-NO-GATE": _gate_would_refuse,
    "RUN-ORDER": _several_running,
    "RUN-PASS-OVER": _always,
    "RUN-PREEMPT": _preempted,
    "RUN-TOKENS": _limited,
    "STEP-ABORT": _somebody,
    "STEP-ADVANCE": _scheduled,
    "STEP-ASSERT": _never,
    "STEP-BUDGET": _budget,
    "STEP-FINISH": _always,
    "STEP-ORDER": _both_queues,
    "STEP-OUTPUT": _finished,
    "STEP-RESET": _reset_running,
    "STEP-STOP": _not_empty,
    "STEP-THRESHOLD": _threshold,
    "WAIT-ADMIT": _always,
    "WAIT-AFTER-PREEMPT": _barred,
    "WAIT-BLOCKED": _always,
    "WAIT-CHUNKED": _would_wait,
    "WAIT-GATE": _gate_decides,
    "WAIT-LOOKAHEAD": _configured("num_lookahead_tokens"),
    "WAIT-LOOP": _left_waiting,
    "WAIT-ORDER": _several_waiting,
    "WAIT-SEATS": _refused,
    "WAIT-TOKENS": _waiting_limited,
}
