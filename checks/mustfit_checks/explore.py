"""Every state that a small scope can reach, specification and implementation side by side.

Breadth first, so that the way to any state is as short as any. Two states are one if they differ
only in names: of requests, or of blocks. Each transition is taken on both sides and all that can be
observed is compared; each state and each step has to keep the scheduler's promises.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import attrs

from mustfit_checks.invariants import broken_by_state, broken_by_step
from mustfit_checks.moves import STEP, Move, Scope, key_of, moves_of, named
from mustfit_checks.sides import ImplementationSide, Side, applied
from mustfit_spec import (
    Config,
    NewRequest,
    Operation,
    Scenario,
    Scheduler,
    SchedulerFailure,
    State,
    initial_state,
)
from mustfit_spec.run import observe


class Transition(NamedTuple):
    """A move that was taken in a state.

    Attributes:
        move: The move.
        target: The number of the state that it leads to, or ``FAILED``.
        places: For each request that was there, in the order of ``running`` and ``waiting``, its
            place in that order afterwards; -1 if it has ended.
    """

    move: Move
    target: int
    places: tuple[int, ...]


@attrs.frozen
class Node:
    """A state on both sides.

    Attributes:
        state: The specification's.
        other: What the other side saved.
        num_added: Requests that were added on the way here.
        depth: Operations on the way here.
    """

    state: State
    other: Any
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
        classes: For each state of the specification, by its key, a number of its own.
        class_of: For each state, this number.
        numbers: For each state, by this number and by what the other side remembers, its number.
        parents: For each state, from where it was reached first, and by which move.
        transitions: For each state that was expanded, in the order of their numbers, every move
            from it.
    """

    classes: dict[bytes, int] = attrs.field(factory=dict)
    class_of: list[int] = attrs.field(factory=list)
    numbers: dict[tuple[int, bytes], int] = attrs.field(factory=dict)
    parents: list[tuple[int, Move]] = attrs.field(factory=list)
    transitions: list[tuple[Transition, ...]] = attrs.field(factory=list)

    def way_to(self, number: int) -> list[Move]:
        """The shortest way from the initial state."""
        way: list[Move] = []
        while number:
            number, move = self.parents[number]
            way.append(move)
        return way[::-1]

    def number_of(self, state: bytes, other: bytes) -> int | None:
        """The number of a state, by both sides' keys, if it has been reached."""
        return self.numbers.get((self.classes.get(state, -1), other))

    def add(self, state: bytes, other: bytes, parent: tuple[int, Move]) -> None:
        """A new state was reached, from there."""
        class_of = self.classes.setdefault(state, len(self.classes))
        self.class_of.append(class_of)
        self.numbers[class_of, other] = len(self.parents)
        self.parents.append(parent)

    def of_specification(self) -> Graph:
        """The graph of the specification alone: what the other side remembers makes no state."""
        representatives: dict[int, int] = {}
        for number, class_of in enumerate(self.class_of):
            representatives.setdefault(class_of, number)

        def known(number: int) -> int:
            return number if number == FAILED else self.class_of[number]

        return Graph(
            parents=[
                (known(parent), move)
                for parent, move in (self.parents[number] for number in representatives.values())
            ],
            transitions=[
                tuple(
                    Transition(move, known(target), places)
                    for move, target, places in self.transitions[number]
                )
                for number in representatives.values()
            ],
        )


_SAVED = ("graph", "frontier", "findings", "num_transitions", "depth")


def keys_of(scope: Scope, state: State, other: Side) -> tuple[bytes, bytes]:
    """Equal if and only if both sides differ only in names: one for each side."""
    return (
        marshal.dumps(key_of(scope, state), _MARSHAL),
        marshal.dumps(other.remembered(scope), _MARSHAL),
    )


#: The newest version that writes equal things equally: later ones refer to what is the same object.
_MARSHAL = 2

#: Stands for the state after a move that fails, or leads to a state that breaks a promise.
FAILED = -1


