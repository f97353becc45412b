"""What can be done in a state, without names, so that states that differ in these are one.

Requests are known by their places in the queues, and blocks by theirs in the free queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import attrs

from mustfit_spec import Config, NewRequest, Operation, Request, State
from mustfit_spec.state import NULL_BLOCK

OperationName = Literal["step", "add", "abort", "reset_prefix_cache"]


@attrs.frozen(kw_only=True)
class Scope:
    """What is explored.

    Attributes:
        name: What the scope is called.
        config: The configuration.
        kinds: The requests that may be added, again and again; their ids name the kinds.
        max_requests: Most requests that are there at once, running and waiting.
        aborts: Whether requests are aborted.
        resets: Whether the prefix cache is reset, with and without preempting those who run.
    """

    name: str
    config: Config
    kinds: tuple[NewRequest, ...]
    max_requests: int
    aborts: bool = True
    resets: bool = True


@attrs.frozen
class Move:
    """An operation, without names: the same in all states that are one.

    Attributes:
        op: What is done.
        which: For an addition the kind, for an abort the place in ``running`` and ``waiting``, for
            a reset 1 if everybody who runs is preempted first.
    """

    op: OperationName
    which: int = 0


STEP = Move("step")

#: A state has few moves, and there are many states.
_move = cache(Move)


def moves_of(scope: Scope, state: State) -> Iterator[Move]:
    """What can be done in a state."""
    yield STEP
    num_requests = len(state.requests)
    if num_requests < scope.max_requests:
        for kind in range(len(scope.kinds)):
            yield _move("add", kind)
    if scope.aborts:
        for place in range(num_requests):
            yield _move("abort", place)
    if scope.resets:
        if state.cached_block_ids:
            yield _move("reset_prefix_cache", 0)
        if state.running:
            yield _move("reset_prefix_cache", 1)


def named(
    scope: Scope, state: State, num_added: int, move: Move
) -> tuple[Operation, NewRequest | None]:
    """A move as an operation on that state, and the request that it adds.

    Ids are made such that whoever is added later has the greater one; the kind is at their end.
    """
    if move.op == "add":
        kind = scope.kinds[move.which]
        request_id = f"{num_added:0{_DIGITS}d}{kind.request_id}"
        given = attrs.evolve(kind, request_id=request_id)
        return Operation(op="add", request_id=request_id), given
    if move.op == "abort":
        request_id = (*state.running, *state.waiting)[move.which]
        return Operation(op="abort", request_id=request_id), None
    if move.op == "reset_prefix_cache":
        return Operation(op=move.op, reset_running_requests=bool(move.which)), None
    return Operation(op="step"), None


_DIGITS = 6


def kind_of(request: Request) -> str:
    """The id of a request's kind."""
    return request.request_id[_DIGITS:]


# --- When two states are one ------------------------------------------------------------------


def key_of(scope: Scope, state: State) -> tuple[Any, ...]:
    """Equal for two states if and only if they differ only in names.

    Blocks are called by their place in the free queue, and then in the tables of those who run.
    Requests by their place in the queues; by priority the order of their ids counts, too.
    """
    places = {NULL_BLOCK: 0}
    for block_id in state.free_block_queue:
        places[block_id] = len(places)
    requests = {request.request_id: request for request in state.requests}
    queues = (*state.running, *state.waiting)
    for request_id in queues:
        for block_id in requests[request_id].block_ids:
            places.setdefault(block_id, len(places))
    by_id = sorted(queues) if scope.config.policy == "priority" else ()
    return (
        len(state.running),
        tuple(_request_key(requests[request_id], places) for request_id in queues),
        tuple(by_id.index(request_id) for request_id in queues) if by_id else (),
        tuple((places[b], state.blocks[b].block_hash) for b in state.cached_block_ids),
    )


def _request_key(request: Request, places: dict[int, int]) -> tuple[Any, ...]:
    return (
        kind_of(request),
        request.status.value,
        request.num_output_tokens,
        request.num_computed_tokens,
        tuple(places[block_id] for block_id in request.block_ids),
        request.num_cached_blocks,
    )
