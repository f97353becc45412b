"""Comparing traces: every field, at the profile that has it, and nothing else."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import attrs
import pytest

from mustfit_checks.compare import UNORDERED, Difference, compare
from mustfit_checks.generate import scenarios
from mustfit_spec import REVISIONS, Profile, StepTrace, Trace, fields_of, run
from mustfit_spec.trace import PROFILE_FIELDS, FinishReason, TraceError

PROFILES: tuple[Profile, ...] = ("decisions", "accounting", "identity")

#: The weakest profile that sees a field. By hand: that is what is promised.
WEAKEST: dict[str, Profile] = {
    "num_scheduled_tokens": "decisions",
    "preempted": "decisions",
    "finished": "decisions",
    "running": "decisions",
    "waiting": "decisions",
    "num_free_blocks": "accounting",
    "num_cached_tokens": "accounting",
    "num_blocks": "accounting",
    "finish_reasons": "accounting",
    "block_ids": "identity",
    "free_block_ids": "identity",
    "cached_block_ids": "identity",
}

FIELDS = [field.name for field in attrs.fields(StepTrace)]

Change = Callable[[Any], Any]


def swapped(value: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The last two the other way round."""
    return (*value[:-2], value[-1], value[-2]) if len(value) > 1 else None


def shorter(value: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return value[:-1] or () if value else None


def without_key(value: dict[str, Any]) -> dict[str, Any] | None:
    return dict(list(value.items())[:-1]) if value else None


def with_key(value: dict[str, Any]) -> dict[str, Any] | None:
    return {**value, "nobody": next(iter(value.values()))} if value else None


def in_mapping(change: Change) -> Change:
    """Changes the value of the last key that can be changed so."""

    def changed(value: dict[str, Any]) -> dict[str, Any] | None:
        for key in reversed(value):
            if (new := change(value[key])) is not None:
                return {**value, key: new}
        return None

    return changed


def in_list(change: Change) -> Change:
    """Changes the last element that can be changed so."""

    def changed(value: tuple[Any, ...]) -> tuple[Any, ...] | None:
        for index in reversed(range(len(value))):
            if (new := change(value[index])) is not None:
                return (*value[:index], new, *value[index + 1 :])
        return None

    return changed


def merged(value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...] | None:
    """Two contents taken for one."""
    return (*value[:-2], value[-2] + value[-1]) if len(value) > 1 else None


def split(value: tuple[int, ...]) -> tuple[int, ...] | None:
    return value[:1] if len(value) > 1 else None


def one_more(value: int) -> int:
    return value + 1


def other(value: str) -> str:
    return {"stop": "length", "length": "stop"}[value]


MAPPING: dict[str, Change] = {"a key less": without_key, "a key more": with_key}

#: How a field of each type is changed. A type that isn't here makes the test fail.
CHANGES: dict[Any, dict[str, Change]] = {
    int: {"one more": one_more, "one less": lambda value: value - 1},
    tuple[str, ...]: {
        "two swapped": swapped,
        "one less": shorter,
        "one more": lambda value: (*value, "nobody"),
        "one twice": lambda value: (*value, value[-1]) if value else None,
    },
    tuple[int, ...]: {"two swapped": swapped, "one less": shorter},
    tuple[tuple[int, ...], ...]: {
        "an inner swap": in_list(swapped),
        "a list less": shorter,
        "one less": in_list(split),
        "another block": in_list(lambda value: (*value[:-1], 999)),
        "two merged": merged,
    },
    dict[str, int]: MAPPING | {"one more": in_mapping(one_more)},
    dict[str, FinishReason]: MAPPING | {"the other": in_mapping(other)},
    dict[str, tuple[int, ...]]: MAPPING
    | {"two swapped": in_mapping(swapped), "one less": in_mapping(shorter)},
}


def changes_of(field: str) -> dict[str, Change]:
    hint = typing.get_type_hints(StepTrace)[field]
    for kind in typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,):
        if kind in CHANGES:
            found = CHANGES[kind]
            unordered = field in {"preempted", "finished"}
            return {n: c for n, c in found.items() if not (unordered and n == "two swapped")}
    raise AssertionError(f"how is {field} to be changed?")


CASES = [(field, name) for field in FIELDS for name in changes_of(field)]


@cache
def traces() -> tuple[Trace, ...]:
    """Real traces, of at least ten steps each, with an example of everything among them."""
    scheduler = REVISIONS["0.33.0"]
    drawn = scenarios(seed=0, count=200)
    found = (run(scenario, scheduler(scenario.config)) for scenario in drawn)
    return tuple(trace for trace in found if len(trace.steps) >= 10)


def replaced(trace: Trace, step: int, **fields: Any) -> Trace:
    steps = list(trace.steps)
    steps[step] = attrs.evolve(steps[step], **fields)
    return attrs.evolve(trace, steps=tuple(steps))


def places(field: str, change: Change, limit: int = 3) -> Iterator[tuple[Trace, int, Any]]:
    """A few steps where a field can be changed so, with its value then; the last of a trace."""
    for trace in traces():
        for step in reversed(range(len(trace.steps))):
            new = change(getattr(trace.steps[step], field))
            if new is not None:
                yield trace, step, new
                limit -= 1
                break
        if not limit:
            return