class Explorer:
    """Explores one scope for one revision.

    Args:
        scope: What is explored.
        revision: The first vLLM release of the revision.
        scheduler: The revision, or one that is wrong.
        other: Makes the other side: the implementation, if nothing else is given.

    Attributes:
        graph: What has been found so far.
        frontier: States that are yet to be expanded.
        findings: What is wrong so far.
        num_transitions: Moves that were taken.
        depth: Operations on the shortest way to the state that was expanded last. There is none
            further off, if the frontier is empty.
    """

    def __init__(
        self,
        *,
        scope: Scope,
        revision: str,
        scheduler: type[Scheduler],
        other: Callable[[Config, str], Side] = ImplementationSide,
    ) -> None:
        self.scope = scope
        self.revision = revision
        self.scheduler = scheduler(scope.config)
        self.graph = Graph()
        self.frontier: deque[Node] = deque()
        self.findings: list[Finding] = []
        self.num_transitions = 0
        self.depth = 0
        self.other = other(scope.config, revision)
        self._reached(initial_state(scope.config), num_added=0, depth=0, parent=(0, STEP))

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
        number = len(self.graph.transitions)
        moves = tuple(moves_of(self.scope, node.state))
        self.graph.transitions.append(tuple(self._take(number, node, move) for move in moves))

    def _take(self, number: int, node: Node, move: Move) -> Transition:
        """Takes a move on both sides."""
        self.num_transitions += 1
        other = self.other
        other.restore(node.other)
        operation, given = named(self.scope, node.state, node.num_added, move)
        try:
            observed = other.apply(operation, given)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is found, and how it came
            self._found(number, move, f"{other.name} breaks: {error!r}")
            return Transition(move, FAILED, ())
        try:
            state, outcome = applied(self.scheduler, node.state, operation, given)
        except SchedulerFailure:
            if observed is not None:
                self._found(number, move, f"{other.name} goes on where vLLM fails")
            return Transition(move, FAILED, ())
        if observed is None:
            self._found(number, move, f"{other.name} fails where vLLM goes on")
            return Transition(move, FAILED, ())
        if observed != observe(state, outcome):
            self._found(number, move, f"specification and {other.name} differ")
        if move.op == "step":
            for wrong in broken_by_step(self.scheduler, node.state, outcome, state):
                self._found(number, move, wrong)
        target = self._reached(
            state,
            num_added=node.num_added + (move.op == "add"),
            depth=node.depth + 1,
            parent=(number, move),
        )
        return Transition(move, target, _shared(_places(node.state, state)))

    def _reached(
        self,
        state: State,
        *,
        num_added: int,
        depth: int,
        parent: tuple[int, Move],
    ) -> int:
        """A state was reached, on both sides; its number."""
        wrong = broken_by_state(self.scheduler, state)
        if wrong:
            for what in wrong:
                self._found(*parent, what)
            return FAILED
        keys = keys_of(self.scope, state, self.other)
        number = self.graph.number_of(*keys)
        if number is None:
            number = len(self.graph.parents)
            self.graph.add(*keys, parent)
            self.frontier.append(Node(state, self.other.saved(), num_added, depth))
        return number

    def _found(self, number: int, move: Move, what: str) -> None:
        way = [*self.graph.way_to(number), move]
        scenario = scenario_of(self.scope, self.scheduler, way)
        self.findings.append(Finding(what=what, scenario=scenario))


def _places(before: State, after: State) -> tuple[int, ...]:
    """For each request of a state, in the order of its queues, its place in another."""
    places = {request_id: i for i, request_id in enumerate((*after.running, *after.waiting))}
    return tuple(places.get(request_id, -1) for request_id in (*before.running, *before.waiting))


@cache
def _shared(places: tuple[int, ...]) -> tuple[int, ...]:
    """The same; of those that are equal, one is kept."""
    return places


def scenario_of(scope: Scope, scheduler: Scheduler, way: Iterable[Move]) -> Scenario:
    """The scenario in which these moves are made, one after the other."""
    done = list(_walked(scope, scheduler, way))
    return Scenario(
        scenario_id=scope.name,
        config=scope.config,
        requests=tuple(given for _, given, _ in done if given is not None),
        operations=tuple(operation for operation, _, _ in done),
    )


def state_after(scope: Scope, scheduler: Scheduler, way: Iterable[Move]) -> State:
    """The state after these moves, of which none fails."""
    states = [state for _, _, state in _walked(scope, scheduler, way) if state is not None]
    return states[-1] if states else initial_state(scope.config)


def _walked(
    scope: Scope, scheduler: Scheduler, way: Iterable[Move]
) -> Iterator[tuple[Operation, NewRequest | None, State | None]]:
    """The operation that each move is, the request that it adds, and the state after it.

    No state, and no more moves, where vLLM's own assertions fail.
    """
    state = initial_state(scope.config)
    num_added = 0
    for move in way:
        operation, given = named(scope, state, num_added, move)
        num_added += given is not None
        try:
            state, _ = applied(scheduler, state, operation, given)
        except SchedulerFailure:
            yield operation, given, None
            return
        yield operation, given, state
