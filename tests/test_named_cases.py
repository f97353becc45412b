"""Two running requests, a tight pool, and a prompt that doesn't fit: what happens, step by step.

The case that simulators of vLLM get wrong, its sibling with a cached prefix, and what seldom comes
together by chance. Each runs on every revision of the specification and of the implementation, and
on the real scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from mustfit_checks.measured import order
from mustfit_spec import Config, NewRequest, Operation, Scenario, StepTrace, Trace

Ask = Callable[[Scenario], Trace]

STEP = Operation(op="step")

#: Six blocks of four tokens to hand out, and the null block.
CONFIG = Config(
    num_gpu_blocks=7,
    block_size=4,
    max_model_len=24,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def add(request_id: str) -> Operation:
    return Operation(op="add", request_id=request_id)


def request(request_id: str, prompt: int, outputs: int, *, prefix: str | None = None) -> NewRequest:
    """A request whose prompt starts like that of the request ``prefix``, or like no other."""
    first = 100 * (1 + ord(prefix or request_id))
    return NewRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(first, first + prompt)),
        sampled_token_ids=tuple(range(50, 50 + outputs)),
    )


def steps_of(trace: Trace) -> tuple[StepTrace, ...]:
    assert trace.error is None
    return trace.steps


def assert_nobody_preempted(steps: tuple[StepTrace, ...]) -> None:
    assert [step.preempted for step in steps] == [()] * len(steps)


# --- A prompt of three blocks, and two are free ---------------------------------------------------


def gate_off(*, max_num_batched_tokens: int, long_prefill_token_threshold: int = 0) -> Config:
    return attrs.evolve(
        CONFIG,
        scheduler_reserve_full_isl=False,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
    )


def tight(config: Config) -> Scenario:
    """``a`` and ``b`` run with two blocks each; ``c`` needs three; ``d`` needs one."""
    return Scenario(
        scenario_id="tight",
        config=config,
        # Neither a nor b outgrows its two blocks. a ends in the third step, b in the fourth.
        requests=(
            request("a", 5, 3),
            request("b", 5, 4),
            request("c", 12, 2),
            request("d", 2, 2),
        ),
        operations=(add("a"), add("b"), STEP, add("c"), add("d"), *[STEP] * 5),
    )


def test_gate_on_waits_until_a_running_request_ends(ask: Ask) -> None:
    steps = steps_of(ask(tight(CONFIG)))
    assert_nobody_preempted(steps)
    assert steps[0].num_scheduled_tokens == {"a": 5, "b": 5}
    assert steps[0].num_free_blocks == 2
    # Refused twice; nothing changes, and d, which would fit, is hidden.
    for step in steps[1:3]:
        assert step.num_scheduled_tokens == {"a": 1, "b": 1}
        assert step.waiting == ("c", "d")
    assert steps[1].running == ("a", "b")
    assert steps[1].num_free_blocks == 2
    # a ends with the third step's output, so its blocks are free from the fourth on.
    assert steps[2].finished == ("a",)
    assert steps[2].running == ("b",)
    assert steps[2].num_free_blocks == 4
    assert steps[3].num_scheduled_tokens == {"b": 1, "c": 12, "d": 2}
    assert steps[3].waiting == ()


def test_gate_on_refuses_what_the_chunk_would_allow(ask: Ask) -> None:
    """a and b leave 8 tokens of the budget: a chunk of two blocks would fit, the whole doesn't."""
    steps = steps_of(ask(tight(attrs.evolve(CONFIG, max_num_batched_tokens=10))))
    assert_nobody_preempted(steps)
    for step in steps[1:3]:
        assert step.num_scheduled_tokens == {"a": 1, "b": 1}
        assert step.waiting == ("c", "d")
    assert steps[1].num_free_blocks == 2
    assert steps[2].finished == ("a",)
    assert steps[3].num_scheduled_tokens == {"b": 1, "c": 9}
    assert steps[3].waiting == ("d",)


def test_gate_off_chunk_does_not_fit(ask: Ask) -> None:
    """a and b leave 10 tokens of the budget: a chunk of three blocks. It waits as with the gate."""
    steps = steps_of(ask(tight(gate_off(max_num_batched_tokens=12))))
    assert_nobody_preempted(steps)
    for step in steps[1:3]:
        assert step.num_scheduled_tokens == {"a": 1, "b": 1}
        assert step.waiting == ("c", "d")
    assert steps[1].num_free_blocks == 2
    assert steps[2].finished == ("a",)
    assert steps[3].num_scheduled_tokens == {"b": 1, "c": 11}
    assert steps[3].waiting == ("d",)


