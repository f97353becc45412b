"""docs/semantics.md says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from mustfit_checks.mutants import MUTANTS
from mustfit_checks.semantics import heading
from mustfit_spec import REVISIONS, rules_of

PAGE = Path(__file__).parents[1] / "docs" / "semantics.md"
RULES = rules_of(REVISIONS["0.21.0"])


def sections() -> dict[str, list[str]]:
    """The lines of each rule's section."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"### ([A-Z]+(?:-[A-Z]+)+)", line)
        if match:
            current = found.setdefault(match[1], [])
        elif line.startswith("#"):
            current = None
        elif current is not None:
            current.append(line)
    return found


def test_every_rule_has_a_section_and_no_other_has() -> None:
    assert set(sections()) == set(RULES)


def test_statements_and_sources_are_those_of_the_code() -> None:
    """To bring them up to date: ``python -m mustfit_checks.semantics docs/semantics.md``."""
    for rule_id, lines in sections().items():
        quoted = [line for line in lines if line.startswith("> ")]
        assert quoted == heading(rule_id), rule_id


def test_every_section_says_more_than_the_statement() -> None:
    for rule_id, lines in sections().items():
        assert any(line and not line.startswith(">") for line in lines), rule_id


def test_rules_named_in_the_text_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"\b(?:ALLOC|CACHE|RUN|WAIT|PREEMPT|STEP)-[A-Z]+(?:-[A-Z]+)*\b", text)
    assert set(named) <= set(RULES)


def test_every_rule_is_broken_by_a_mutant() -> None:
    assert {m.breaks for m in MUTANTS.values()} == set(RULES)


def test_every_statement_is_one_sentence_or_two() -> None:
    for revision in REVISIONS.values():
        for rule in rules_of(revision).values():
            assert rule.statement.endswith("."), rule.id
            assert 10 < len(rule.statement) < 140, rule.id
