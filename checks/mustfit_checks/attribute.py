"""Which rule a divergence is about.

First by imitation: a wrong scheduler that does on this scenario exactly what was observed names the
rule that it breaks. Where none does, by what differs, and what the specification did in that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from mustfit_checks.compare import Difference, compare
from mustfit_checks.mutants import MUTANTS, Mutant
from mustfit_spec import REVISIONS, Profile, Scenario, Scheduler, StepTrace, Trace, run

#: What a difference is about if nothing more is known.
BY_FIELD = {
    "num_scheduled_tokens": "STEP-ORDER",
    "preempted": "RUN-PREEMPT",
    "finished": "STEP-STOP",
    "running": "WAIT-ADMIT",
    "waiting": "WAIT-ORDER",
    "num_free_blocks": "ALLOC-COUNT",
    "num_cached_tokens": "CACHE-LOOKUP",
    "num_blocks": "ALLOC-SLOTS",
    "finish_reasons": "STEP-STOP",
    "block_ids": "ALLOC-HEAD",
    "free_block_ids": "ALLOC-FREE-ORDER",
    "cached_block_ids": "CACHE-AT-ALLOCATION",
}


@attrs.frozen(kw_only=True)
class Evidence:
    """A scenario on which a scheduler diverged, and what it did."""

    scenario: Scenario
    expected: Trace
    observed: Trace
    difference: Difference

    @property
    def failed(self) -> bool:
        """Whether the scheduler failed by itself where the specification doesn't."""
        return self.difference.field == "error" and self.observed.error is not None


def imitators(
    evidence: Evidence, revision: str, profile: Profile, among: Sequence[str] | None = None
) -> Iterator[str]:
    """Names of the wrong schedulers that explain what was observed, in catalogue order."""
    for name in MUTANTS if among is None else among:
        mutant = MUTANTS[name]
        if mutant.exists_in(revision) and explains(mutant, evidence, revision, profile):
            yield name


def explains(mutant: Mutant, evidence: Evidence, revision: str, profile: Profile) -> bool:
    """Whether a wrong scheduler does on this scenario just what was observed, to the end.

    A failure is explained only by one of the same kind: that two schedulers break down in the same
    step says little.
    """
    imitation = mutant_trace(evidence.scenario, mutant, revision)
    if evidence.failed and _kind(imitation) != _kind(evidence.observed):
        return False
    return compare(imitation, evidence.observed, profile) is None


def _kind(trace: Trace) -> str | None:
    return trace.error.kind if trace.error is not None else None


def mutant_trace(scenario: Scenario, mutant: Mutant, revision: str) -> Trace:
    """What a wrong scheduler does with a scenario; it may well break down on it."""
    return run(scenario, mutant.of(revision)(scenario.config), failures=(Exception,))


def rule_of(evidence: Evidence) -> str | None:
    """The rule that a divergence is probably about, from what differs; of a failure, none."""
    if evidence.failed:
        return None
    difference = evidence.difference
    expected = _entry(evidence.expected, difference.step)
    observed = _entry(evidence.observed, difference.step)
    if expected is None or observed is None:
        return "STEP-ASSERT"
    before = _entry(evidence.expected, difference.step - 1)
    if difference.field == "num_scheduled_tokens":
        return _rule_of_scheduling(evidence, expected, observed, before)
    if difference.field == "preempted":
        return _rule_of_preemption(expected, observed)
    if difference.field == "waiting":
        return _rule_of_queue(expected, observed)
    return BY_FIELD[difference.field]


def _entry(trace: Trace, step: int) -> StepTrace | None:
    return trace.steps[step] if 0 <= step < len(trace.steps) else None


def _rule_of_queue(expected: StepTrace, observed: StepTrace) -> str:
    if expected.preempted:
        return "PREEMPT-REQUEUE"
    return "WAIT-BLOCKED" if _same_but_order(expected.waiting, observed.waiting) else "WAIT-ORDER"


def _same_but_order(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return sorted(one) == sorted(other)


def _rule_of_scheduling(
    evidence: Evidence, expected: StepTrace, observed: StepTrace, before: StepTrace | None
) -> str:
    ran = set(before.running) if before is not None else set()
    if sorted(expected.preempted) != sorted(observed.preempted):
        return _rule_of_preemption(expected, observed)
    extra = set(observed.num_scheduled_tokens) - set(expected.num_scheduled_tokens)
    missing = set(expected.num_scheduled_tokens) - set(observed.num_scheduled_tokens)
    if extra - ran:
        return _rule_of_admission(evidence, expected, observed, extra - ran)
    if missing - ran:
        return "WAIT-GATE"
    if extra or missing:
        return "RUN-ORDER"
    changed = next(
        r for r, n in expected.num_scheduled_tokens.items() if observed.num_scheduled_tokens[r] != n
    )
    return "RUN-TOKENS" if changed in ran else "WAIT-TOKENS"


def _rule_of_admission(
    evidence: Evidence, expected: StepTrace, observed: StepTrace, admitted: set[str]
) -> str:
    """Somebody was admitted who shouldn't have been."""
    config = evidence.scenario.config
    budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    if expected.preempted:
        return "WAIT-AFTER-PREEMPT"
    if sum(observed.num_scheduled_tokens.values()) > budget:
        return "STEP-BUDGET"
    if len(observed.num_scheduled_tokens) > (config.max_num_active_seqs or config.max_num_seqs):
        return "WAIT-SEATS"
    head = expected.waiting[:1]
    return "ALLOC-GATE" if admitted & set(head) else "WAIT-LOOP"


def _rule_of_preemption(expected: StepTrace, observed: StepTrace) -> str:
    if expected.preempted and observed.preempted:
        return "PREEMPT-VICTIM"
    if observed.preempted and expected.waiting:
        return "WAIT-BLOCKED"
    return "RUN-PREEMPT"


def revision_name(revision: type[Scheduler]) -> str:
    """What a revision is called in the table of revisions."""
    return next(name for name, scheduler in REVISIONS.items() if scheduler is revision)
