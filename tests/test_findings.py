"""Where vLLM's scheduler contradicts itself (docs/semantics.md, "What contradicts itself").

Each is a small case, run on every revision of the specification and of the implementation, and on
the real scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from mustfit_checks.measured import order
from mustfit_spec import Config, NewRequest, Operation, Scenario, StepTrace, Trace

Ask = Callable[[Scenario], Trace]

STEP = Operation(op="step")
#: Steps in which nothing changes any more. What doesn't change in one step never will: a step
#: depends on nothing but the state.
FOR_EVER = 25


def add(request_id: str) -> Operation:
    return Operation(op="add", request_id=request_id)


def request(
    request_id: str,
    prompt: int,
    outputs: int,
    *,
    min_tokens: int = 0,
    priority: int = 0,
    arrival_time: int = 0,
) -> NewRequest:
    """A request with a prompt of its own."""
    first = 1000 * (1 + ord(request_id[0]))
    return NewRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(first, first + prompt)),
        sampled_token_ids=tuple(range(first + 500, first + 500 + outputs)),
        min_tokens=min_tokens,
        priority=priority,
        arrival_time=arrival_time,
    )


def before(release: str, changed: str) -> bool:
    return order(release) < order(changed)


def assert_assertion_fails(trace: Trace, step: int) -> None:
    """The scheduler's own assertion fails in that step."""
    assert len(trace.steps) == step
    assert trace.error is not None
    assert trace.error.step == step
    # The first is the specification's, the second vLLM's.
    assert trace.error.kind in {"SchedulerFailure", "AssertionError"}
    if trace.error.kind == "AssertionError":
        assert "assert num_tokens_scheduled > 0" in trace.error.message


def assert_stays_for_ever(steps: tuple[StepTrace, ...], request_id: str, num_blocks: int) -> None:
    """It runs, holds so many blocks, and gets nothing, in each of these steps."""
    assert len(steps) >= FOR_EVER
    for step in steps:
        assert request_id in step.running
        assert request_id not in step.num_scheduled_tokens
        assert request_id not in step.preempted
        assert request_id not in step.finished
        assert step.num_blocks is not None
        assert step.num_blocks[request_id] == num_blocks
    assert all(step == steps[-1] for step in steps[-FOR_EVER:])


