"""Running code on symbolic values, along every path that it can take.

A program is run again and again. Where it asks whether a symbolic condition holds, both answers are
possible as far as z3 knows, or one is; each possible one is a path of its own. So what was shown on
every path was shown for all values. It is the shipped functions that run: for that time their
modules' ``len``, ``range``, ``min``, ``max`` and ``int`` are ones that know symbolic values, too.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import attrs
import z3


class Unknown(Exception):
    """It could not be decided. Its text is one line that says what."""


class Refuted(Exception):
    """What was to be shown doesn't hold.

    Attributes:
        what: What was to be shown.
        values: Values for which it doesn't, by name.
    """

    def __init__(self, what: str, values: dict[str, int | bool]) -> None:
        self.what = what
        self.values = values
        super().__init__(f"{what}: {', '.join(f'{n}={v}' for n, v in values.items())}")


class _NoPath(Exception):
    """What was assumed can't be: there is no such path."""


#: The condition that always holds.
ALWAYS = z3.BoolVal(val=True)

#: Milliseconds that z3 has for a question. What takes longer isn't known.
TIMEOUT = 20_000

#: Cases into which a number may be split where the code needs one.
MOST_CASES = 64


class Path:
    """One way through a program.

    Attributes:
        alternatives: Where other ways branch off: the answers up to there.
        queries: Questions that z3 was asked.
        witnesses: What was seen on this way, with values for which it is gone.
    """

    def __init__(self, answers: tuple[tuple[int, bool], ...]) -> None:
        self.alternatives: list[tuple[tuple[int, bool], ...]] = []
        self.queries = 0
        self.witnesses: dict[str, dict[str, int | bool]] = {}
        self._given = answers
        self._answers: list[tuple[int, bool]] = []
        self._solver = z3.Solver()
        self._solver.set("timeout", TIMEOUT)
        self._named: dict[str, Any] = {}
        self._example: Any = None

    def fresh(self, name: str, expression: Any) -> Any:
        """A variable of that name, which this way has only one of."""
        if name in self._named:
            raise ValueError(f"{name!r} is there already")
        self._named[name] = expression
        return expression

    def assume(self, condition: Any) -> None:
        """From here on, this holds."""
        self._add(_boolean(condition))

    def decide(self, condition: Any) -> bool:
        """Whether a condition holds on this way."""
        known = _known(condition)
        if known is not None:
            return bool(known)
        place, digest = len(self._answers), condition.hash()
        if place < len(self._given):
            asked, answer = self._given[place]
            if asked != digest:
                raise RuntimeError("the program didn't do the same again")
        else:
            answer = self._decide_anew(condition, digest)
        self._answers.append((digest, answer))
        self._add(condition if answer else z3.Not(condition))
        return answer

    def _decide_anew(self, condition: Any, digest: int) -> bool:
        """Whether it can hold; if it can fail to, that is another way."""
        # What one example says needs no question.
        holds = z3.is_true(self.example().eval(condition, model_completion=True))
        other = self._find(z3.Not(condition) if holds else condition)
        if other is None:
            return bool(holds)
        self.alternatives.append((*self._answers, (digest, False)))
        if not holds:
            self._example = other
        return True

    def one_of(self, number: Any) -> int:
        """A value of a number on this way; each is a way of its own."""
        for _ in range(MOST_CASES):
            place = len(self._answers)
            if place < len(self._given):
                # The value that was tried then is in the digest's place.
                note, answer = self._given[place]
                tried = -note - _TRIED
            else:
                value = self.example().eval(number, model_completion=True)
                tried, answer = int(value.as_long()), True
                note = -tried - _TRIED
                if self._find(number != tried) is not None:
                    self.alternatives.append((*self._answers, (note, False)))
            self._answers.append((note, answer))
            self._add(number == tried if answer else number != tried)
            if answer:
                return tried
        raise Unknown(f"a number had to be split into more than {MOST_CASES} cases")

    def show(self, condition: Any, what: str) -> None:
        """Shows that a condition holds on this way.

        Raises:
            Refuted: It doesn't.
        """
        self.example()
        against = self._find(z3.Not(_boolean(condition)))
        if against is not None:
            raise Refuted(what, self._values(against))

    def witness(self, what: str, condition: Any = ALWAYS) -> None:
        """Notes that something can happen on this way, if it can."""
        if what in self.witnesses:
            return
        example = self._find(_boolean(condition))
        if example is not None:
            self.witnesses[what] = self._values(example)

    def example(self) -> Any:
        """Values for which this way is gone. Where there are none, it ends."""
        if self._example is None:
            self._example = self._find()
            if self._example is None:
                raise _NoPath
        return self._example

    def _add(self, condition: Any) -> None:
        self._solver.add(condition)
        example = self._example
        if example is not None and not z3.is_true(example.eval(condition, model_completion=True)):
            self._example = None

    def _find(self, *conditions: Any) -> Any:
        """Values for which all holds that was added, and these; ``None`` if there are none."""
        self.queries += 1
        answer = self._solver.check(*conditions)
        if answer == z3.unknown:
            raise Unknown(f"z3 gave up: {self._solver.reason_unknown()}")
        return self._solver.model() if answer == z3.sat else None

    def _values(self, example: Any) -> dict[str, int | bool]:
        values = {n: example.eval(e, model_completion=True) for n, e in self._named.items()}
        return {
            name: bool(z3.is_true(value)) if z3.is_bool(value) else int(value.as_long())
            for name, value in values.items()
        }


