"""Every rule, broken on purpose, is found out; and what is found is that rule."""

from __future__ import annotations

from functools import cache

import pytest

from mustfit_checks.attribute import mutant_trace
from mustfit_checks.compare import compare
from mustfit_checks.generate import scenario
from mustfit_checks.judge import Judge
from mustfit_checks.mutants import MUTANTS, Mutant
from mustfit_checks.sut import InProcess
from mustfit_spec import REVISIONS, Profile, Scenario, Trace, rules_of, run

#: A wrong scheduler has to be found within so many scenarios.
ENOUGH = 2000

wrong = [
    pytest.param(mutant, revision, id=f"{mutant.name}-{revision}")
    for revision in REVISIONS
    for mutant in MUTANTS.values()
    if mutant.exists_in(revision)
]


@cache
def asked(revision: str, index: int) -> tuple[Scenario, Trace]:
    scheduler = REVISIONS[revision]
    drawn = scenario(seed=0, index=index, lacks=scheduler.lacks)
    return drawn, run(drawn, scheduler(drawn.config))


def found_after(mutant: Mutant, revision: str, profile: Profile) -> int | None:
    """How many scenarios it takes to find a wrong scheduler out."""
    for index in range(ENOUGH):
        drawn, expected = asked(revision, index)
        if compare(expected, mutant_trace(drawn, mutant, revision), profile) is not None:
            return index + 1
    return None


@pytest.mark.parametrize(("mutant", "revision"), wrong)
def test_a_broken_rule_is_found(mutant: Mutant, revision: str) -> None:
    assert found_after(mutant, revision, "identity") is not None


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_rule_has_a_mutant(revision: str) -> None:
    broken = {m.breaks for m in MUTANTS.values() if m.exists_in(revision)}
    assert broken == set(rules_of(REVISIONS[revision]))


def test_a_mutant_overrides_the_method_of_the_rule_that_it_breaks() -> None:
    """Or a method that this one calls, whose own name is no rule's."""
    rule_methods = {rule.method: rule.id for rule in rules_of(REVISIONS["0.21.0"]).values()}
    for mutant in MUTANTS.values():
        overridden = {rule_methods[n] for n in vars(mutant.part) if n in rule_methods}
        assert mutant.breaks in overridden or not overridden, mutant.name


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_judge_names_the_rule(mutant: Mutant) -> None:
    """At profile identity, for the newest revision that the mutant exists in."""
    revision = next(r for r in reversed(REVISIONS) if mutant.exists_in(r))
    scheduler = REVISIONS[revision]
    sut = InProcess(lambda drawn: mutant_trace(drawn, mutant, revision), name=mutant.name)
    judge = Judge(sut=sut, against=revision, revision=scheduler, profile="identity", stop_after=60)
    verdict = judge.judge(asked(revision, index)[0] for index in range(ENOUGH))
    assert verdict.verdict == "divergent"
    assert [(d.rule, d.behaves_like) for d in verdict.divergences] == [(mutant.breaks, mutant.name)]
    case = verdict.divergences[0]
    assert len(case.scenario.requests) <= 5
    assert case.scenario.num_steps <= 12
