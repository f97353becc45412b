"""Every state that a small scope can reach, specification and implementation side by side.

Breadth first, so that the way to any state is as short as any. Two states are one if they differ
only in names: of requests, or of blocks. Each transition is taken on both sides and all that can be
observed is compared; each state and each step has to keep the scheduler's promises.
"""

from __future__ import annotations

import marshal
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs

from mustfit_checks.invariants import broken_by_state, broken_by_step
from mustfit_impl import Scheduler as Implementation
from mustfit_impl import StepOutcome as ImplementationOutcome
from mustfit_spec import (
    Config,
    NewRequest,
    Operation,
    Request,
    Scenario,
    Scheduler,
    SchedulerFailure,
    State,
    StepOutcome,
    initial_state,
)
from mustfit_spec.run import observe
from mustfit_spec.state import NULL_BLOCK

OperationName = Literal["step", "add", "abort", "reset_prefix_cache"]

#: What is observed between steps.
_NO_STEP = StepOutcome(num_scheduled_tokens=(), preempted=(), num_cached_tokens=())
_NO_STEP_OF_IMPLEMENTATION = ImplementationOutcome({}, (), {}, {})


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


@attrs.frozen
class Node:
    """A state on both sides.

    Attributes:
        state: The specification's.
        implementation: The implementation's, pickled.
        num_added: Requests that were added on the way here.
        depth: Operations on the way here.
    """

    state: State
    implementation: bytes
    num_added: int
    depth: int


@attrs.frozen(kw_only=True)
class Finding:
    """Where something is wrong.

    Attributes:
        what: What is.
        scenario: The shortest way there.
    """

    what: str
    scenario: Scenario


@attrs.define
class Graph:
    """What has been found so far.

    A state is a number, the initial one 0. Where a move fails, as vLLM's own assertions do, there
    is no next state: ``FAILED`` stands for it.

    Attributes:
        numbers: For each state, by its key, its number.
        parents: For each state, from where it was reached first, and by which move.
        moves: For each state that was expanded, every move and the state it leads to.
    """

    numbers: dict[bytes, int] = attrs.field(factory=dict)
    parents: list[tuple[int, Move]] = attrs.field(factory=list)
    moves: list[tuple[tuple[Move, int], ...]] = attrs.field(factory=list)

    def way_to(self, number: int) -> list[Move]:
        """The shortest way from the initial state."""
        way: list[Move] = []
        while number:
            number, move = self.parents[number]
            way.append(move)
        return way[::-1]


_SAVED = ("graph", "frontier", "findings", "transitions", "depth")

#: Stands for the state after a move that fails, or leads to a state that breaks a promise.
FAILED = -1


class Explorer:
    """Explores one scope for one revision.

    Args:
        scope: What is explored.
        revision: The first vLLM release of the revision.
        scheduler: The revision, or one that is wrong.
        implementation: Makes the implementation, or one that is wrong.

    Attributes:
        graph: What has been found so far.
        frontier: States that are yet to be expanded.
        findings: What is wrong so far.
        transitions: Moves that were taken.
        depth: Operations on the shortest way to the state that was expanded last. There is none
            further off, if the frontier is empty.
    """

    def __init__(
        self,
        *,
        scope: Scope,
        revision: str,
        scheduler: type[Scheduler],
        implementation: Callable[..., Implementation] = Implementation,
    ) -> None:
        self.scope = scope
        self.revision = revision
        self.scheduler = scheduler(scope.config)
        self.graph = Graph()
        self.frontier: deque[Node] = deque()
        self.findings: list[Finding] = []
        self.transitions = 0
        self.depth = 0
        first = implementation(config=scope.config, revision=revision, refuse_overlong=False)
        self._reached(initial_state(scope.config), first, num_added=0, depth=0, parent=(0, STEP))

    def saved(self) -> dict[str, Any]:
        """What has been found so far, to be put into a file."""
        return {name: getattr(self, name) for name in _SAVED}

    def resume(self, saved: dict[str, Any]) -> None:
        """Goes on from what was saved."""
        for name in _SAVED:
            setattr(self, name, saved[name])

    def expand(self) -> None:
        """Takes every move from the next state of the frontier."""
        node = self.frontier.popleft()
        self.depth = node.depth
        number = len(self.graph.moves)
        moves = tuple(moves_of(self.scope, node.state))
        self.graph.moves.append(tuple((move, self._take(number, node, move)) for move in moves))

    def _take(self, number: int, node: Node, move: Move) -> int:
        """Takes a move on both sides; the number of the state that it leads to."""
        self.transitions += 1
        implementation: Implementation = pickle.loads(node.implementation)  # noqa: S301 - our own
        operation, given = named(self.scope, node.state, node.num_added, move)
        try:
            state, outcome = applied(self.scheduler, node.state, operation, given)
        except SchedulerFailure:
            if not fails(implementation):
                self._found(number, move, "the implementation goes on where vLLM fails")
            return FAILED
        other = applied_to_implementation(implementation, operation, given)
        if other is None:
            self._found(number, move, "the implementation fails where vLLM goes on")
            return FAILED
        expected = observe(state, outcome)
        if implementation.observe(other) != expected:
            self._found(number, move, "specification and implementation differ")
        if move.op == "step":
            for wrong in broken_by_step(self.scheduler, node.state, outcome, state):
                self._found(number, move, wrong)
        return self._reached(
            state,
            implementation,
            num_added=node.num_added + (move.op == "add"),
            depth=node.depth + 1,
            parent=(number, move),
        )

    def _reached(
        self,
        state: State,
        implementation: Implementation,
        *,
        num_added: int,
        depth: int,
        parent: tuple[int, Move],
    ) -> int:
        """A state was reached; its number."""
        wrong = broken_by_state(self.scheduler, state)
        if wrong:
            for what in wrong:
                self._found(*parent, what)
            return FAILED
        key = key_of(self.scope, state, implementation)
        number = self.graph.numbers.get(key)
        if number is None:
            number = self.graph.numbers[key] = len(self.graph.parents)
            self.graph.parents.append(parent)
            self.frontier.append(Node(state, pickle.dumps(implementation), num_added, depth))
        return number

    def _found(self, number: int, move: Move, what: str) -> None:
        way = [*self.graph.way_to(number), move]
        scenario = scenario_of(self.scope, self.scheduler, way)
        self.findings.append(Finding(what=what, scenario=scenario))


