"""Walks that take every transition of an explored graph, so that others can be led through it.

A scheduler that can't be put into a state has to be brought there. A walk goes on from where it is
to the nearest transition that wasn't taken yet, so that most of its operations are new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import attrs

from mustfit_checks.attribute import revision_name
from mustfit_checks.explore import FAILED, Explorer, Graph, Transition, scenario_of
from mustfit_checks.moves import Move, Scope
from mustfit_spec import Scenario, Scheduler

#: Operations after which another walk is begun: what one scheduler is asked at once.
LONGEST = 400


def walks(graph: Graph, *, longest: int = LONGEST) -> Iterator[list[Move]]:
    """Walks from the initial state that take every transition of the expanded states.

    Args:
        graph: What was explored.
        longest: Operations after which a walk ends, once it has taken something new.
    """
    # Taken from the end: what was found last in a state is done first.
    left = [list(transitions) for transitions in graph.transitions]
    remaining = sum(map(len, left))
    while remaining:
        walk: list[Move] = []
        number = 0
        while len(walk) < longest and number != FAILED:
            way = _way_to_something_new(graph, left, number)
            if way is None:
                break
            for move, target in way:
                walk.append(move)
                number = target
            move, number, _ = left[number].pop()
            walk.append(move)
            remaining -= 1
        yield walk


def scenarios_of(
    scopes: Iterable[Scope],
    scheduler: type[Scheduler],
    *,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Scenario]:
    """Scenarios that take every transition of these scopes.

    Raises:
        NotSound: Exploring found something wrong.
    """
    for scope in scopes:
        say(f"exploring {scope.name}")
        explorer = Explorer(scope=scope, revision=revision_name(scheduler), scheduler=scheduler)
        while explorer.frontier and not explorer.findings:
            explorer.expand()
        if explorer.findings:
            what = explorer.findings[0].what
            raise NotSound(f"scope {scope.name!r} can't be judged by: {what}; see mustfit explore")
        say(
            f"walking through {scope.name}: {len(explorer.graph.numbers):,} states, "
            f"{explorer.num_transitions:,} transitions"
        )
        for number, walk in enumerate(walks(explorer.graph)):
            scenario = scenario_of(scope, explorer.scheduler, walk)
            yield attrs.evolve(scenario, scenario_id=f"{scope.name}-{number}")


class NotSound(Exception):
    """Specification and implementation differ in a scope. Its text is one line."""


def _way_to_something_new(
    graph: Graph, left: list[list[Transition]], start: int
) -> list[tuple[Move, int]] | None:
    """The shortest way to a state with a move that wasn't taken yet; ``None`` if there is none."""
    came: dict[int, tuple[int, Move]] = {}
    todo = deque([start])
    while todo:
        number = todo.popleft()
        if number >= len(left):
            # It was reached, and not expanded.
            continue
        if left[number]:
            way: list[tuple[Move, int]] = []
            while number != start:
                before, move = came[number]
                way.append((move, number))
                number = before
            return way[::-1]
        for move, target, _ in graph.transitions[number]:
            if target not in came and target not in (start, FAILED):
                came[target] = (number, move)
                todo.append(target)
    return None
