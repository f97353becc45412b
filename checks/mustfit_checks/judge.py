"""Judging a scheduler: the same scenarios on it and on the specification, and a verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import tee
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
from mustfit_checks.measured import measurements
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.shrink import shrink, size
from mustfit_checks.sut import Sut, SutError
from mustfit_spec import REVISIONS, Profile, Scenario, Scheduler, Trace, rules_of, run

Outcome = Literal["conformant", "divergent", "undecided"]


class Undecided(Exception):
    """There is no point in going on. Its text is one line that says why."""


class BadScenario(Exception):
    """A scenario that can't be judged by. Its text is one line that says which and why."""


@attrs.frozen(kw_only=True)
class Divergence:
    """One way in which the scheduler differs, shown on the smallest scenario found.

    Attributes:
        rule: The ID of the rule that is broken: for sure if ``behaves_like`` is given, else judging
            by what differs. ``None`` if the scheduler failed by itself.
        scenario: The smallest scenario that shows it.
        expected: What the specification does with it.
        observed: What the scheduler did.
        difference: The first difference between these.
        behaves_like: The wrong scheduler that does just the same on every scenario of this kind,
            if one does.
        found_in: The ids of the generated scenarios that showed it.
    """

    rule: str | None
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
        stuck_on: The scenario whose answer was due when the scheduler under test let go.
        stderr: The end of what it said on stderr then.
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
    stuck_on: Scenario | None = None
    stderr: str = ""

    @property
    def never_exercised(self) -> tuple[str, ...]:
        """Rules that no scenario exercised: about these the verdict says nothing."""
        return tuple(rule_id for rule_id, count in self.rules.items() if count == 0)


@attrs.define(kw_only=True)
class _Group:
    """Divergent scenarios of one kind."""

    rule: str | None
    imitators: list[str]
    evidence: list[Evidence]