def test_gate_off_chunk_fits_and_is_preempted_by_itself(ask: Ask) -> None:
    """a and b leave 8 tokens: a chunk of two blocks. It is admitted, and cannot go on."""
    steps = steps_of(ask(tight(gate_off(max_num_batched_tokens=10))))
    assert steps[1].num_scheduled_tokens == {"a": 1, "b": 1, "c": 8}
    assert steps[1].running == ("a", "b", "c")
    assert steps[1].waiting == ("d",)
    assert steps[1].num_free_blocks == 0
    assert_nobody_preempted(steps[:2])
    # Its next chunk needs a block. The last of running is c itself; a and b lose nothing.
    assert steps[2].preempted == ("c",)
    assert steps[2].num_scheduled_tokens == {"a": 1, "b": 1}
    assert steps[2].finished == ("a",)
    assert steps[2].waiting == ("c", "d")
    assert steps[2].num_free_blocks == 4
    # It comes back, and hits what it had computed itself.
    assert steps[3].num_scheduled_tokens == {"b": 1, "c": 4, "d": 2}
    assert steps[3].num_cached_tokens == {"c": 8, "d": 0}
    assert_nobody_preempted(steps[3:])


def test_gate_off_chunk_fits_and_is_preempted_by_a_running_request(ask: Ask) -> None:
    """As before, but a needs a third block, when c has taken the last."""
    # c's chunk is 8 tokens by the threshold.
    scenario = tight(gate_off(max_num_batched_tokens=14, long_prefill_token_threshold=8))
    scenario = attrs.evolve(
        scenario,
        requests=(request("a", 7, 6), *scenario.requests[1:]),
    )
    steps = steps_of(ask(scenario))
    assert steps[0].num_scheduled_tokens == {"a": 7, "b": 5}
    assert steps[1].num_scheduled_tokens == {"a": 1, "b": 1, "c": 8}
    assert steps[1].num_free_blocks == 0
    assert_nobody_preempted(steps[:2])
    # a's ninth token: the running loop preempts, as the waiting loop never does.
    assert steps[2].preempted == ("c",)
    assert steps[2].num_scheduled_tokens == {"a": 1, "b": 1}
    assert steps[2].running == ("a", "b")
    assert steps[2].waiting == ("c", "d")
    assert steps[2].num_blocks == {"a": 3, "b": 2}
    assert steps[2].num_free_blocks == 1


# --- The sibling with a cached prefix -------------------------------------------------------------

GATE = pytest.mark.parametrize("gate", [True, False], ids=["gate-on", "gate-off"])


@GATE
def test_inactive_hits_count(ask: Ask, *, gate: bool) -> None:
    """c hits two inactive blocks and needs one new one: three of the two that are free."""
    scenario = Scenario(
        scenario_id="inactive-hits",
        config=attrs.evolve(CONFIG, scheduler_reserve_full_isl=gate),
        requests=(
            request("p", 8, 1),
            request("a", 5, 3),
            request("b", 5, 4),
            request("c", 12, 2, prefix="p"),
        ),
        operations=(add("p"), STEP, add("a"), add("b"), STEP, add("c"), *[STEP] * 3),
    )
    steps = steps_of(ask(scenario))
    assert_nobody_preempted(steps)
    assert steps[0].finished == ("p",)
    # What p left is all that is free, and still cached.
    assert steps[1].num_scheduled_tokens == {"a": 5, "b": 5}
    assert steps[1].free_block_ids == (2, 1)
    assert steps[1].cached_block_ids is not None
    assert {(1,), (2,)} <= set(steps[1].cached_block_ids)
    # New blocks alone, one, would fit.
    assert steps[2].num_scheduled_tokens == {"a": 1, "b": 1}
    assert steps[2].running == ("a", "b")
    assert steps[2].waiting == ("c",)
    assert steps[2].num_free_blocks == 2
    assert steps[2].free_block_ids == (2, 1)
    assert steps[3].finished == ("a",)
    assert steps[3].waiting == ("c",)
    assert steps[3].num_free_blocks == 4
    # Admitted once three are free; the two hit blocks leave the free queue as well.
    assert steps[4].num_cached_tokens == {"c": 8}
    assert steps[4].num_scheduled_tokens == {"b": 1, "c": 4}
    assert steps[4].block_ids is not None
    assert steps[4].block_ids["c"][:2] == (1, 2)


