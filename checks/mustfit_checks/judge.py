"""Judging a scheduler: the same scenarios on it and on the specification, and a verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import attrs

from mustfit_checks.attribute import (
    Evidence,
    explains,
    imitators,
    mutant_trace,
    revision_name,
    rule_of,
)
from mustfit_checks.compare import Difference, compare
from mustfit_checks.exercise import exercised
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.shrink import shrink
from mustfit_checks.sut import Sut, SutError
from mustfit_spec import Profile, Scenario, Scheduler, Trace, rules_of, run

Outcome = Literal["conformant", "divergent", "undecided"]


@attrs.frozen(kw_only=True)
class Divergence:
    """One way in which the scheduler differs, shown on the smallest scenario found.

    Attributes:
        rule: The ID of the rule that is broken.
        scenario: The smallest scenario that shows it.
        expected: What the specification does with it.
        observed: What the scheduler did.
        difference: The first difference between these.
        behaves_like: The wrong scheduler that does just the same on every scenario of this kind,
            if one does.
        found_in: The ids of the generated scenarios that showed it.
    """

    rule: str
    scenario: Scenario
    expected: Trace
    observed: Trace
    difference: Difference
    behaves_like: str | None
    found_in: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Verdict:
    """What came of judging a scheduler.

    Attributes:
        verdict: ``divergent`` if any scenario differed; else ``undecided`` if not all were
            answered; else ``conformant``.
        reason: Why not all were answered, in one line.
        scenarios: How many were answered and compared.
        steps: How many steps were compared.
        divergences: One for each kind.
        diverged: How many scenarios differed.
        rules: For each rule of the revision, how many scenarios exercised it.
        seconds: How long it took, shrinking not counted.
    """

    verdict: Outcome
    sut: str
    against: str
    profile: Profile
    reason: str | None
    scenarios: int
    steps: int
    divergences: tuple[Divergence, ...]
    diverged: int
    rules: dict[str, int]
    seconds: float

    @property
    def never_exercised(self) -> tuple[str, ...]:
        """Rules that no scenario exercised: about these the verdict says nothing."""
        return tuple(rule_id for rule_id, count in self.rules.items() if count == 0)


@attrs.define(kw_only=True)
class _Group:
    """Divergent scenarios of one kind."""

    rule: str
    imitators: list[str]
    evidence: list[Evidence]
    #: Ids of all the scenarios of this kind, also of those that were not kept.
    found_in: list[str]


@attrs.define(kw_only=True)
class Judge:
    """Compares a scheduler with a revision of the specification.

    Attributes:
        sut: The scheduler under test.
        against: The release that it is judged by, as it is to be called.
        revision: What this release does.
        profile: What is compared.
        stop_after: Divergent scenarios after which judging stops.
        kept_of_a_kind: Divergent scenarios that are kept of each kind, to tell what they are like.
        shrink_seconds: Seconds for making one case small.
    """

    sut: Sut
    against: str
    revision: type[Scheduler]
    profile: Profile
    stop_after: int = 100
    kept_of_a_kind: int = 20
    shrink_seconds: float = 60.0

    _groups: list[_Group] = attrs.field(factory=list, init=False)
    _rules: Counter[str] = attrs.field(factory=Counter, init=False)
    _scenarios: int = attrs.field(default=0, init=False)
    _steps: int = attrs.field(default=0, init=False)
    _diverged: int = attrs.field(default=0, init=False)

    def judge(
        self,
        scenarios: Iterable[Scenario],
        *,
        progress: Callable[[str], None] = lambda _: None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Verdict:
        """The verdict over all scenarios, or over as many as could be answered.

        An interrupt (Ctrl-C) ends the judging, not the verdict: what was found stays found.

        Args:
            scenarios: What to judge by.
            progress: Told in a few words what is being done.
            advance: Told how many scenarios have been compared so far.
        """
        began = time.monotonic()
        reason: str | None = None
        try:
            reason = self._compare_all(scenarios, advance)
        except SutError as error:
            reason = str(error)
        except KeyboardInterrupt:
            reason = f"interrupted after {self._scenarios} scenarios"
        seconds = time.monotonic() - began
        divergences = tuple(self._conclude(group, progress) for group in self._groups)
        if self._diverged:
            verdict: Outcome = "divergent"
        else:
            verdict = "undecided" if reason or not self._scenarios else "conformant"
        return Verdict(
            verdict=verdict,
            sut=self.sut.name,
            against=self.against,
            profile=self.profile,
            reason=reason or (None if self._scenarios else "there was no scenario to judge by"),
            scenarios=self._scenarios,
            steps=self._steps,
            divergences=divergences,
            diverged=self._diverged,
            rules={rule_id: self._rules[rule_id] for rule_id in rules_of(self.revision)},
            seconds=seconds,
        )

    def _compare_all(
        self, scenarios: Iterable[Scenario], advance: Callable[[int], None]
    ) -> str | None:
        asked: list[Scenario] = []
        traces = self.sut.traces(_noted(scenarios, asked))
        for observed in traces:
            self._compare(asked.pop(0), observed)
            advance(self._scenarios)
            if self._diverged >= self.stop_after:
                return f"stopped after {self._diverged} divergent scenarios"
        return None

    def _compare(self, scenario: Scenario, observed: Trace) -> None:
        expected, rules = exercised(scenario, self.revision)
        self._scenarios += 1
        self._steps += len(observed.steps)
        self._rules.update(rules)
        difference = compare(expected, observed, self.profile)
        if difference is not None:
            self._diverged += 1
            self._group(
                Evidence(
                    scenario=scenario, expected=expected, observed=observed, difference=difference
                )
            )

    # --- Kinds of divergence ------------------------------------------------------------------

    def _group(self, evidence: Evidence) -> None:
        """Put a divergent scenario with those of its kind.

        Of one kind are those that the same wrong scheduler explains; where none does, those that
        break the same rule.
        """
        revision = revision_name(self.revision)
        for group in self._groups:
            if group.imitators:
                still = list(imitators(evidence, revision, self.profile, group.imitators))
                if still:
                    group.imitators = still
                    self._add(group, evidence)
                    return
        found = list(imitators(evidence, revision, self.profile))
        rule = MUTANTS[found[0]].breaks if found else rule_of(evidence)
        for group in self._groups:
            if not found and not group.imitators and group.rule == rule:
                self._add(group, evidence)
                return
        group = _Group(rule=rule, imitators=found, evidence=[], found_in=[])
        self._groups.append(group)
        self._add(group, evidence)

    def _add(self, group: _Group, evidence: Evidence) -> None:
        if group.imitators:
            group.rule = MUTANTS[group.imitators[0]].breaks
        group.found_in.append(evidence.scenario.scenario_id)
        if len(group.evidence) < self.kept_of_a_kind:
            group.evidence.append(evidence)

    def _conclude(self, group: _Group, progress: Callable[[str], None]) -> Divergence:
        """The smallest case of a kind, and what it shows."""
        progress(f"making the case for {group.rule} small")
        imitator = group.imitators[0] if group.imitators else None
        first = group.evidence[0]

        def still_shows(scenario: Scenario) -> bool:
            return self._shows(scenario, group.rule, imitator) is not None

        evidence = first
        try:
            smallest = shrink(first.scenario, still_shows, seconds=self.shrink_seconds)
            evidence = self._shows(smallest, group.rule, imitator) or first
        except (SutError, KeyboardInterrupt) as stopped:
            # The case as it was found has to do.
            progress(f"the case for {group.rule} stays as it was found: {stopped or 'interrupted'}")
        return Divergence(
            rule=group.rule,
            scenario=evidence.scenario,
            expected=evidence.expected,
            observed=evidence.observed,
            difference=evidence.difference,
            behaves_like=imitator,
            found_in=tuple(group.found_in),
        )

    def _shows(self, scenario: Scenario, rule: str, imitator: str | None) -> Evidence | None:
        """The evidence, if a scenario diverges in the same way as the group."""
        expected = run(scenario, self.revision(scenario.config))
        if imitator is not None:
            # Where the imitator agrees with the specification, there is nothing to ask.
            revision = revision_name(self.revision)
            imitation = mutant_trace(scenario, MUTANTS[imitator], revision)
            if compare(expected, imitation, self.profile) is None:
                return None
        evidence = self._evidence(scenario, expected)
        if evidence is None:
            return None
        if imitator is None:
            return evidence if rule_of(evidence) == rule else None
        mutant = MUTANTS[imitator]
        same = explains(mutant, evidence, revision_name(self.revision), self.profile)
        return evidence if same else None

    def _evidence(self, scenario: Scenario, expected: Trace | None = None) -> Evidence | None:
        """What the scheduler does with a scenario, if it diverges there."""
        expected = expected or run(scenario, self.revision(scenario.config))
        observed = self.sut.ask(scenario)
        difference = compare(expected, observed, self.profile)
        if difference is None:
            return None
        return Evidence(
            scenario=scenario, expected=expected, observed=observed, difference=difference
        )


def _noted(scenarios: Iterable[Scenario], asked: list[Scenario]) -> Iterator[Scenario]:
    """The same scenarios, noted as they are asked for: the scheduler is asked ahead."""
    for scenario in scenarios:
        asked.append(scenario)
        yield scenario
