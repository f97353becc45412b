"""Rules: every statement that the specification makes has an ID, and one method carries it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import attrs

Method = TypeVar("Method", bound=Callable[..., Any])


@attrs.frozen(kw_only=True)
class Rule:
    """One rule of the specification.

    Attributes:
        id: Such as ``WAIT-BLOCKED``.
        statement: The rule in one sentence: the first paragraph of its method's docstring.
        method: The method's name.
        source: Where vLLM does this, such as ``0.22.1 v1/core/block_pool.py:416-431``.
    """

    id: str
    statement: str
    method: str
    source: str


def rule(rule_id: str, source: str) -> Callable[[Method], Method]:
    """Mark a method as the one that carries a rule.

    Args:
        rule_id: The rule's ID. A subclass that overrides the method repeats it.
        source: Where vLLM does this: release, file below ``vllm/``, lines.
    """

    def mark(method: Method) -> Method:
        statement = " ".join((method.__doc__ or "").split("\n\n")[0].split())
        method.rule = Rule(  # type: ignore[attr-defined]
            id=rule_id, statement=statement, method=method.__name__, source=source
        )
        return method

    return mark


def rules_of(scheduler: type[object]) -> dict[str, Rule]:
    """The rules that a scheduler class has, by ID, sorted; those it overrides as overridden.

    Without those that can't come into play there (``Scheduler.moot``).
    """
    found = dict(_rules(scheduler))
    moot: frozenset[str] = getattr(scheduler, "moot", frozenset())
    return {rule_id: found[rule_id] for rule_id in sorted(found) if rule_id not in moot}


def _rules(scheduler: type[object]) -> Iterator[tuple[str, Rule]]:
    for name in dir(scheduler):
        marked = getattr(getattr(scheduler, name), "rule", None)
        if isinstance(marked, Rule):
            yield marked.id, marked