@GATE
def test_active_hits_do_not_count(ask: Ask, *, gate: bool) -> None:
    """c hits the same two blocks while p holds them: one block is free, and that is enough."""
    scenario = Scenario(
        scenario_id="active-hits",
        config=attrs.evolve(CONFIG, scheduler_reserve_full_isl=gate),
        requests=(
            request("p", 8, 3),
            request("a", 5, 3),
            request("c", 12, 2, prefix="p"),
        ),
        operations=(add("p"), add("a"), STEP, STEP, add("c"), STEP),
    )
    steps = steps_of(ask(scenario))
    assert_nobody_preempted(steps)
    assert steps[1].num_blocks == {"p": 3, "a": 2}
    assert steps[1].num_free_blocks == 1
    assert steps[2].num_scheduled_tokens == {"p": 1, "a": 1, "c": 4}
    assert steps[2].num_cached_tokens == {"c": 8}
    assert steps[2].waiting == ()
    assert steps[2].finished == ("p", "a")
    assert steps[2].block_ids is not None
    assert steps[2].block_ids["c"][:2] == (1, 2)
    # c holds p's first two blocks alone now, and the one that was free; all others are free.
    assert steps[2].num_free_blocks == 3


def test_a_hit_that_grows_while_it_waits_lets_the_head_in(ask: Ask) -> None:
    """c lacks one block, until a fills the one that c's prompt begins with, too."""
    scenario = Scenario(
        scenario_id="growing-hit",
        config=attrs.evolve(CONFIG, num_gpu_blocks=5),
        requests=(
            NewRequest(
                request_id="a", prompt_token_ids=(1, 2), sampled_token_ids=(3, 4, 5, 6, 7, 8)
            ),
            NewRequest(
                request_id="c",
                prompt_token_ids=(1, 2, 3, 4, *range(20, 30)),
                sampled_token_ids=(9, 9),
            ),
        ),
        operations=(add("a"), add("c"), STEP, STEP, STEP),
    )
    steps = steps_of(ask(scenario))
    assert_nobody_preempted(steps)
    # Four blocks for c, and three are free.
    assert [step.num_scheduled_tokens for step in steps[:2]] == [{"a": 2}, {"a": 1}]
    assert [step.num_free_blocks for step in steps[:2]] == [3, 3]
    # a's fourth token fills its block; now c needs no more than the three that are free.
    assert steps[2].num_scheduled_tokens == {"a": 1, "c": 10}
    assert steps[2].num_cached_tokens == {"c": 4}
    assert steps[2].num_free_blocks == 0


# --- Budgets that don't go round ------------------------------------------------------------------


def test_a_victim_s_tokens_are_scheduled_again(ask: Ask) -> None:
    """By priority: a was scheduled one token, which d gets once a is preempted for c."""
    scenario = Scenario(
        scenario_id="refund",
        config=attrs.evolve(
            CONFIG,
            num_gpu_blocks=5,
            max_num_seqs=3,
            max_num_batched_tokens=8,
            long_prefill_token_threshold=4,
            policy="priority",
            scheduler_reserve_full_isl=False,
        ),
        requests=(
            attrs.evolve(request("a", 5, 9), priority=9),
            attrs.evolve(request("c", 12, 2), priority=1),
            attrs.evolve(request("d", 12, 2), priority=2),
        ),
        operations=(add("a"), STEP, STEP, add("c"), add("d"), STEP, STEP),
    )
    steps = steps_of(ask(scenario))
    assert steps[2].num_scheduled_tokens == {"a": 1, "c": 4, "d": 3}
    assert steps[2].num_free_blocks == 0
    assert steps[3].preempted == ("a",)
    assert steps[3].num_scheduled_tokens == {"c": 4, "d": 4}


def test_a_chunk_that_grows_leaves_nothing_for_those_behind(ask: Ask, release: str) -> None:
    """The threshold is shared by all who are there: when most have gone, a takes the whole budget.

    b decodes behind it, and gets nothing until a has its prompt. Where no threshold adapts, nothing
    grows.
    """
    names = "abcdefg"
    adapts = order(release) >= order("0.31.0")
    scenario = Scenario(
        scenario_id="growing-chunk",
        config=attrs.evolve(
            CONFIG,
            num_gpu_blocks=20,
            max_num_batched_tokens=16,
            max_num_scheduled_tokens=8,
            long_prefill_token_threshold=2,
            long_prefill_token_threshold_adaptive=adapts,
        ),
        requests=(
            request("a", 20, 3),
            request("b", 1, 5),
            *(request(name, 1, 1) for name in names[2:]),
        ),
        operations=(*(add(name) for name in names), *[STEP] * 4),
    )
    first, *others = steps_of(ask(scenario))
    assert first.num_scheduled_tokens == {"a": 2, **dict.fromkeys(names[1:], 1)}
    assert first.finished == tuple(names[2:])
    assert [step.num_scheduled_tokens for step in others] == (
        [{"a": 8}, {"a": 8}, {"a": 2, "b": 1}] if adapts else [{"a": 2, "b": 1}] * 3
    )