def long_prompt(*, prompt: int, max_num_batched_tokens: int) -> Scenario:
    """A prompt of at least ``max_model_len`` (8) tokens, then a short request."""
    return Scenario(
        scenario_id="long-prompt",
        config=Config(
            num_gpu_blocks=7,
            block_size=4,
            max_model_len=8,
            max_num_seqs=2,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        requests=(request("long", prompt, 2), request("short", 2, 2)),
        operations=(add("long"), STEP, STEP, add("short"), *[STEP] * (4 + FOR_EVER)),
    )


def test_prompt_of_max_model_len_in_one_chunk_ends_at_once(ask: Ask) -> None:
    trace = ask(long_prompt(prompt=8, max_num_batched_tokens=8))
    assert trace.error is None
    assert trace.steps[0].num_scheduled_tokens == {"long": 8}
    assert trace.steps[0].finish_reasons == {"long": "length"}


def test_prompt_of_max_model_len_in_two_chunks_never_ends(ask: Ask) -> None:
    trace = ask(long_prompt(prompt=8, max_num_batched_tokens=4))
    assert trace.error is None
    assert trace.steps[0].num_scheduled_tokens == {"long": 4}
    # Not 4: the running loop leaves out the last token.
    assert trace.steps[1].num_scheduled_tokens == {"long": 3}
    assert_stays_for_ever(trace.steps[2:], "long", num_blocks=2)
    # The others are served; the blocks are lost to them.
    assert trace.steps[2].num_scheduled_tokens == {"short": 2}
    assert trace.steps[3].finished == ("short",)
    assert trace.steps[-1].running == ("long",)
    assert trace.steps[-1].num_free_blocks == 4


def test_prompt_longer_than_max_model_len_in_chunks_never_ends(ask: Ask) -> None:
    trace = ask(long_prompt(prompt=11, max_num_batched_tokens=4))
    assert trace.error is None
    assert [step.num_scheduled_tokens for step in trace.steps[:2]] == [{"long": 4}, {"long": 3}]
    assert_stays_for_ever(trace.steps[2:], "long", num_blocks=2)


def test_chunk_beyond_the_end_fails_or_stays(release: str, ask: Ask) -> None:
    """The admission's chunk has no limit at ``max_model_len``: it may end at the eighth token."""
    trace = ask(long_prompt(prompt=9, max_num_batched_tokens=8))
    assert trace.steps[0].num_scheduled_tokens == {"long": 8}
    if before(release, "0.28.0"):
        assert_assertion_fails(trace, step=1)
    else:
        assert trace.error is None
        assert_stays_for_ever(trace.steps[1:], "long", num_blocks=2)


def min_tokens_beyond_the_end(*operations: Operation) -> Scenario:
    """A prompt of 6 tokens that must not end before 4 more; ``max_model_len`` is 8."""
    return Scenario(
        scenario_id="min-tokens",
        config=Config(
            num_gpu_blocks=7,
            block_size=4,
            max_model_len=8,
            max_num_seqs=2,
            max_num_batched_tokens=16,
        ),
        requests=(request("eager", 6, 5, min_tokens=4),),
        operations=(add("eager"), STEP, STEP, *operations),
    )


def test_min_tokens_beyond_max_model_len_never_ends(release: str, ask: Ask) -> None:
    trace = ask(min_tokens_beyond_the_end(*[STEP] * FOR_EVER))
    assert trace.error is None
    assert [step.num_scheduled_tokens for step in trace.steps[:2]] == [{"eager": 6}, {"eager": 1}]
    if before(release, "0.29.0"):
        assert trace.steps[1].finished == ()
        assert_stays_for_ever(trace.steps[2:], "eager", num_blocks=2)
    else:
        assert trace.steps[1].finish_reasons == {"eager": "length"}
        assert trace.steps[1].running == ()


def test_min_tokens_beyond_max_model_len_resumed(release: str, ask: Ask) -> None:
    """Preempted and resumed, it computes its eighth token, which a running request never does."""
    reset = Operation(op="reset_prefix_cache", reset_running_requests=True)
    trace = ask(min_tokens_beyond_the_end(STEP, reset, STEP, *[STEP] * FOR_EVER))
    if before(release, "0.29.0"):
        assert trace.steps[2].num_scheduled_tokens == {}
        assert trace.steps[3].num_scheduled_tokens == {"eager": 8}
        assert trace.steps[3].running == ("eager",)
        assert trace.steps[3].finished == ()
    if before(release, "0.28.0"):
        assert_assertion_fails(trace, step=4)
    elif before(release, "0.29.0"):
        assert trace.error is None
        assert_stays_for_ever(trace.steps[4:], "eager", num_blocks=2)
    else:
        assert trace.error is None
        assert trace.steps[1].finish_reasons == {"eager": "length"}


def test_victim_that_was_passed_over_costs_a_turn(release: str, ask: Ask) -> None:
    """By priority: "stuck" is in front, is passed over, and is the victim of "x"."""
    trace = ask(
        Scenario(
            scenario_id="lost-turn",
            config=Config(
                num_gpu_blocks=5,
                block_size=4,
                max_model_len=8,
                max_num_seqs=3,
                max_num_batched_tokens=16,
                long_prefill_token_threshold=4,
                policy="priority",
            ),
            requests=(
                request("stuck", 8, 1, priority=9, arrival_time=0),
                # Company for its first step: from 0.31.0 on the threshold spares who is alone.
                request("brief", 1, 1, priority=9, arrival_time=1),
                request("x", 3, 4, priority=1, arrival_time=2),
                request("y", 3, 4, priority=1, arrival_time=3),
            ),
            operations=(
                *(add("stuck"), add("brief"), STEP),
                *(add("x"), add("y"), STEP, STEP, STEP, STEP),
            ),
        )
    )
    assert trace.error is None
    chunk, admitted, decode, tight, after = trace.steps
    assert chunk.num_scheduled_tokens == {"stuck": 4, "brief": 1}
    assert chunk.finished == ("brief",)
    assert admitted.num_scheduled_tokens == {"stuck": 3, "x": 3, "y": 3}
    assert admitted.running == ("stuck", "x", "y")
    assert decode.num_scheduled_tokens == {"x": 1, "y": 1}
    assert decode.num_free_blocks == 0
    # Both need their second block. The victim leaves two.
    assert tight.preempted == ("stuck",)
    assert tight.running == ("x", "y")
    if before(release, "0.28.0"):
        assert tight.num_scheduled_tokens == {"x": 1}
        assert tight.num_free_blocks == 1
    else:
        assert tight.num_scheduled_tokens == {"x": 1, "y": 1}
        assert tight.num_free_blocks == 0
    assert after.num_scheduled_tokens["y"] == 1


def test_a_second_budget_below_a_prompt_starves_it_without_chunked_prefill(
    ask: Callable[[Scenario], Trace],
) -> None:
    """With a hundred free blocks, nobody is ever started."""
    trace = ask(
        Scenario(
            scenario_id="starved",
            config=Config(
                num_gpu_blocks=101,
                block_size=1,
                max_model_len=10,
                max_num_seqs=2,
                max_num_batched_tokens=10,
                max_num_scheduled_tokens=3,
                enable_chunked_prefill=False,
            ),
            requests=(
                NewRequest(
                    request_id="long", prompt_token_ids=(1, 2, 3, 4), sampled_token_ids=(9,)
                ),
                NewRequest(request_id="short", prompt_token_ids=(5,), sampled_token_ids=(9,)),
            ),
            operations=(
                Operation(op="add", request_id="long"),
                Operation(op="add", request_id="short"),
                *[Operation(op="step")] * 4,
            ),
        )
    )
    assert trace.error is None
    for step in trace.steps:
        assert step.num_scheduled_tokens == {}
        assert step.waiting == ("long", "short")
        assert step.num_free_blocks == 100


def test_a_negative_chunk_whose_owner_is_preempted_exceeds_the_budget(
    ask: Callable[[Scenario], Trace], release: str
) -> None:
    """Up to 0.27.1: "long" is beyond the end and gets -1 token, which "one" uses, and is preempted.

    Found by chance, once in 100,000 scenarios.
    """
    trace = ask(
        Scenario(
            scenario_id="over-budget",
            config=Config(
                num_gpu_blocks=6,
                block_size=4,
                max_model_len=13,
                max_num_seqs=3,
                max_num_batched_tokens=7,
                policy="priority",
                scheduler_reserve_full_isl=False,
            ),
            requests=(
                NewRequest(
                    request_id="long",
                    prompt_token_ids=tuple(range(12)),
                    sampled_token_ids=(12, 13, 14),
                    min_tokens=3,
                ),
                NewRequest(
                    request_id="two",
                    prompt_token_ids=(15,),
                    sampled_token_ids=tuple(range(16, 28)),
                ),
                NewRequest(
                    request_id="one",
                    prompt_token_ids=(15,),
                    sampled_token_ids=tuple(range(28, 38)),
                ),
            ),
            operations=(
                *(add(request_id) for request_id in ("long", "two", "one")),
                *[STEP] * 17,
            ),
        )
    )
    if order(release) < order("0.28.0"):
        assert trace.error is not None
        assert trace.error.step == 16
        assert len(trace.steps) == 16
    else:
        assert trace.error is None


def test_a_negative_chunk_lacks_no_blocks(ask: Ask, release: str) -> None:
    """Up to 0.27.1: "long" is to compute -8 tokens, for which it holds a block too many.

    That one isn't there for "two", which preempts it. A tie by priority and arrival is lost by
    whoever has run longer.
    """
    trace = ask(
        Scenario(
            scenario_id="negative-blocks",
            config=Config(
                num_gpu_blocks=6,
                block_size=4,
                max_model_len=13,
                max_num_seqs=2,
                max_num_batched_tokens=24,
                policy="priority",
                scheduler_reserve_full_isl=False,
            ),
            requests=(
                request("long", 20, 3, min_tokens=3),
                request("two", 4, 4),
            ),
            operations=(add("long"), add("two"), STEP, STEP),
        )
    )
    assert trace.error is None
    first, second = trace.steps
    assert first.num_scheduled_tokens == {"long": 20, "two": 4}
    assert second.num_scheduled_tokens == {"two": 1}
    if before(release, "0.29.0"):
        assert first.num_free_blocks == 0
        assert second.preempted == ("long",)
        assert second.num_free_blocks == 3
    else:
        # It ended with its first token.
        assert first.finished == ("long",)
        assert second.preempted == ()
