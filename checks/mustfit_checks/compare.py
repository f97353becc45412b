"""Comparing two traces of one scenario."""

from __future__ import annotations

from typing import Any

import attrs

from mustfit_spec import Profile, Trace, fields_of

#: Fields whose order says nothing. Within each list of ``cached_block_ids`` it does: the first is
#: the one that a lookup finds.
UNORDERED = frozenset({"preempted", "finished", "cached_block_ids"})

#: What a scheduler reports that found its own books wrong. No scheduler is right to.
INVARIANT_VIOLATION = "InvariantViolation"


@attrs.frozen(kw_only=True)
class Difference:
    """The first difference between what was expected and what was observed.

    Attributes:
        step: The step, counted from 0.
        field: The field of ``StepTrace`` that differs, or ``error``.
        expected: Its value in the trace that counts as right.
        observed: Its value in the other.
    """

    step: int
    field: str
    expected: Any
    observed: Any


def compare(expected: Trace, observed: Trace, profile: Profile) -> Difference | None:
    """The first difference, by step and then in the order of the profile's fields.

    A scheduler that fails in a step agrees with one that fails in the same step, whatever the
    words; but one that is observed to fail with ``InvariantViolation`` agrees with none.
    """
    for step, (one, other) in enumerate(zip(expected.steps, observed.steps, strict=False)):
        for field in fields_of(profile):
            if not same(field, getattr(one, field), getattr(other, field)):
                return Difference(
                    step=step,
                    field=field,
                    expected=getattr(one, field),
                    observed=getattr(other, field),
                )
    return _compare_ends(expected, observed)


def _compare_ends(expected: Trace, observed: Trace) -> Difference | None:
    step = min(len(expected.steps), len(observed.steps))
    violated = observed.error is not None and observed.error.kind == INVARIANT_VIOLATION
    same_length = len(expected.steps) == len(observed.steps)
    if same_length and (expected.error is None) == (observed.error is None) and not violated:
        return None
    return Difference(
        step=step,
        field="error",
        expected=_at(expected, step, other=observed),
        observed=_at(observed, step, other=expected),
    )


def _at(trace: Trace, step: int, *, other: Trace) -> str:
    """What a trace does where one of the two ends."""
    if len(trace.steps) > step:
        return "goes on"
    if trace.error is not None:
        return f"fails: {trace.error.kind}: {trace.error.message}"
    return "ends" if len(other.steps) > step else "goes on"


def same(field: str, expected: Any, observed: Any) -> bool:
    """Whether two values of a field agree."""
    if field in UNORDERED and expected is not None and observed is not None:
        return sorted(expected) == sorted(observed)
    return bool(expected == observed)
