"""The specification by itself: what holds of its state after every operation."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mustfit_checks.generate import scenario
from mustfit_spec import (
    REVISIONS,
    Config,
    ConfigError,
    Operation,
    RequestStatus,
    Scenario,
    Scheduler,
    SchedulerFailure,
    State,
    StepOutcome,
    initial_state,
)
from mustfit_spec.run import apply
from mustfit_spec.state import NULL_BLOCK

revisions = pytest.mark.parametrize("revision", REVISIONS)


def check_invariants(state: State, config: Config) -> None:
    """What holds between any two operations."""
    held = [b for request in state.requests for b in request.block_ids]
    for block in state.blocks:
        assert block.ref_cnt == held.count(block.block_id)
        free = state.free_block_queue.count(block.block_id)
        places = free + (block.ref_cnt > 0) + (block.block_id == NULL_BLOCK)
        assert places == 1, f"block {block.block_id} is in {places} places"
        cached = state.cached_block_ids.count(block.block_id)
        assert cached == (block.block_hash is not None)
    assert len(state.running) <= config.max_num_seqs
    assert sorted(state.running + state.waiting) == sorted(r.request_id for r in state.requests)
    for request in state.requests:
        running = request.status is RequestStatus.RUNNING
        assert running == (request.request_id in state.running)
        assert running or not request.block_ids
        assert running or request.num_computed_tokens == 0
        assert len(set(request.block_ids)) == len(request.block_ids)
    if config.policy == "priority":
        keys = [
            (r.given.priority, r.given.arrival_time, r.request_id)
            for r in map(state.request, state.waiting)
        ]
        assert keys == sorted(keys)


def check_step(before: State, after: State, outcome: StepOutcome, config: Config) -> None:
    """What holds of any step."""
    scheduled = dict(outcome.num_scheduled_tokens)
    budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    assert sum(scheduled.values()) <= budget
    assert all(n > 0 for n in scheduled.values())
    admitted = dict(outcome.num_cached_tokens)
    assert not (outcome.preempted and admitted), "admission in a step that preempted"
    assert set(outcome.preempted) <= set(before.running), "an admission was preempted for"
    assert not set(outcome.preempted) & set(scheduled)
    if not outcome.preempted:
        # The head keeps its place: whoever was admitted stood in front of whoever still waits.
        assert before.waiting == tuple(admitted) + after.waiting


@revisions
@settings(max_examples=150, deadline=None)
@given(index=st.integers(0, 10**9))
def test_invariants_hold_after_every_operation(revision: str, index: int) -> None:
    scheduler_class = REVISIONS[revision]
    drawn = scenario(seed=1, index=index, lacks=scheduler_class.lacks)
    for before, operation, after, outcome in walk(drawn, scheduler_class):
        check_invariants(after, drawn.config)
        if operation.op == "step" and outcome is not None:
            check_step(before, after, outcome, drawn.config)


def walk(
    drawn: Scenario, scheduler_class: type[Scheduler]
) -> list[tuple[State, Operation, State, StepOutcome | None]]:
    """Every operation of a scenario with the states around it."""
    scheduler = scheduler_class(drawn.config)
    state = initial_state(drawn.config)
    walked: list[tuple[State, Operation, State, StepOutcome | None]] = []
    for operation in drawn.operations:
        before, outcome = state, None
        if operation.op == "step":
            try:
                state, outcome = scheduler.step(state)
            except SchedulerFailure:
                return walked
        else:
            state = apply(drawn, scheduler, state, operation)
        walked.append((before, operation, state, outcome))
    return walked


@revisions
@settings(max_examples=100, deadline=None)
@given(index=st.integers(0, 10**9))
def test_a_blocked_head_changes_nothing(revision: str, index: int) -> None:
    """Where nothing ran and nobody was admitted, a step leaves every bit of state as it was."""
    scheduler_class = REVISIONS[revision]
    drawn = scenario(seed=2, index=index, lacks=scheduler_class.lacks)
    for before, operation, after, outcome in walk(drawn, scheduler_class):
        if operation.op == "step" and outcome is not None and not outcome.num_scheduled_tokens:
            assert outcome.preempted or after == before


def test_states_are_immutable_and_hashable() -> None:
    drawn = scenario(seed=0, index=3)
    states = [after for _, _, after, _ in walk(drawn, REVISIONS["0.33.0"])]
    assert len({*states}) > 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        states[0].waiting = ()  # type: ignore[misc]


SMALL = {"num_gpu_blocks": 4, "block_size": 2, "max_model_len": 8, "max_num_seqs": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 7, "enable_chunked_prefill": False}, "chunked prefill"),
        ({"max_num_batched_tokens": 8, "max_num_active_seqs": 3}, "max_num_active_seqs"),
        ({"max_num_batched_tokens": 8, "long_prefill_token_threshold": 9}, "long_prefill"),
        ({"max_num_batched_tokens": 8, "watermark": 1.0}, "watermark"),
        ({"max_num_batched_tokens": 8, "policy": "lifo"}, "policy"),
        ({"max_num_batched_tokens": 8, "num_gpu_blocks": 1}, "num_gpu_blocks"),
    ],
)
def test_a_configuration_that_vllm_refuses_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SMALL, **fields})  # type: ignore[arg-type]


def test_configuration_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        Config(4, 2, 8, 2, 8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("revision", "fields"),
    [
        ("0.23.0", {"watermark": 0.1}),
        ("0.29.0", {"max_num_active_seqs": 1}),
        ("0.29.0", {"long_prefill_token_threshold_adaptive": True}),
    ],
)
def test_a_field_that_a_revision_lacks_is_refused_by_name(
    revision: str, fields: dict[str, object]
) -> None:
    config = Config(max_num_batched_tokens=8, **SMALL, **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=next(iter(fields))):
        REVISIONS[revision](config)
