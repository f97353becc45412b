"""Symbolic values: every path is taken, and each does what the code does with ordinary values."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mustfit_checks.symbolic import (
    Covered,
    Refuted,
    Unknown,
    assume,
    boolean,
    both,
    either,
    every_path,
    greatest,
    implies,
    integer,
    least,
    length,
    same,
    show,
    symbolic_builtins,
    witness,
)


def covered(program: Callable[[], None]) -> Covered:
    found = Covered()
    every_path(program, found)
    return found


def branching(x: Any, y: Any) -> Any:
    """Something that branches, splits and divides."""
    if x > y:
        return (x - y) // 3
    if x == y or not x % 2:
        return [x * 2, "equal or even"][y < 0]
    total = 0
    for i in range(4):
        total += i if i < x else -y
    return total


@given(st.integers(-9, 9), st.integers(-9, 9))
def test_each_path_does_what_the_code_does(x: int, y: int) -> None:
    """Of all paths, those for these values give what the code gives."""
    expected, found = branching(x, y), []

    def program() -> None:
        a, b = integer("a"), integer("b")
        got = branching(a, b)
        if both(a == x, b == y):
            # Whatever is left symbolic is known on this path.
            show(same(got, expected), "the same")
            found.append(got)

    covered(program)
    assert len(found) == 1


@given(st.integers(-50, 50), st.integers(1, 9))
def test_division_is_that_of_python(a: int, b: int) -> None:
    def program() -> None:
        x = integer("x")
        assume(x == a)
        show(same((x // b, x % b, -(-x // b)), (a // b, a % b, -(-a // b))), "the same")
        show(least(x, b) == min(a, b), "the smaller")
        show(least(4, x, b) == least([b, x, 4]), "the smallest")
        show(greatest(x, b) == max(a, b), "the greater")

    assert covered(program).paths == 1


def test_all_paths_are_taken_and_no_others() -> None:
    seen = []

    def program() -> None:
        x = integer("x")
        assume(x > 2)
        seen.append((bool(x > 5), bool(x > 3), bool(x > 1)))

    assert covered(program).paths == 3
    assert sorted(seen) == [(False, False, True), (False, True, True), (True, True, True)]


def test_what_does_not_hold_is_refuted_with_values() -> None:
    def program() -> None:
        x, wrong = integer("x", 0), boolean("wrong")
        if x > 10:
            show(either(x != 12, implies(wrong, x == 13)), "x is not 12")

    with pytest.raises(Refuted) as caught:
        covered(program)
    assert caught.value.values == {"x": 12, "wrong": True}
    assert str(caught.value) == "x is not 12: x=12, wrong=True"


def test_what_cannot_happen_is_never_witnessed() -> None:
    def program() -> None:
        x = integer("x", 0)
        witness("large", x > 100)
        witness("negative", x < 0)

    found = covered(program).witnesses
    assert found.keys() == {"large"}
    assert found["large"]["x"] > 100


def test_a_premise_that_contradicts_itself_has_no_path() -> None:
    def program() -> None:
        x = integer("x")
        assume(x > 1)
        assume(x < 2)
        show(condition=False, what="never reached")

    assert covered(program).paths == 0


def test_a_number_that_the_code_needs_is_split_into_all_its_cases() -> None:
    seen = []

    def program() -> None:
        x = integer("x", -1)
        assume(x <= 3)
        seen.append("abcde"[x])
        show(same(seen[-1], "abcde"[x]), "the same again")

    assert covered(program).paths == 5
    assert sorted(seen) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (lambda: hash(integer("x")), "more than 64 cases"),
        (lambda: integer("x") // integer("y", 1), "division"),
        (lambda: integer("x") // 0, "division"),
        (lambda: integer("x") // -2, "division"),
    ],
)
def test_what_can_not_be_decided_is_unknown(program: Callable[[], Any], why: str) -> None:
    with pytest.raises(Unknown, match=why):
        covered(program)


def test_a_program_that_does_not_do_the_same_again_is_an_error() -> None:
    numbers = iter(range(100))

    def program() -> None:
        bool(integer("x") > next(numbers))

    with pytest.raises(RuntimeError, match="do the same again"):
        covered(program)


def test_symbolic_values_are_of_use_along_a_path_only() -> None:
    with pytest.raises(RuntimeError, match="along a path"):
        integer("x")


def test_a_module_calls_what_knows_symbolic_values_for_that_time_only() -> None:
    module = types.ModuleType("module")
    exec(  # noqa: S102 - code with globals of its own
        "def f(x, s): return len(s), min(x, 3), [i for i in range(x)], int(x)", vars(module)
    )

    class Sized:
        def __init__(self, size: Any) -> None:
            self.symbolic_length = size

    def program() -> None:
        x = integer("x", 0)
        assume(x <= 2)
        with symbolic_builtins([module]):
            size, smaller, counted, whole = module.f(x, Sized(x))
        show(both(size == x, smaller == x, whole == x, x == len(counted)), "the same")

    assert covered(program).paths == 3
    assert module.f(2, "ab") == (2, 2, [0, 1], 2)
    assert not {"len", "range", "min", "max", "int"} & vars(module).keys()
    assert length("abc") == 3
