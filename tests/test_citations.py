"""Every rule cites a place in vLLM: the place must be there, and be code."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import attrs
import pytest

from mustfit_checks.semantics import history
from mustfit_impl import Scheduler
from mustfit_spec import REVISIONS, Rule, rules_of

RANGES = r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*"
PLACE = rf"[a-z0-9_]+(?:/[a-z0-9_]+)*\.py:{RANGES}"
CITATION = re.compile(rf"(?P<release>\d+(?:\.\d+)+) (?:has none|(?P<places>{PLACE}(?:, {PLACE})*))")


@attrs.frozen(kw_only=True)
class Citation:
    """Consecutive lines of one file that a rule cites.

    Attributes:
        rule: The rule's ID, or what else cites them.
        release: The vLLM release.
        file: Below ``vllm/``.
        first: The first line, counted from 1.
        last: The last one, cited as well.
    """

    rule: str
    release: str
    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.rule}-{self.release}-{self.file}:{self.first}-{self.last}"


def rule_ids() -> list[str]:
    ids: set[str] = set()
    for scheduler in REVISIONS.values():
        ids |= rules_of(scheduler).keys()
    return sorted(ids)


def sourced_rules() -> list[tuple[str, Rule]]:
    """Every rule in every revision that states it anew, with that revision."""
    return [pair for rule_id in rule_ids() for pair in history(rule_id).items()]


def citations(rule: Rule) -> Iterator[Citation]:
    """The places that a rule cites; none if its source doesn't have the form."""
    return places(rule.source, rule.id)


def places(source: str, cited_by: str) -> Iterator[Citation]:
    """The places that a source names; none if it doesn't have the form."""
    match = CITATION.fullmatch(source)
    found = match["places"] if match else None
    for place in found.split(", ") if match and found else ():
        file, _, ranges = place.partition(":")
        for lines in ranges.split(","):
            first, _, last = lines.partition("-")
            yield Citation(
                rule=cited_by,
                release=match["release"] if match else "",
                file=file,
                first=int(first),
                last=int(last or first),
            )


@attrs.frozen
class Source:
    """A Python file of vLLM.

    Attributes:
        lines: Its lines; the first is ``lines[0]``.
        tree: What ``ast`` makes of it.
    """

    lines: tuple[str, ...]
    tree: ast.Module

    def enclosing(self, first: int, last: int) -> list[str]:
        """The names of the classes and functions that these lines lie within, outermost first."""
        return [
            node.name
            for node in ast.walk(self.tree)  # an outer one comes before those inside it
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body[0].lineno <= first
            and last <= (node.end_lineno or 0)
        ]

    def executable(self) -> set[int]:
        """The lines of statements that do something, at least when their block is entered."""
        found: set[int] = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.stmt) or isinstance(node, ast.Pass) or is_text(node):
                continue
            end = node.end_lineno or node.lineno
            body = getattr(node, "body", None)
            if isinstance(body, list) and body:
                # Of a compound statement, its head; what is in it counts by itself.
                end = max(node.lineno, body[0].lineno - 1)
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
            found |= set(range(node.lineno, end + 1))
        return found

    def texts(self) -> set[int]:
        """The lines of docstrings."""
        found: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and is_text(node):
                found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return found

    def is_bare(self, line: int) -> bool:
        """Whether that line is empty or only a comment."""
        text = self.lines[line - 1].strip()
        return not text or text.startswith("#")


def is_text(node: ast.stmt) -> bool:
    """Whether that statement is a docstring, or another string on its own."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def parse(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(tuple(text.splitlines()), ast.parse(text))


SOURCED = sourced_rules()
CITED = [citation for _, rule in SOURCED for citation in citations(rule)]

#: What of the implementation does something that vLLM does, and so has to say where.
OPERATIONS = ("add_request", "abort", "reset_prefix_cache", "step")


def cited_by_operation(name: str) -> list[Citation]:
    """The places that an operation of the implementation names."""
    text = " ".join((getattr(Scheduler, name).__doc__ or "").split())
    _, _, source = text.partition("Source: vLLM ")
    return list(places(source.removesuffix("."), name))


CITED += [citation for name in OPERATIONS for citation in cited_by_operation(name)]


@pytest.mark.parametrize(
    ("revision", "rule"), [pytest.param(r, rule, id=f"{rule.id}-{r}") for r, rule in SOURCED]
)
def test_source_has_the_form(revision: str, rule: Rule) -> None:
    match = CITATION.fullmatch(rule.source)
    assert match, rule.source
    # The oldest revision describes 0.21.0 to 0.22.1 and cites the last of these.
    oldest = revision == next(iter(REVISIONS))
    assert match["release"] == ("0.22.1" if oldest else revision)
    by_file: dict[str, list[Citation]] = {}
    for citation in citations(rule):
        by_file.setdefault(citation.file, []).append(citation)
    for cited in by_file.values():
        lines = [line for citation in cited for line in (citation.first, citation.last)]
        assert lines == sorted(lines), "ranges ascend"
        ends = [(a.last, b.first) for a, b in itertools.pairwise(cited)]
        assert all(last + 1 < first for last, first in ends), "ranges that touch are one range"


def test_each_rule_is_cited() -> None:
    without = {rule.id for _, rule in SOURCED if not list(citations(rule))}
    # The watermark is the only rule whose oldest form is the lack of anything.
    assert without == {"ALLOC-WATERMARK"}
    assert {citation.rule for citation in CITED} == {*rule_ids(), *OPERATIONS}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_of_the_implementation_is_cited(name: str) -> None:
    assert cited_by_operation(name)


def faults(source: Source, first: int, last: int) -> list[str]:
    """What is wrong with citing these lines."""
    if not 1 <= first <= last <= len(source.lines):
        return ["not in the file"]
    cited = set(range(first, last + 1))
    found = []
    if not source.enclosing(first, last):
        found.append("not within the body of one function or class")
    if not cited & source.executable():
        found.append("no statement")
    if cited & source.texts():
        found.append("a docstring")
    if source.is_bare(first) or source.is_bare(last):
        found.append("a comment or an empty line at an end")
    return found


@pytest.mark.parametrize("citation", CITED, ids=str)
def test_cited_lines_are_code(citation: Citation, sources: Callable[[str], Path | None]) -> None:
    folder = sources(citation.release)
    if folder is None:
        pytest.skip(
            f"no sources of vLLM {citation.release}: set it up, or set MUSTFIT_TEST_SOURCES"
        )
    path = folder / "vllm" / citation.file
    assert path.is_file()
    assert faults(parse(path), citation.first, citation.last) == []


MADE_UP = """\
def free(self):
    \"\"\"Frees.\"\"\"
    # All of them.
    if self.blocks:
        self.blocks.clear()

def touch(self):
    self.count += 1
"""


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (4, 5, []),
        (5, 5, []),
        (4, 4, []),
        (3, 3, ["no statement", "a comment or an empty line at an end"]),
        (2, 4, ["a docstring"]),
        (3, 5, ["a comment or an empty line at an end"]),
        (5, 8, ["not within the body of one function or class"]),
        (1, 1, ["not within the body of one function or class", "no statement"]),
        (8, 9, ["not in the file"]),
    ],
)
def test_faults_are_found(first: int, last: int, expected: list[str]) -> None:
    source = Source(tuple(MADE_UP.splitlines()), ast.parse(MADE_UP))
    assert faults(source, first, last) == expected
