"""What docs/semantics.md repeats of the code: each rule's statement and source, by revision."""

from __future__ import annotations

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
