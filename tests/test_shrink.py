"""Shrinking: down to what matters, and never to what doesn't show it."""

from __future__ import annotations

import time

import attrs
import pytest

from mustfit_checks.attribute import mutant_trace
from mustfit_checks.compare import compare
from mustfit_checks.generate import scenario
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.shrink import (
    Smallest,
    by_hypothesis,
    shrink,
    size,
    without_needless_requests,
)
from mustfit_spec import REVISIONS, Scenario, run

REVISION = "0.33.0"


def shows(name: str) -> list[Scenario]:
    """Scenarios on which a wrong scheduler is found out."""
    return [s for s in (scenario(seed=0, index=i) for i in range(200)) if diverges(name, s)]


def diverges(name: str, drawn: Scenario) -> bool:
    expected = run(drawn, REVISIONS[REVISION](drawn.config))
    return compare(expected, mutant_trace(drawn, MUTANTS[name], REVISION), "decisions") is not None


@pytest.mark.parametrize("name", ["admission-preempts", "oldest-first", "requeued-at-tail"])
def test_the_smallest_is_small_and_still_shows_it(name: str) -> None:
    first = shows(name)[0]
    smallest = shrink(first, lambda s: diverges(name, s))
    assert diverges(name, smallest)
    assert size(smallest) <= size(first)
    assert len(smallest.requests) <= 3
    assert smallest.num_steps <= 6


def test_hypothesis_starts_from_the_scenario_given() -> None:
    """Were its choices not found where Hypothesis looks for them, nothing would be shrunk."""
    first = shows("oldest-first")[0]
    considered: list[Scenario] = []

    def still_shows(candidate: Scenario) -> bool:
        considered.append(candidate)
        return diverges("oldest-first", candidate)

    by_hypothesis(Smallest(first, still_shows, left=10_000, deadline=time.monotonic() + 600))
    # The same but for tokens nobody samples: an output limit below what is sampled cuts those.
    assert considered[0].config == first.config
    assert considered[0].operations == first.operations
    assert len(considered) > 20


def test_what_only_the_original_shows_stays_the_original() -> None:
    first = scenario(seed=0, index=0)
    smallest = shrink(first, lambda candidate: size(candidate) >= size(first))
    assert size(smallest) == size(first)


def test_requests_that_are_not_needed_go_first() -> None:
    first = shows("oldest-first")[0]
    best = Smallest(
        first, lambda s: diverges("oldest-first", s), left=10_000, deadline=time.monotonic() + 600
    )
    without_needless_requests(best)
    for request in best.scenario.requests:
        fewer = tuple(r for r in best.scenario.requests if r is not request)
        operations = tuple(
            o for o in best.scenario.operations if o.request_id != request.request_id
        )
        without = attrs.evolve(best.scenario, requests=fewer, operations=operations)
        assert not diverges("oldest-first", without)


def test_no_more_is_asked_than_allowed() -> None:
    first = scenario(seed=0, index=0)
    asked = 0

    def counted(_: Scenario) -> bool:
        nonlocal asked
        asked += 1
        return True

    shrink(first, counted, candidates=30)
    # And once for the names of the tokens.
    assert asked <= 31


def test_time_is_kept() -> None:
    first = scenario(seed=0, index=0)

    def slowly(_: Scenario) -> bool:
        time.sleep(0.02)
        return True

    began = time.monotonic()
    shrink(first, slowly, seconds=0.2)
    assert time.monotonic() - began < 5
