"""What docs/semantics.md repeats of the code: each rule's statement and source, by revision.

``python -m mustfit_checks.semantics docs/semantics.md`` brings the page up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mustfit_spec import REVISIONS, Rule, Scheduler


def history(rule_id: str) -> dict[str, Rule]:
    """A rule in the revisions that state it anew, by revision, oldest first."""
    found: dict[str, Rule] = {}
    for revision, scheduler in REVISIONS.items():
        for rule in _own_rules(scheduler):
            if rule.id == rule_id:
                found[revision] = rule
    return found


def _own_rules(scheduler: type[Scheduler]) -> list[Rule]:
    """The rules that a revision states itself; the oldest states all it inherits."""
    oldest = scheduler is next(iter(REVISIONS.values()))
    names = dir(scheduler) if oldest else vars(scheduler)
    marked = [getattr(getattr(scheduler, name), "rule", None) for name in names]
    return [rule for rule in marked if isinstance(rule, Rule)]


def heading(rule_id: str) -> list[str]:
    """The lines that stand at the head of a rule's section: statement, source, what changed."""
    lines: list[str] = []
    for revision, rule in history(rule_id).items():
        since = f"*Since {revision}:* " if lines else ""
        lines.append(f"> {since}{rule.statement} (`{rule.source}`, `{rule.method}`)")
    return lines


def updated(text: str) -> str:
    """The page with each rule's statements and sources as the code has them."""

    def section(match: re.Match[str]) -> str:
        quoted = "\n>\n".join(heading(match["rule"]))
        return f"### {match['rule']}\n\n{quoted}\n"

    return re.sub(
        r"^### (?P<rule>[A-Z]+(?:-[A-Z]+)+)\n\n(?:>.*\n)*", section, text, flags=re.MULTILINE
    )


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
