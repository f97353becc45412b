"""The checks that ``mustfit prove`` goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from mustfit_checks.invariants import broken_by_state
from mustfit_checks.proofs import Asking, Cases, Check, Program, asking, blocks_for
from mustfit_checks.symbolic import (
    assume,
    both,
    greatest,
    implies,
    integer,
    least,
    same,
    show,
    witness,
)
from mustfit_checks.worlds import Shape, shapes, waiting_loop
from mustfit_spec import Scheduler
from mustfit_spec.scheduler import Step

#: Block sizes for which formulas are shown.
BLOCK_SIZES = range(1, 65)
#: Prefix hits for which they are: with none, and with several held by some and none.
HITS = range(5)

_SCOPE = (
    "block sizes 1 to 64; prefix hits of 0 to 4 blocks, each held by any number of requests; token "
    "counts, free blocks, max_model_len and watermark without a bound"
)


def _not(condition: object) -> object:
    return condition == False  # noqa: E712 - a condition, not a value


# --- The gate ---------------------------------------------------------------------------------


def _gate(scheduler: type[Scheduler]) -> Iterator[Program]:
    for block_size in BLOCK_SIZES:
        for num_hits in HITS:
            yield partial(_gate_is_exact, scheduler, block_size, num_hits)


def _gate_is_exact(scheduler: type[Scheduler], block_size: int, num_hits: int) -> None:
    asked = asking(scheduler, block_size, num_hits)
    fits = _fits(asked)
    # A prompt beyond the model may hit more blocks than the model has.
    wanted = greatest(asked.known - asked.active, asked.inactive)
    show((wanted + asked.watermark <= asked.free) == fits, "the gate is exact")
    show(
        implies(
            asked.request.num_tokens <= asked.scheduler.config.max_model_len,
            (asked.known - asked.active + asked.watermark <= asked.free) == fits,
        ),
        "within the model, the gate counts all blocks that aren't active",
    )
    witness("it fits", fits)
    witness("it doesn't fit", _not(fits))
    new_only = wanted - asked.inactive + asked.watermark <= asked.free
    witness("an inactive hit decides", both(_not(fits), asked.inactive > 0, new_only))


def _fits(asked: Asking) -> object:
    return asked.scheduler.full_sequence_fits(
        asked.state, asked.request, asked.hits, asked.watermark
    )


# --- The gate and the chunk -------------------------------------------------------------------


def _chunk(scheduler: type[Scheduler]) -> Iterator[Program]:
    for block_size in BLOCK_SIZES:
        for num_hits in HITS:
            yield partial(_gate_implies_chunk, scheduler, block_size, num_hits)


def _gate_implies_chunk(scheduler: type[Scheduler], block_size: int, num_hits: int) -> None:
    asked = asking(scheduler, block_size, num_hits)
    num_hit_tokens = num_hits * block_size
    num_new_tokens = integer("num_new_tokens", 1)
    assume(num_hit_tokens + num_new_tokens <= asked.request.num_tokens)
    lookahead = integer("num_lookahead_tokens", 0)
    gate = _fits(asked)
    slots = asked.scheduler.num_tokens_need_slot(
        asked.request, num_new_tokens, num_hit_tokens, lookahead
    )
    chunk = asked.scheduler.chunk_fits(
        asked.state, asked.request, slots, asked.hits, asked.watermark
    )
    show(
        implies(both(gate, lookahead == 0), chunk),
        "without lookahead, what passes the gate can't fail the chunk's own check",
    )
    tokens = num_hit_tokens + num_new_tokens + lookahead
    within = least(tokens, asked.scheduler.config.max_model_len)
    blocks = blocks_for("blocks_for_slots", within, block_size)
    too_many = greatest(blocks - asked.active, asked.inactive) + asked.watermark > asked.free
    show(chunk == _not(too_many), "the chunk's check is exact")
    show(
        implies(
            both(gate, _not(chunk)),
            tokens > asked.request.num_tokens,
        ),
        "with lookahead, it fails only where the slots reach beyond all known tokens",
    )
    witness("it passes both", both(gate, chunk))
    witness("lookahead alone refuses it", both(gate, _not(chunk)))


# --- What passes the gate can be allocated ----------------------------------------------------


def _allocatable(scheduler: type[Scheduler]) -> Iterator[Program]:
    for block_size in BLOCK_SIZES:
        for num_hits in HITS:
            yield partial(_gate_implies_allocatable, scheduler, block_size, num_hits)


def _gate_implies_allocatable(scheduler: type[Scheduler], block_size: int, num_hits: int) -> None:
    asked = asking(scheduler, block_size, num_hits)
    gate = _fits(asked)
    # Taking the hits leaves these; and then the new blocks are taken.
    left = asked.free - asked.inactive
    new = greatest(asked.known - num_hits, 0)
    show(implies(gate, new <= left), "what passes the gate can be allocated whole")
    witness("with an inactive hit", both(gate, asked.inactive > 0))
    witness("with an active hit", both(gate, asked.active > 0))
    witness("with nothing left", both(gate, new == left, new > 0))


# --- The waiting loop -------------------------------------------------------------------------


def _one_waits(show_it: Callable[[Scheduler, Step, Step], None]) -> Cases:
    return partial(_loop, show_it, tuple(shapes((1, 2), 2)), 1)


def _two_wait(show_it: Callable[[Scheduler, Step, Step], None]) -> Cases:
    return partial(_loop, show_it, tuple(shapes((2,), 2)), 2)


def _loop(
    show_it: Callable[[Scheduler, Step, Step], None],
    all_shapes: tuple[Shape, ...],
    num_waiting: int,
    scheduler: type[Scheduler],
) -> Iterator[Program]:
    for shape in all_shapes:
        yield partial(_waited, show_it, shape, num_waiting, scheduler)


def _waited(
    show_it: Callable[[Scheduler, Step, Step], None],
    shape: Shape,
    num_waiting: int,
    scheduler: type[Scheduler],
) -> None:
    made, before = waiting_loop(scheduler, shape, num_waiting)
    after = made.schedule_waiting(before)
    show_it(made, before, after)
    admitted = len(after.num_cached_tokens)
    witness(f"{admitted} of {num_waiting} admitted")
    if admitted and after.num_cached_tokens[0][1]:
        witness("a prefix hit")


def _nobody_is_preempted(_: Scheduler, before: Step, after: Step) -> None:
    show(same(after.preempted, before.preempted), "nobody is preempted")
    ran = before.state.running
    show(same(after.state.running[: len(ran)], ran), "who ran goes on")
    for request_id in ran:
        was, now = before.state.request(request_id), after.state.request(request_id)
        show(same(was, now), "who ran is as before")
    for number, tokens in after.num_scheduled_tokens:
        show(tokens >= 1, f"{number} gets tokens")
    show(after.token_budget >= 0, "the budget is kept")


def _refusal_changes_nothing(_: Scheduler, before: Step, after: Step) -> None:
    if not after.num_cached_tokens:
        show(same(after, before), "a refusal changes nothing")


def _head_hides_everybody(_: Scheduler, before: Step, after: Step) -> None:
    admitted = tuple(request_id for request_id, _ in after.num_cached_tokens)
    waiting = before.state.waiting
    show(same(admitted, waiting[: len(admitted)]), "the first are admitted first")
    show(same(after.state.waiting, waiting[len(admitted) :]), "all others keep their places")


def _books_are_kept(scheduler: Scheduler, before: Step, after: Step) -> None:
    show(same(broken_by_state(scheduler, before.state), []), "they were in order before")
    show(same(broken_by_state(scheduler, after.state), []), "they are in order after")


_LOOP_SCOPE = (
    "one running request or none, its block table of 0 to {blocks} blocks, the others of up to "
    "{blocks} in all free; {waiting} waiting, new or preempted, of the same tokens, whose first "
    "block is cached, held or free, or isn't; block sizes {sizes}; prompts, outputs, budget, "
    "threshold, seats, lookahead, watermark and max_model_len without a bound; the gate and "
    "chunked prefill on and off; fcfs"
)
_ONE = _LOOP_SCOPE.format(blocks=2, waiting="one", sizes="1 and 2")
_TWO = _LOOP_SCOPE.format(blocks=2, waiting="two", sizes="2")

CHECKS: tuple[Check, ...] = (
    Check(
        name="gate-is-exact",
        statement="A request passes the gate if and only if the blocks for min(num_tokens, "
        "max_model_len) tokens that are not active already, and the watermark, are free. Where a "
        "prompt beyond the model hits more blocks than the model has, its inactive hits.",
        rules=(
            "ALLOC-GATE",
            "ALLOC-GATE-LENGTH",
            "ALLOC-COUNT",
            "ALLOC-INACTIVE-HIT",
        ),
        scope=_SCOPE,
        cases=_gate,
        happens=("it fits", "it doesn't fit", "an inactive hit decides"),
    ),
    Check(
        name="gate-implies-chunk",
        statement="Without lookahead, a request that passes the gate can't fail the chunk's own "
        "check. With it, it can, and only if its slots reach beyond all its known tokens.",
        rules=("ALLOC-CHUNK", "ALLOC-SLOTS", "ALLOC-GATE", "ALLOC-GATE-LENGTH", "ALLOC-COUNT"),
        scope=_SCOPE,
        cases=_chunk,
        happens=("it passes both", "lookahead alone refuses it"),
    ),
    Check(
        name="gate-implies-allocatable",
        statement="Inactive hits count, active ones don't: what passes the gate can be allocated "
        "whole, at that instant.",
        rules=("ALLOC-GATE", "ALLOC-INACTIVE-HIT", "ALLOC-COUNT", "ALLOC-GATE-LENGTH"),
        scope=_SCOPE,
        cases=_allocatable,
        happens=("with an inactive hit", "with an active hit", "with nothing left"),
    ),
    Check(
        name="admission-preempts-nobody",
        statement="No admission attempt, successful or not, preempts anybody or takes anything "
        "from who runs.",
        rules=("WAIT-BLOCKED", "WAIT-LOOP", "WAIT-GATE", "WAIT-ADMIT", "ALLOC-REFUSE"),
        scope=_ONE,
        cases=_one_waits(_nobody_is_preempted),
        happens=("0 of 1 admitted", "1 of 1 admitted", "a prefix hit"),
    ),
    Check(
        name="refusal-changes-nothing",
        statement="A refused admission leaves the state as it was, bit for bit.",
        rules=("ALLOC-REFUSE", "WAIT-BLOCKED", "WAIT-LOOP"),
        scope=_ONE,
        cases=_one_waits(_refusal_changes_nothing),
        happens=("0 of 1 admitted",),
    ),
    Check(
        name="admission-keeps-the-books",
        statement="After an attempt, each block is still null, free or in tables, and in one of "
        "these; reference counts are the numbers of tables; who waits holds nothing.",
        rules=("ALLOC-TAKE", "ALLOC-REFUSE", "ALLOC-HEAD", "CACHE-TOUCH", "CACHE-EVICT"),
        scope=_ONE,
        cases=_one_waits(_books_are_kept),
        happens=("0 of 1 admitted", "1 of 1 admitted", "a prefix hit"),
    ),
    Check(
        name="blocked-head-hides-everybody",
        statement="Who can't be admitted keeps the head of the queue, and nobody behind is "
        "admitted; who is admitted comes from the head.",
        rules=("WAIT-BLOCKED", "WAIT-LOOP", "WAIT-ADMIT"),
        scope=_TWO,
        cases=_two_wait(_head_hides_everybody),
        happens=("0 of 2 admitted", "1 of 2 admitted", "2 of 2 admitted"),
    ),
)