def moves_of(scope: Scope, state: State) -> Iterator[Move]:
    """What can be done in a state."""
    yield STEP
    num_requests = len(state.requests)
    if num_requests < scope.max_requests:
        for kind in range(len(scope.kinds)):
            yield Move("add", kind)
    if scope.aborts:
        for place in range(num_requests):
            yield Move("abort", place)
    if scope.resets:
        if state.cached_block_ids:
            yield Move("reset_prefix_cache", 0)
        if state.running:
            yield Move("reset_prefix_cache", 1)


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


def applied(
    scheduler: Scheduler, state: State, operation: Operation, given: NewRequest | None
) -> tuple[State, StepOutcome]:
    """The state after an operation, and what it did, if it is a step.

    Raises:
        SchedulerFailure: Where vLLM's own assertions fail.
    """
    if operation.op == "step":
        return scheduler.step(state)
    if given is not None:
        return scheduler.add_request(state, given), _NO_STEP
    if operation.op == "abort":
        return scheduler.abort(state, str(operation.request_id)), _NO_STEP
    return (
        scheduler.reset_prefix_cache(
            state, reset_running_requests=operation.reset_running_requests
        ),
        _NO_STEP,
    )


def applied_to_implementation(
    implementation: Implementation, operation: Operation, given: NewRequest | None
) -> ImplementationOutcome | None:
    """What the operation did, if it is a step; ``None`` if it failed."""
    if operation.op == "step":
        try:
            return implementation.step()
        except SchedulerFailure:
            return None
    if given is not None:
        implementation.add_request(given)
    elif operation.op == "abort":
        implementation.abort(str(operation.request_id))
    else:
        implementation.reset_prefix_cache(reset_running_requests=operation.reset_running_requests)
    return _NO_STEP_OF_IMPLEMENTATION


def fails(implementation: Implementation) -> bool:
    """Whether its next step fails."""
    return applied_to_implementation(implementation, Operation(op="step"), None) is None


def scenario_of(scope: Scope, scheduler: Scheduler, way: list[Move]) -> Scenario:
    """The scenario in which these moves are made, one after the other."""
    state = initial_state(scope.config)
    requests: list[NewRequest] = []
    operations: list[Operation] = []
    for move in way:
        operation, given = named(scope, state, len(requests), move)
        operations.append(operation)
        if given is not None:
            requests.append(given)
        try:
            state, _ = applied(scheduler, state, operation, given)
        except SchedulerFailure:
            break
    return Scenario(
        scenario_id=scope.name,
        config=scope.config,
        requests=tuple(requests),
        operations=tuple(operations),
    )


# --- When two states are one ------------------------------------------------------------------


def key_of(scope: Scope, state: State, implementation: Implementation) -> bytes:
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
    return marshal.dumps(
        (
            len(state.running),
            tuple(_request_key(requests[request_id], places) for request_id in queues),
            tuple(by_id.index(request_id) for request_id in queues) if by_id else (),
            tuple((places[b], state.blocks[b].block_hash) for b in state.cached_block_ids),
            _remembered(implementation),
        ),
        _MARSHAL,
    )


#: The newest version that writes equal things equally: later ones refer to what is the same object.
_MARSHAL = 2


def _request_key(request: Request, places: dict[int, int]) -> tuple[Any, ...]:
    return (
        kind_of(request),
        request.status.value,
        request.num_output_tokens,
        request.num_computed_tokens,
        tuple(places[block_id] for block_id in request.block_ids),
        request.num_cached_blocks,
    )


def _remembered(implementation: Implementation) -> tuple[Any, ...]:
    """What decides what the implementation does, beyond what the specification's state says.

    Steps until each who runs does something else than decode, and whether the head's refusal is
    still known.
    """
    decoders, pool = implementation._decoders, implementation._pool  # noqa: SLF001
    due = {
        request.request_id: at - decoders.clock
        for at, _, entry, request in decoders._events  # noqa: SLF001
        if request.entry == entry
    }
    refused = implementation._refused  # noqa: SLF001
    known = (
        refused is not None
        and refused.request_id == implementation.head()
        and implementation._refused_cache == pool.cache.changes  # noqa: SLF001
        and implementation._refused_releases == pool.releases  # noqa: SLF001
    )
    return (
        tuple(due.get(request_id) for request_id in implementation.running),
        (known, implementation._refused_limits if known else None),  # noqa: SLF001
        # Without anybody who runs, a stride has no end: it is a number that no run uses up.
        min(implementation._stride, _FOR_EVER),  # noqa: SLF001
    )


#: More steps than there are between two events of any scope.
_FOR_EVER = 1 << 32