@attrs.define(kw_only=True)
class Judge:
    """Compares a scheduler with a revision of the specification, or with another scheduler.

    Attributes:
        sut: The scheduler under test.
        against: The release that it is judged by, as it is to be called.
        revision: What this release does.
        profile: What is compared.
        stop_after: Divergent scenarios after which judging stops.
        kept: Divergent scenarios that are kept, to tell what they are like.
        any_release: Whether the scheduler may claim to follow another release than this.
        reference: Who says what is right, if it isn't the specification. Which rules were exercised
            is still the specification's to say.
    """

    sut: Sut
    against: str
    revision: type[Scheduler]
    profile: Profile
    stop_after: int = 100
    kept: int = 200
    any_release: bool = True
    reference: Sut | None = None

    _groups: list[_Group] = attrs.field(factory=list, init=False)
    _evidence: list[Evidence] = attrs.field(factory=list, init=False)
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
        stuck: SutError | None = None
        try:
            reason = self._compare_all(scenarios, advance)
        except SutError as error:
            reason, stuck = str(error), error
        except (Undecided, BadScenario) as error:
            reason = str(error)
        except KeyboardInterrupt:
            reason = f"interrupted after {self._scenarios} scenarios"
        seconds = time.monotonic() - began
        divergences = self._conclude_all(progress)
        if self._evidence:
            verdict: Outcome = "divergent"
        else:
            verdict = "undecided" if reason or not self._steps else "conformant"
        return Verdict(
            verdict=verdict,
            sut=self.sut.name,
            against=self.against,
            profile=self.profile,
            reason=reason or (None if self._steps else "there was no step to judge by"),
            scenarios=self._scenarios,
            steps=self._steps,
            divergences=divergences,
            diverged=self._diverged,
            rules={rule_id: self._rules[rule_id] for rule_id in rules_of(self.revision)},
            seconds=seconds,
            stuck_on=stuck.scenario if stuck else None,
            stderr=stuck.stderr if stuck else "",
        )

    def _compare_all(
        self, scenarios: Iterable[Scenario], advance: Callable[[int], None]
    ) -> str | None:
        asked: list[Scenario] = []
        scenarios, again = tee(scenarios)
        right = self.reference.traces(again) if self.reference is not None else None
        for observed in self.sut.traces(_noted(scenarios, asked)):
            self._compare(asked.pop(0), observed, next(right) if right is not None else None)
            advance(self._scenarios)
            if self._diverged >= self.stop_after:
                return f"stopped after {self._diverged} divergent scenarios"
        return None

    def _compare(self, scenario: Scenario, observed: Trace, right: Trace | None) -> None:
        self._check_claims(scenario, observed)
        specified, rules = exercised(scenario, self.revision)
        expected = right or specified
        difference = compare(expected, observed, self.profile)
        if difference is not None:
            # Noted first: whatever interrupts what follows, it was found.
            self._diverged += 1
            if self._diverged <= self.kept:
                self._evidence.append(
                    Evidence(
                        scenario=scenario,
                        expected=expected,
                        observed=observed,
                        difference=difference,
                    )
                )
        self._scenarios += 1
        self._steps += len(observed.steps) + (observed.error is not None)
        self._rules.update(rules)

    def _check_claims(self, scenario: Scenario, observed: Trace) -> None:
        """What the scheduler says about itself that makes a comparison pointless."""
        if observed.error is not None and _is_unsupported(observed):
            raise Undecided(
                f"{self.sut.name} can't do scenario {scenario.scenario_id!r}: "
                f"{observed.error.message}; --against picks the release to judge by"
            )
        claimed = measurements().get(observed.release or "")
        if claimed and not self.any_release and REVISIONS[claimed.revision] is not self.revision:
            raise Undecided(
                f"{self.sut.name} follows vLLM {claimed.release}, which does not do what "
                f"{self.against} does: judge it with --against {claimed.release}, "
                f"or with --against {self.against} if that is what you want"
            )

    # --- Kinds of divergence ------------------------------------------------------------------

    def _conclude_all(self, progress: Callable[[str], None]) -> tuple[Divergence, ...]:
        """The kinds of divergence, the most frequent first, each with its smallest case.

        An interrupt ends the shrinking: the cases are shown as they were found.
        """
        try:
            for evidence in self._evidence:
                self._group(evidence)
        except KeyboardInterrupt:
            progress("interrupted: not every divergent scenario was looked into")
            if not self._groups:
                first = self._evidence[0]
                self._groups.append(_Group(rule=rule_of(first), imitators=[], evidence=[first]))
        concluded: list[Divergence] = []
        for group in sorted(self._groups, key=lambda group: -len(group.evidence)):
            try:
                concluded.append(self._conclude(group, progress))
            except KeyboardInterrupt:
                progress("interrupted: this case stays as it was found")
                concluded.append(_divergence(group, group.evidence[0]))
        return tuple(concluded)

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
                    group.rule = MUTANTS[still[0]].breaks
                    group.evidence.append(evidence)
                    return
        found = list(imitators(evidence, revision, self.profile))
        rule = MUTANTS[found[0]].breaks if found else rule_of(evidence)
        for group in self._groups:
            if not found and not group.imitators and group.rule == rule:
                group.evidence.append(evidence)
                return
        self._groups.append(_Group(rule=rule, imitators=found, evidence=[evidence]))

    def _conclude(self, group: _Group, progress: Callable[[str], None]) -> Divergence:
        """The smallest case of a kind, and what it shows."""
        called = group.rule or "the scheduler's failure"
        progress(f"making the case for {called} small")
        imitator = group.imitators[0] if group.imitators else None
        evidence = min(group.evidence, key=lambda e: size(e.scenario))
        gone: list[SutError] = []

        def still_shows(scenario: Scenario) -> bool:
            try:
                return not gone and self._shows(scenario, group.rule, imitator) is not None
            except SutError as error:
                # A scheduler that let go once is not asked again, each time for its time-out.
                gone.append(error)
                return False

        smallest = shrink(evidence.scenario, still_shows)
        if gone:
            progress(f"the case for {called} is as small as it got: {gone[0]}")
            return _divergence(group, evidence)
        return _divergence(group, self._shows(smallest, group.rule, imitator) or evidence)

    def _shows(self, scenario: Scenario, rule: str | None, imitator: str | None) -> Evidence | None:
        """The evidence, if a scenario diverges in the same way as the group."""
        expected = self._expected(scenario)
        if imitator is not None:
            # Where the imitator agrees with the specification, there is nothing to ask.
            revision = revision_name(self.revision)
            imitation = mutant_trace(scenario, MUTANTS[imitator], revision)
            if compare(expected, imitation, self.profile) is None:
                return None
        evidence = self._diverges(scenario, expected)
        if evidence is None:
            return None
        if imitator is None:
            return evidence if rule_of(evidence) == rule else None
        mutant = MUTANTS[imitator]
        same = explains(mutant, evidence, revision_name(self.revision), self.profile)
        return evidence if same else None

    def _expected(self, scenario: Scenario) -> Trace:
        """What is right."""
        if self.reference is not None:
            return self.reference.ask(scenario)
        return run(scenario, self.revision(scenario.config))

    def _diverges(self, scenario: Scenario, expected: Trace) -> Evidence | None:
        """What the scheduler does with a scenario, if it diverges there."""
        observed = self.sut.ask(scenario)
        difference = compare(expected, observed, self.profile)
        if difference is None or _is_unsupported(observed):
            return None
        return Evidence(
            scenario=scenario, expected=expected, observed=observed, difference=difference
        )


def _is_unsupported(observed: Trace) -> bool:
    """Whether the scheduler says that it doesn't have what the scenario asks for."""
    return observed.error is not None and observed.error.kind == "Unsupported"


def _divergence(group: _Group, evidence: Evidence) -> Divergence:
    return Divergence(
        rule=group.rule,
        scenario=evidence.scenario,
        expected=evidence.expected,
        observed=evidence.observed,
        difference=evidence.difference,
        behaves_like=group.imitators[0] if group.imitators else None,
        found_in=tuple(e.scenario.scenario_id for e in group.evidence),
    )


def _noted(scenarios: Iterable[Scenario], asked: list[Scenario]) -> Iterator[Scenario]:
    """The same scenarios, noted as they are asked for: the scheduler is asked ahead."""
    for scenario in scenarios:
        asked.append(scenario)
        yield scenario
