"""Comparing two traces of one scenario."""

from __future__ import annotations

from typing import Any

import attrs

from mustfit_spec import Profile, StepTrace, Trace, fields_of

#: Fields whose order says nothing.
UNORDERED = frozenset({"preempted", "finished"})


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

    A scheduler that fails in a step agrees with one that fails in the same step.
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
    ends = (expected.error, observed.error)
    if len(expected.steps) == len(observed.steps) and (ends[0] is None) == (ends[1] is None):
        return None
    return Difference(
        step=min(len(expected.steps), len(observed.steps)),
        field="error",
        expected=_end(expected),
        observed=_end(observed),
    )


def _end(trace: Trace) -> str:
    if trace.error is None:
        return "goes on"
    return f"fails: {trace.error.kind}: {trace.error.message}"


def same(field: str, expected: Any, observed: Any) -> bool:
    """Whether two values of a field agree."""
    if field in UNORDERED:
        return sorted(expected) == sorted(observed)
    return bool(expected == observed)


def step_at(trace: Trace, step: int) -> StepTrace | None:
    """The entry of a step, if the trace got that far."""
    return trace.steps[step] if step < len(trace.steps) else None