#: Keeps noted values apart from digests, which aren't negative.
_TRIED = 1 << 40

_paths: list[Path] = []


def current() -> Path:
    """The path that is being taken.

    Raises:
        RuntimeError: None is.
    """
    if not _paths:
        raise RuntimeError("symbolic values are of use along a path only")
    return _paths[-1]


@attrs.define
class Covered:
    """What was covered.

    Attributes:
        paths: Ways that were taken.
        queries: Questions that z3 was asked.
        witnesses: What was seen, with values for which it happens.
    """

    paths: int = 0
    queries: int = 0
    witnesses: dict[str, dict[str, int | bool]] = attrs.field(factory=dict)


def every_path(program: Callable[[], None], covered: Covered) -> None:
    """Takes every path of a program.

    Raises:
        Refuted: On one of them, what was to be shown doesn't hold.
        Unknown: It could not be decided.
    """
    _values.clear()
    left: list[tuple[tuple[int, bool], ...]] = [()]
    while left:
        path = Path(left.pop())
        _paths.append(path)
        try:
            program()
            path.example()
            covered.paths += 1
        except _NoPath:
            pass
        finally:
            _paths.pop()
            covered.queries += path.queries
        left += path.alternatives
        for what, values in path.witnesses.items():
            covered.witnesses.setdefault(what, values)


# --- Values -----------------------------------------------------------------------------------


def integer(name: str, least: int | None = None) -> Any:
    """Any whole number, or any from ``least`` on."""
    expression = current().fresh(name, z3.Int(name))
    if least is not None:
        current().assume(expression >= least)
    return Int(expression)


def boolean(name: str) -> Any:
    """True or false."""
    return Bool(current().fresh(name, z3.Bool(name)))


def assume(condition: Any) -> None:
    """From here on, this holds."""
    current().assume(condition)


def show(condition: Any, what: str) -> None:
    """Shows that this holds."""
    current().show(condition, what)


def witness(what: str, condition: Any = ALWAYS) -> None:
    """Notes that this can happen, if it can."""
    current().witness(what, condition)


def _number(value: Any) -> Any:
    """A z3 expression; none for what is no number."""
    if isinstance(value, Int):
        return value.expression
    if isinstance(value, Bool):
        return z3.If(value.expression, z3.IntVal(1), z3.IntVal(0))
    if isinstance(value, int):
        return z3.IntVal(int(value))
    return None


def _boolean(value: Any) -> Any:
    if isinstance(value, Bool):
        return value.expression
    return z3.BoolVal(value) if isinstance(value, bool) else value


def _int(expression: Any) -> Any:
    """A number; an ordinary one where it is known."""
    known = _known(expression)
    return Int(expression) if known is None else known


def _bool(expression: Any) -> Any:
    known = _known(expression)
    return Bool(expression) if known is None else known


def _known(expression: Any) -> int | bool | None:
    """The value of an expression that is the same for all values of its variables.

    The expression itself is left as it is: how z3 simplifies it may differ from run to run.
    """
    number = expression.get_id()
    if number in _values:
        return _values[number][1]
    simple = z3.simplify(expression)
    value: int | bool | None = None
    if z3.is_true(simple) or z3.is_false(simple):
        value = bool(z3.is_true(simple))
    elif z3.is_int_value(simple):
        value = int(simple.as_long())
    _values[number] = expression, value
    return value


#: What ``_known`` has said, by the expressions' numbers, which are theirs as long as they are kept.
#: The paths of a program have most of them in common.
_values: dict[int, tuple[Any, int | bool | None]] = {}