def test_every_field_is_known_here_and_compared() -> None:
    assert list(WEAKEST) == FIELDS
    assert list(fields_of("identity")) == FIELDS
    assert tuple(PROFILE_FIELDS) == PROFILES


@pytest.mark.parametrize("profile", PROFILES)
def test_a_trace_agrees_with_itself(profile: Profile) -> None:
    for trace in traces():
        assert compare(trace, trace, profile) is None


@pytest.mark.parametrize(("field", "name"), CASES)
def test_a_change_is_seen_at_its_field_and_step_and_not_below_its_profile(
    field: str, name: str
) -> None:
    found = list(places(field, changes_of(field)[name]))
    assert found, "no trace is rich enough"
    for trace, step, new in found:
        observed = replaced(trace, step, **{field: new})
        difference = Difference(
            step=step, field=field, expected=getattr(trace.steps[step], field), observed=new
        )
        weakest = PROFILES.index(WEAKEST[field])
        for profile in PROFILES[:weakest]:
            assert compare(trace, observed, profile) is None
        for profile in PROFILES[weakest:]:
            assert compare(trace, observed, profile) == difference
            back = compare(observed, trace, profile)
            assert back is not None
            assert (back.step, back.field) == (step, field)


@pytest.mark.parametrize("field", [f for f in FIELDS if WEAKEST[f] != "decisions"])
@pytest.mark.parametrize("step", [0, 4, -1])
def test_what_is_not_given_differs(field: str, step: int) -> None:
    trace = traces()[0]
    observed = replaced(trace, step, **{field: None})
    for one, two in ((trace, observed), (observed, trace)):
        found = compare(one, two, WEAKEST[field])
        assert found is not None
        assert (found.field, found.step) == (field, step % len(trace.steps))


@pytest.mark.parametrize("field", ["preempted", "finished", "cached_block_ids"])
def test_the_order_of_a_set_says_nothing(field: str) -> None:
    found = list(places(field, lambda value: value[::-1] if len(value) > 1 else None))
    assert found, "no trace is rich enough"
    for trace, step, new in found:
        assert new != getattr(trace.steps[step], field)
        assert compare(trace, replaced(trace, step, **{field: new}), "identity") is None
    assert {"preempted", "finished", "cached_block_ids"} == UNORDERED


def test_the_first_step_comes_first_and_then_the_first_field() -> None:
    trace = traces()[0]
    late = replaced(trace, 5, running=("nobody",), num_free_blocks=-1)
    found = compare(trace, late, "identity")
    assert found is not None
    assert (found.step, found.field) == (5, "running")
    found = compare(trace, replaced(late, 4, free_block_ids=()), "identity")
    assert found is not None
    assert (found.step, found.field) == (4, "free_block_ids")


# --- How traces end -------------------------------------------------------------------------------


def cut(length: int, kind: str | None = None, message: str = "") -> Trace:
    """A trace of so many steps, that then fails, or not."""
    error = None if kind is None else TraceError(step=length, kind=kind, message=message)
    return attrs.evolve(traces()[0], steps=traces()[0].steps[:length], error=error)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("expected", "observed", "said"),
    [
        (cut(8), cut(7), ("goes on", "ends")),
        (cut(7), cut(8), ("ends", "goes on")),
        (cut(7), cut(7, "KeyError", "7"), ("goes on", "fails: KeyError: 7")),
        (cut(7, "KeyError", "7"), cut(7), ("fails: KeyError: 7", "goes on")),
        (cut(8), cut(7, "KeyError", "7"), ("goes on", "fails: KeyError: 7")),
        (cut(7, "KeyError", "7"), cut(8), ("fails: KeyError: 7", "goes on")),
        (cut(7, "A", "b"), cut(8, "A", "b"), ("fails: A: b", "goes on")),
        (cut(8, "A", "b"), cut(7, "A", "b"), ("goes on", "fails: A: b")),
    ],
)
def test_ends_that_differ(
    expected: Trace, observed: Trace, said: tuple[str, str], profile: Profile
) -> None:
    assert compare(expected, observed, profile) == Difference(
        step=7, field="error", expected=said[0], observed=said[1]
    )


def test_failures_in_the_same_step_agree_whatever_the_words() -> None:
    for length in (0, 7):
        one, two = cut(length, "SchedulerFailure", "a"), cut(length, "AssertionError", "b")
        assert compare(one, two, "identity") is None


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "expected", [cut(7, "A", "b"), cut(7, "InvariantViolation", "x"), cut(7), cut(8), cut(8, "A")]
)
def test_a_violated_invariant_agrees_with_nothing(expected: Trace, profile: Profile) -> None:
    found = compare(expected, cut(7, "InvariantViolation", "x"), profile)
    assert found is not None
    assert (found.step, found.field) == (7, "error")
    assert found.observed == "fails: InvariantViolation: x"


def test_a_step_that_differs_comes_before_an_end() -> None:
    observed = replaced(cut(7, "InvariantViolation"), 6, waiting=("nobody",))
    found = compare(cut(8), observed, "decisions")
    assert found is not None
    assert (found.step, found.field) == (6, "waiting")
