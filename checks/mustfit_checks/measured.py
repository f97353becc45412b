"""Which vLLM releases were really run against the specification, and what they are called here.

``measured.json`` is written by ``python -m mustfit_checks.measure``; nothing in it is typed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from mustfit_spec import REVISIONS, Scheduler

#: The table, as it comes with the package.
TABLE = Path(__file__).with_name("measured.json")

#: With fewer scenarios than this a release isn't listed. A wrong scheduler may take 2,000 to be
#: found out (``tests/test_mutants.py``); this leaves room for what no mutant imitates.
MINIMUM = 10_000


class UnknownRelease(ValueError):
    """A release that was never measured. Its text names the nearest that were."""


@attrs.frozen(kw_only=True)
class Measurement:
    """One release that was run against one revision of the specification.

    Attributes:
        release: The vLLM release.
        revision: The revision of the semantics that it agreed with.
        profile: What was compared.
        scenarios: How many scenarios.
        steps: How many steps.
        seed: Makes the scenarios again.
        divergences: How many scenarios differed. A release with any is not listed as agreeing.
    """

    release: str
    revision: str
    profile: str
    scenarios: int
    steps: int
    seed: int
    divergences: int


def order(release: str) -> tuple[int, ...]:
    """Sorts releases. What isn't a number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in release.split("."))


def rows() -> list[Measurement]:
    """All that the table holds, also what diverged and what is too little to go by."""
    found: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return [Measurement(**row) for row in found]


@cache
def measurements() -> dict[str, Measurement]:
    """Every release that agreed in at least ``MINIMUM`` scenarios, oldest first."""
    agreed = [m for m in rows() if m.divergences == 0 and m.scenarios >= MINIMUM]
    return {m.release: m for m in sorted(agreed, key=lambda m: order(m.release))}


def newest_release() -> str:
    """The newest release that was measured."""
    return list(measurements())[-1]


def revision_for(release: str) -> type[Scheduler]:
    """The revision of the specification that a measured release agrees with.

    Raises:
        UnknownRelease: It was never measured.
    """
    found = measurements()
    if release not in found:
        raise UnknownRelease(_never_measured(release))
    return REVISIONS[found[release].revision]


def _never_measured(release: str) -> str:
    before = [r for r in measurements() if order(r) < order(release)]
    after = [r for r in measurements() if order(r) > order(release)]
    nearest = " and ".join((*before[-1:], *after[:1]))
    return (
        f"vLLM {release} was never measured, so nothing is claimed about it; "
        f"nearest measured: {nearest} (`mustfit revisions` lists all)"
    )


def likely_revision(release: str) -> str:
    """The revision that a release has if nothing changed since the last one that is known."""
    known = [revision for revision in REVISIONS if order(revision) <= order(release)]
    return known[-1] if known else next(iter(REVISIONS))