def _operator(work: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        mine, others = _number(self), _number(other)
        if others is None:
            return NotImplemented
        return work(mine, others)

    return method


def _divide(a: Any, b: Any) -> Any:
    """``a // b``, as z3 and Python both have it if ``b`` is positive."""
    if not z3.is_int_value(b) or b.as_long() < 1:
        raise Unknown("division by something other than a positive number")
    return a / b


class _Symbolic:
    """What numbers and conditions have in common: a condition counts as 0 or 1."""

    __slots__ = ("expression",)

    def __init__(self, expression: Any) -> None:
        self.expression = expression

    __add__ = _operator(lambda a, b: _int(a + b))
    __radd__ = _operator(lambda a, b: _int(b + a))
    __sub__ = _operator(lambda a, b: _int(a - b))
    __rsub__ = _operator(lambda a, b: _int(b - a))
    __mul__ = _operator(lambda a, b: _int(a * b))
    __rmul__ = _operator(lambda a, b: _int(b * a))
    __floordiv__ = _operator(lambda a, b: _int(_divide(a, b)))
    __mod__ = _operator(lambda a, b: _int(a - _divide(a, b) * b))
    __lt__ = _operator(lambda a, b: _bool(a < b))
    __le__ = _operator(lambda a, b: _bool(a <= b))
    __gt__ = _operator(lambda a, b: _bool(a > b))
    __ge__ = _operator(lambda a, b: _bool(a >= b))
    __eq__ = _operator(lambda a, b: _bool(a == b))
    __ne__ = _operator(lambda a, b: _bool(a != b))

    def __neg__(self) -> Any:
        return _int(-_number(self))

    def __index__(self) -> int:
        return current().one_of(_number(self))

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __repr__(self) -> str:
        return str(self.expression)


class Int(_Symbolic):
    """A whole number that isn't known."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return current().decide(self.expression != 0)


class Bool(_Symbolic):
    """A condition that isn't known."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return current().decide(self.expression)


def both(*conditions: Any) -> Any:
    """Whether all of them hold."""
    return _bool(z3.And(*map(_boolean, conditions)))


def either(*conditions: Any) -> Any:
    """Whether any of them holds."""
    return _bool(z3.Or(*map(_boolean, conditions)))


def implies(premise: Any, conclusion: Any) -> Any:
    """Whether the one follows from the other."""
    return _bool(z3.Implies(_boolean(premise), _boolean(conclusion)))


def same(one: Any, other: Any) -> Any:
    """Whether two values are equal, however deep, as a condition: nothing branches."""
    if isinstance(one, _Symbolic) or isinstance(other, _Symbolic):
        return one == other
    if attrs.has(type(one)) and type(one) is type(other):
        names = [field.name for field in attrs.fields(type(one))]
        return both(*(same(getattr(one, name), getattr(other, name)) for name in names))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and both(*(same(one[key], other[key]) for key in one))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and both(*map(same, one, other))
    return bool(one == other)


# --- What the code calls ----------------------------------------------------------------------


def _is_symbolic(*values: Any) -> bool:
    return any(isinstance(value, _Symbolic) for value in values)


def length(value: Any) -> Any:
    """``len``."""
    found = getattr(value, "symbolic_length", None)
    return builtins.len(value) if found is None else found


def _range(*given: Any) -> Iterable[Any]:
    return _counted(*given) if _is_symbolic(*given) else builtins.range(*given)


def _counted(*given: Any) -> Iterator[Any]:
    start, end = (0, given[0]) if builtins.len(given) == 1 else given
    while start < end:
        yield start
        start = start + 1


def least(*given: Any, **more: Any) -> Any:
    """``min``."""
    return _choice(builtins.min, lambda a, b: a <= b, given, more)


def greatest(*given: Any, **more: Any) -> Any:
    """``max``."""
    return _choice(builtins.max, lambda a, b: a >= b, given, more)


def _choice(
    builtin: Callable[..., Any],
    first: Callable[[Any, Any], Any],
    given: tuple[Any, ...],
    more: dict[str, Any],
) -> Any:
    if builtins.len(given) == 1:
        given = tuple(given[0])
    if more or not _is_symbolic(*given):
        return builtin(given, **more)
    chosen = given[0]
    for other in given[1:]:
        a, b = _number(chosen), _number(other)
        chosen = _int(z3.If(first(a, b), a, b))
    return chosen


def _whole(value: Any) -> Any:
    return value if _is_symbolic(value) else builtins.int(value)


_STAND_INS = {"len": length, "range": _range, "min": least, "max": greatest, "int": _whole}


@contextmanager
def symbolic_builtins(modules: Iterable[ModuleType]) -> Iterator[None]:
    """The functions of these modules take symbolic values, too."""
    patched = [(module, name) for module in modules for name in _STAND_INS]
    for module, name in patched:
        if name in vars(module):
            raise RuntimeError(f"{module.__name__} has its own {name}")
    try:
        for module, name in patched:
            setattr(module, name, _STAND_INS[name])
        yield
    finally:
        for module, name in patched:
            if name in vars(module):
                delattr(module, name)
