"""Liveness: whether everybody who is added ends, as long as steps are taken.

Asked of an explored graph, in which every sequence of moves is a path. A request starves if there
is a cycle around which it stays, neither ending nor aborted, and in which steps are taken: then the
scheduler can go around it for ever. As the graph is finite and whole, there is no other way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import attrs

from mustfit_checks.explore import FAILED, Explorer, Graph, scenario_of, state_after
from mustfit_checks.moves import STEP, Move
from mustfit_spec import Operation, Scenario


class Spot(NamedTuple):
    """A request in a state.

    Attributes:
        number: The state.
        place: Its place in ``running`` and ``waiting``.
    """

    number: int
    place: int


@attrs.frozen(kw_only=True)
class Lasso:
    """A way to a cycle around which a request stays.

    Attributes:
        stem: The way to where it begins.
        cycle: What is then done again and again.
        place: The place of who stays, in ``running`` and ``waiting``, when that begins.
    """

    stem: tuple[Move, ...]
    cycle: tuple[Move, ...]
    place: int


@attrs.frozen(kw_only=True)
class Starvation:
    """A way in which a request starves, with names.

    Attributes:
        scenario: The way to the cycle, and once around it.
        begins: The place of the cycle's first operation.
        request_id: Who starves.
    """

    scenario: Scenario
    begins: int
    request_id: str

    @property
    def stem(self) -> tuple[Operation, ...]:
        """The way to the cycle."""
        return self.scenario.operations[: self.begins]

    @property
    def cycle(self) -> tuple[Operation, ...]:
        """What is then done again and again, with ids of their own for those who are added."""
        return self.scenario.operations[self.begins :]


@attrs.frozen(kw_only=True)
class Liveness:
    """What a graph says about liveness.

    Attributes:
        longest_drain: Most steps that it takes, from any state, until all requests have ended, by
            steps alone; ``None`` if there is a state from which they never do.
        by_steps: How a request starves while only steps are taken, if one does.
        by_anything: How one starves while others come and go, if one does.
    """

    longest_drain: int | None
    by_steps: Starvation | None
    by_anything: Starvation | None


def liveness(explorer: Explorer) -> Liveness:
    """What an explored graph says about liveness. It has to be whole."""
    graph = explorer.graph.of_specification()
    return Liveness(
        longest_drain=longest_drain(graph),
        by_steps=_starvation(explorer, graph, only_steps),
        by_anything=_starvation(explorer, graph, whatever_comes),
    )


def _starvation(explorer: Explorer, graph: Graph, allowed: Allowed) -> Starvation | None:
    found = lasso(graph, allowed)
    if found is None:
        return None
    way = [*found.stem, *found.cycle]
    scenario = scenario_of(explorer.scope, explorer.scheduler, way)
    state = state_after(explorer.scope, explorer.scheduler, found.stem)
    return Starvation(
        scenario=scenario,
        begins=len(found.stem),
        request_id=(*state.running, *state.waiting)[found.place],
    )


#: Whether a move is allowed.
Allowed = Callable[[Move], bool]


def only_steps(move: Move) -> bool:
    """Nothing is done but taking steps."""
    return move == STEP


def whatever_comes(move: Move) -> bool:
    """Anything is done, but nobody is preempted from outside."""
    return move.op != "reset_prefix_cache" or move.which == 0


def longest_drain(graph: Graph) -> int | None:
    """Most steps that it takes, from any state, until all requests have ended, by steps alone.

    ``None`` if there is a state from which they don't. Where a step fails, as vLLM's own
    assertions do, nothing is left to be waited for.
    """
    steps: dict[int, int] = {FAILED: 0}
    for start in range(len(graph.transitions)):
        way: list[int] = []
        number = start
        on_the_way: set[int] = set()
        while number not in steps:
            target = next(t for t in graph.transitions[number] if t.move == STEP)
            if not target.places and target.target != FAILED:
                steps[number] = 0
                break
            if number in on_the_way:
                return None
            on_the_way.add(number)
            way.append(number)
            number = target.target
        for before in reversed(way):
            steps[before] = steps[number] + 1
            number = before
    return max(steps.values())


def lasso(graph: Graph, allowed: Allowed) -> Lasso | None:
    """The shortest way in which a request starves, stem and cycle together, if there is one.

    Args:
        graph: What was explored, wholly.
        allowed: Which moves are made.
    """
    best: Lasso | None = None
    components = _components(graph, allowed)
    spots = list(_on_a_cycle(graph, allowed, components))
    stems = _stems(graph, {spot.number for spot in spots})
    for spot in sorted(spots, key=lambda spot: (len(stems[spot.number]), spot)):
        stem = stems[spot.number]
        if best is not None and len(stem) + 1 >= len(best.stem) + len(best.cycle):
            break
        cycle = _shortest_cycle(graph, allowed, components, spot)
        if best is None or len(stem) + len(cycle) < len(best.stem) + len(best.cycle):
            best = Lasso(stem=stem, cycle=cycle, place=spot.place)
    return best


def _stems(graph: Graph, wanted: set[int]) -> dict[int, tuple[Move, ...]]:
    """The shortest ways to these states, without preempting from outside where that can be."""
    stems: dict[int, tuple[Move, ...]] = {}
    came: dict[int, tuple[int, Move]] = {0: (0, STEP)}
    todo = deque([0])
    while todo:
        number = todo.popleft()
        if number in wanted:
            stems[number] = _way_back(came, 0, number)
        for move, target, _ in graph.transitions[number]:
            if target != FAILED and target not in came and whatever_comes(move):
                came[target] = number, move
                todo.append(target)
    return {number: stems.get(number) or tuple(graph.way_to(number)) for number in wanted}


_Node = TypeVar("_Node")


def _way_back(came: dict[_Node, tuple[_Node, Move]], start: _Node, end: _Node) -> tuple[Move, ...]:
    """The moves from one to another, by where each was come to from."""
    way: list[Move] = []
    here = end
    while here != start:
        here, move = came[here]
        way.append(move)
    return tuple(way[::-1])


def _next(graph: Graph, allowed: Allowed, spot: Spot) -> Iterator[tuple[Move, Spot]]:
    """Where a request may be next, as long as it is there."""
    for move, target, places in graph.transitions[spot.number]:
        if target != FAILED and allowed(move) and places[spot.place] >= 0:
            yield move, Spot(target, places[spot.place])


def _spots(graph: Graph) -> Iterator[Spot]:
    """Every request in every state."""
    for number, transitions in enumerate(graph.transitions):
        step = next(t for t in transitions if t.move == STEP)
        for place in range(len(step.places)):
            yield Spot(number, place)


def _components(graph: Graph, allowed: Allowed) -> dict[Spot, int]:  # noqa: C901 - an algorithm
    """For each spot, a number that it has in common with those on a cycle with it.

    Tarjan's algorithm, on a stack of our own.
    """
    component: dict[Spot, int] = {}
    index: dict[Spot, int] = {}
    low: dict[Spot, int] = {}
    open_spots: list[Spot] = []
    for root in _spots(graph):
        if root in index:
            continue
        work = [(root, _next(graph, allowed, root))]
        index[root] = low[root] = len(index)
        open_spots.append(root)
        while work:
            spot, following = work[-1]
            for _, target in following:
                if target not in index:
                    index[target] = low[target] = len(index)
                    open_spots.append(target)
                    work.append((target, _next(graph, allowed, target)))
                    break
                if target not in component:
                    low[spot] = min(low[spot], index[target])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[spot])
                if low[spot] == index[spot]:
                    while True:
                        member = open_spots.pop()
                        component[member] = index[spot]
                        if member == spot:
                            break
    return component


def _on_a_cycle(graph: Graph, allowed: Allowed, components: dict[Spot, int]) -> Iterator[Spot]:
    """The spots on cycles in which a step is taken."""
    with_step = {
        components[spot]
        for spot in components
        for move, target in _next(graph, allowed, spot)
        if move == STEP and components[target] == components[spot]
    }
    return (spot for spot, component in components.items() if component in with_step)


def _shortest_cycle(
    graph: Graph, allowed: Allowed, components: dict[Spot, int], start: Spot
) -> tuple[Move, ...]:
    """The shortest way from a spot to itself in which a step is taken."""
    came: dict[tuple[Spot, bool], tuple[tuple[Spot, bool], Move]] = {}
    todo = deque([(start, False)])
    while todo:
        here = todo.popleft()
        for move, target in _next(graph, allowed, here[0]):
            there = target, here[1] or move == STEP
            if components[target] != components[start] or there in came:
                continue
            came[there] = here, move
            if there == (start, True):
                return _way_back(came, (start, False), there)
            todo.append(there)
    raise AssertionError("a spot on a cycle has a way back to itself")
