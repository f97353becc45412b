"""Liveness: what the explored graphs say, by another way, on the real scheduler, and gone wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import attrs
import pytest

from mustfit_checks.explore import Explorer, Graph, Transition, scenario_of
from mustfit_checks.liveness import (
    Lasso,
    Liveness,
    Starvation,
    lasso,
    liveness,
    longest_drain,
    only_steps,
    whatever_comes,
)
from mustfit_checks.moves import STEP, Move, key_of
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.scopes import SCOPES
from mustfit_checks.show import operations
from mustfit_checks.sides import SpecificationSide
from mustfit_spec import REVISIONS, Operation, Scenario, Scheduler, StepTrace, Trace


def explored(name: str, scheduler: type[Scheduler] = REVISIONS["0.33.0"]) -> Explorer:
    """A scope of a scheduler, right or wrong, by itself."""
    explorer = Explorer(
        scope=SCOPES[name],
        revision="0.33.0",
        scheduler=scheduler,
        other=lambda config, _: SpecificationSide(scheduler(config)),
    )
    while explorer.frontier:
        explorer.expand()
    return explorer


def told(found: Starvation | None) -> tuple[str, str] | None:
    return None if found is None else (operations(found.stem), operations(found.cycle))


# --- Of graphs made by hand ---------------------------------------------------------------------

ADD, LEAVE, RESET = Move("add"), Move("abort"), Move("reset_prefix_cache", 1)


def graph(*states: dict[Move, tuple[int, tuple[int, ...]]]) -> Graph:
    """A graph in which each state has these moves: the state that one leads to, and the places."""
    return Graph(
        parents=[(0, STEP)] * len(states),
        transitions=[
            tuple(Transition(move, target, places) for move, (target, places) in moves.items())
            for moves in states
        ],
    )


def test_who_stays_while_steps_are_taken_starves() -> None:
    found = lasso(graph({STEP: (0, ()), ADD: (1, ())}, {STEP: (1, (0,))}), only_steps)
    assert found == Lasso(stem=(ADD,), cycle=(STEP,), place=0)


def test_a_cycle_around_which_everybody_is_somebody_else_starves_nobody() -> None:
    """The first of two ends, the second becomes the first, and one is added."""
    two = graph(
        {STEP: (0, ()), ADD: (1, ())}, {STEP: (0, (-1,)), ADD: (2, (0,))}, {STEP: (1, (-1, 0))}
    )
    assert lasso(two, whatever_comes) is None
    assert longest_drain(two) == 2


def test_places_are_followed_around_a_cycle() -> None:
    """Two swap places in every step: it takes two until each is back."""
    swap = graph({STEP: (0, ()), ADD: (1, ())}, {STEP: (1, (1, 0))})
    assert lasso(swap, only_steps) == Lasso(stem=(ADD,), cycle=(STEP, STEP), place=0)


def test_a_cycle_without_a_step_starves_nobody() -> None:
    coming = graph({STEP: (0, ()), ADD: (1, ())}, {STEP: (0, (-1,)), ADD: (1, (0,))})
    assert lasso(coming, whatever_comes) is None


def test_who_is_preempted_from_outside_again_and_again_is_not_starved_by_the_scheduler() -> None:
    reset = graph(
        {STEP: (0, ()), ADD: (1, ())}, {STEP: (2, (0,))}, {STEP: (0, (-1,)), RESET: (1, (0,))}
    )
    assert lasso(reset, whatever_comes) is None
    assert lasso(reset, lambda _: True) == Lasso(stem=(ADD,), cycle=(STEP, RESET), place=0)


def test_a_step_that_fails_is_waited_for_by_nobody() -> None:
    failing = graph({STEP: (0, ()), ADD: (1, ())}, {STEP: (-1, ())})
    assert lasso(failing, whatever_comes) is None
    assert longest_drain(failing) == 1


def test_the_shortest_way_counts_the_stem_and_the_cycle() -> None:
    """A cycle of three from the first state, against one of one behind one more step."""
    both = graph(
        {STEP: (0, ()), ADD: (1, ())},
        {STEP: (2, (0,)), LEAVE: (4, (0,))},
        {STEP: (3, (0,))},
        {STEP: (1, (0,))},
        {STEP: (4, (0,))},
    )
    assert lasso(both, whatever_comes) == Lasso(stem=(ADD, LEAVE), cycle=(STEP,), place=0)


# --- Of the specification -----------------------------------------------------------------------

#: What is known of each; how many steps a drain takes is computed another way below.
ENDS = {"threshold": 9, "stop-tokens": 4, "second-seats": 6, "no-prefix-caching": 8}
STARVES = {
    "short-pool": ("add 000000l, 2 steps", "step"),
    "short-pool-gate-off": ("add 000000l, 2 steps", "step"),
    "short-pool-no-caching": ("add 000000l, step", "2 steps"),
    "beyond-the-model-in-chunks": ("add 000000o, 2 steps", "step"),
}


@pytest.mark.parametrize("name", ENDS)
def test_everybody_ends(name: str) -> None:
    explorer = explored(name)
    assert liveness(explorer) == Liveness(
        longest_drain=drained(explorer), by_steps=None, by_anything=None
    )
    assert drained(explorer) == ENDS[name]


def drained(explorer: Explorer) -> int:
    """Most steps until nobody is there, by taking them, from every state."""
    longest = 0
    for number in range(len(explorer.graph.transitions)):
        side = SpecificationSide(explorer.scheduler)
        way = scenario_of(explorer.scope, explorer.scheduler, explorer.graph.way_to(number))
        do(side, way, way.operations)
        steps = 0
        while side.state.requests:
            side.apply(Operation(op="step"), None)
            steps += 1
        longest = max(longest, steps)
    return longest


@pytest.mark.parametrize("name", STARVES)
def test_somebody_starves(name: str) -> None:
    found = liveness(explored(name))
    assert told(found.by_steps) == STARVES[name]
    assert found.longest_drain is None
    assert found.by_steps is not None
    goes_around(found.by_steps, name)


def test_by_priority_newcomers_starve_who_is_less_urgent() -> None:
    found = liveness(explored("priority"))
    assert found.by_steps is None
    assert found.by_anything is not None
    assert found.by_anything.request_id.endswith("s")
    added = [o.request_id for o in found.by_anything.cycle if o.op == "add"]
    assert added
    assert all(str(request_id).endswith("f") for request_id in added)


def do(side: SpecificationSide, scenario: Scenario, done: Iterable[Operation]) -> None:
    """Operations of a scenario."""
    for operation in done:
        given = scenario.request(str(operation.request_id)) if operation.op == "add" else None
        side.apply(operation, given)


def goes_around(found: Starvation, name: str) -> None:
    """After the cycle all is as before it, but for names, and who starves is still there."""
    side = SpecificationSide(REVISIONS["0.33.0"](SCOPES[name].config))

    do(side, found.scenario, found.stem)
    before = key_of(SCOPES[name], side.state)
    do(side, found.scenario, found.cycle)
    assert key_of(SCOPES[name], side.state) == before
    assert side.state.has(found.request_id)
    assert any(operation.op == "step" for operation in found.cycle)


# --- Of the real scheduler ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["short-pool", "short-pool-gate-off", "short-pool-no-caching"])
def test_it_starves_so_in_a_pool_that_is_too_small(
    name: str, ask: Callable[[Scenario], Trace]
) -> None:
    """Twenty times around: nobody ends; without prefix caching, there is a preemption each time."""
    found = starving(name)
    scenario = attrs.evolve(found.scenario, operations=(*found.stem, *(found.cycle * 20)))
    trace = ask(scenario)
    around = trace.steps[-20 * len(found.cycle) :]
    assert not [step for step in trace.steps if step.finished]
    assert [step.waiting or step.running for step in around] == [(found.request_id,)] * len(around)
    preempted = sum(bool(step.preempted) for step in around)
    assert preempted == (20 if name == "short-pool-no-caching" else 0)
    assert all(scheduled(step) == (name == "short-pool-no-caching") for step in around)


@cache
def starving(name: str) -> Starvation:
    found = liveness(explored(name)).by_steps
    assert found is not None
    return found


def scheduled(step: StepTrace) -> bool:
    """Whether anything happened in it."""
    return bool(step.num_scheduled_tokens or step.preempted)


# --- Gone wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "admission-preempts",
        "blocked-to-tail",
        "requeued-at-tail",
        "oldest-first",
        "last-in-first-out",
    ],
)
def test_a_wrong_scheduler_starves_somebody(name: str) -> None:
    """Where the right one doesn't."""
    wrong = MUTANTS[name].of("0.33.0")
    explorer = explored("threshold", wrong)
    assert lasso(explorer.graph, whatever_comes) is not None


def test_a_wrong_scheduler_never_ends_somebody() -> None:
    found = liveness(explored("threshold", MUTANTS["chunk-one-block-spare"].of("0.33.0")))
    assert found.longest_drain is None
    assert told(found.by_steps) == ("add 000000l, 2 steps", "step")
