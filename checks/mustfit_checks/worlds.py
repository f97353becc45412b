"""Small pools with requests of any length: what the waiting loop is shown on.

Blocks, and who holds which, are enumerated; token counts, budgets and limits are symbolic and
without a bound, and so are the switches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs

from mustfit_checks.proofs import Share, made
from mustfit_checks.symbolic import assume, boolean, integer, least, length
from mustfit_spec import Config, NewRequest, Request, RequestStatus, Scheduler, State
from mustfit_spec.scheduler import Step
from mustfit_spec.state import KVCacheBlock


class Tokens:
    """The first tokens of an endless sequence: how many is symbolic.

    Attributes:
        symbolic_length: How many.
        sequence: Which sequence. Two differ in their first token already.
    """

    def __init__(self, sequence: str, symbolic_length: Any) -> None:
        self.sequence = sequence
        self.symbolic_length = symbolic_length

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.sequence, self.symbolic_length + other.symbolic_length)

    def __getitem__(self, part: slice) -> Tokens:
        if part.start is not None or part.step is not None:
            raise NotImplementedError("only the first tokens are known")
        return Tokens(self.sequence, least(part.stop, self.symbolic_length))

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, Tokens) or other.sequence != self.sequence:
            return False
        return self.symbolic_length == other.symbolic_length

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.sequence}[:{self.symbolic_length}]"


@attrs.frozen(kw_only=True)
class Shape:
    """What is enumerated.

    Attributes:
        block_size: Tokens that a block holds.
        num_free: Blocks that nobody holds.
        num_held: Blocks that somebody who runs holds; with 0, nobody runs.
        cached: Which block holds the first block of everybody's tokens: the first ``held``, the
            first ``free``, or ``none``.
    """

    block_size: int
    num_free: int
    num_held: int
    cached: str


def shapes(block_sizes: tuple[int, ...], most_blocks: int) -> Iterator[Shape]:
    """All that fit into pools of so many blocks."""
    counts = range(most_blocks + 1)
    for size, free, held in product(block_sizes, counts, counts):
        if not 1 <= free + held <= most_blocks:
            continue
        yield Shape(block_size=size, num_free=free, num_held=held, cached="none")
        if held:
            yield Shape(block_size=size, num_free=free, num_held=held, cached="held")
        if free:
            yield Shape(block_size=size, num_free=free, num_held=held, cached="free")


def waiting_loop(
    scheduler: type[Scheduler], shape: Shape, num_waiting: int
) -> tuple[Scheduler, Step]:
    """A step that has come to the waiting loop; so many wait, of the same tokens."""
    num_blocks = 1 + shape.num_free + shape.num_held
    max_num_seqs = integer("max_num_seqs", 1)
    chunked = boolean("enable_chunked_prefill")
    config = made(
        Config,
        num_gpu_blocks=num_blocks,
        block_size=shape.block_size,
        max_model_len=integer("max_model_len", 2),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=integer("max_num_batched_tokens", 1),
        enable_chunked_prefill=chunked,
        scheduler_reserve_full_isl=boolean("scheduler_reserve_full_isl"),
        watermark=Share(integer("watermark_blocks", 0)),
        num_lookahead_tokens=integer("num_lookahead_tokens", 0),
    )
    held = tuple(range(1, 1 + shape.num_held))
    free = tuple(range(1 + shape.num_held, num_blocks))
    cached = {"held": held[:1], "free": free[:1], "none": ()}[shape.cached]
    prefix = Tokens("tokens", shape.block_size)
    blocks = tuple(
        made(
            KVCacheBlock,
            block_id=block_id,
            ref_cnt=int(block_id in held),
            block_hash=prefix if block_id in cached else None,
        )
        for block_id in range(num_blocks)
    )
    running: tuple[Request, ...] = ()
    if held:
        assume(max_num_seqs >= 1)
        computed = integer("num_computed_tokens_r", 0)
        assume(computed <= shape.num_held * shape.block_size)
        running = (
            made(
                Request,
                given=_given("r"),
                status=RequestStatus.RUNNING,
                num_computed_tokens=computed,
                block_ids=held,
                num_cached_blocks=int(shape.cached == "held"),
            ),
        )
    waiting: tuple[Request, ...] = tuple(_waiting(f"w{number}") for number in range(num_waiting))
    state = State(
        requests=(*running, *waiting),
        waiting=tuple(request.request_id for request in waiting),
        running=tuple(request.request_id for request in running),
        blocks=blocks,
        free_block_queue=free,
        cached_block_ids=cached,
    )
    step = made(
        Step,
        state=state,
        token_budget=integer("token_budget", 0),
        long_prefill_token_threshold=integer("threshold", 0),
        req_index=length(running),
    )
    return made(scheduler, config=config), step


def _given(request_id: str) -> NewRequest:
    prompt = integer(f"num_prompt_tokens_{request_id}", 1)
    given: NewRequest = made(
        NewRequest,
        request_id=request_id,
        prompt_token_ids=Tokens("tokens", prompt),
        sampled_token_ids=Tokens("sampled", integer(f"num_sampled_tokens_{request_id}", 1)),
    )
    return given


def _waiting(request_id: str) -> Request:
    """Somebody who waits, new or preempted."""
    given = _given(request_id)
    num_output = integer(f"num_output_tokens_{request_id}", 0)
    assume(num_output < given.sampled_token_ids.symbolic_length)  # type: ignore[attr-defined]
    request: Request = made(Request, given=given, num_output_tokens=num_output)
    return request
