"""How soon a wrong rule is found: each rule of the specification broken, and judged.

    python -m mustfit_checks.sensitivity --sut vllm:0.33.0

The scheduler stays as it is and the specification is changed, one rule at a time, by the mutants.
For each, the table says after how many scenarios the comparison turned red, at each profile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import get_args

import click
from rich.console import Console
from rich.table import Table

from mustfit_checks.attribute import mutant_trace, revision_name
from mustfit_checks.compare import compare
from mustfit_checks.generate import scenarios
from mustfit_checks.mutants import MUTANTS, Mutant
from mustfit_checks.sut import Limits
from mustfit_checks.what import start, what
from mustfit_spec import Profile, Scenario, Trace, rules_of

PROFILES: tuple[Profile, ...] = get_args(Profile)


@click.command()
@click.option("--sut", "name", default="spec", show_default=True, help="As in mustfit judge.")
@click.option("--against", help="As in mustfit judge.")
@click.option("--scenarios", "count", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(*, name: str, against: str | None, count: int, seed: int) -> None:
    """Break each rule of the specification, and say how many scenarios it took to notice."""
    asked = what(name, against, None)
    revision = revision_name(asked.revision)
    drawn = list(scenarios(seed=seed, count=count, lacks=asked.revision.lacks))
    sut = start(asked, profile="identity", source=None, limits=Limits(), progress=_say)
    with sut:
        observed = list(sut.traces(drawn))
    table = Table("rule", "mutant", *PROFILES, title=f"scenarios until red, {name}, seed {seed}")
    missed = []
    rules = rules_of(asked.revision)
    for rule_id in rules:
        for mutant in MUTANTS.values():
            if mutant.breaks == rule_id and mutant.exists_in(revision):
                found = [first(mutant, revision, drawn, observed, p) for p in PROFILES]
                table.add_row(rule_id, mutant.name, *(str(f or "-") for f in found))
                missed += [] if found[-1] else [mutant.name]
    Console(width=100).print(table)
    if missed:
        _say(f"not found within {count} scenarios: {', '.join(missed)}")
    sys.exit(1 if missed else 0)


def first(
    mutant: Mutant,
    revision: str,
    drawn: Sequence[Scenario],
    observed: Sequence[Trace],
    profile: Profile,
) -> int | None:
    """After how many scenarios the broken specification differs from what was observed."""
    for number, (scenario, trace) in enumerate(zip(drawn, observed, strict=True), start=1):
        if compare(mutant_trace(scenario, mutant, revision), trace, profile) is not None:
            return number
    return None


def _say(message: str) -> None:
    click.echo(message, err=True)


if __name__ == "__main__":
    main()
