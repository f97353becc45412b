"""Measures vLLM releases against the specification and writes ``measured.json``.

    python -m mustfit_checks.measure 0.22.1 0.33.0 --scenarios 100000 --seed 1

A release that is measured again replaces its row. One that diverges is recorded as diverging, and
so is not listed as agreeing.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import as_file, files

import attrs
import click

from mustfit_checks.generate import scenarios
from mustfit_checks.judge import Judge
from mustfit_checks.measured import Measurement, likely_revision, order
from mustfit_checks.sut import Limits
from mustfit_checks.what import What, start
from mustfit_spec import REVISIONS


@click.command()
@click.argument("releases", nargs=-1, required=True)
@click.option("--scenarios", "count", type=click.IntRange(1), default=20000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(*, releases: tuple[str, ...], count: int, seed: int) -> None:
    """Run the real scheduler of each of the RELEASES, and note what came of it."""
    failed = False
    for release in releases:
        row, reason = measure(release, count, seed)
        click.echo(json.dumps(attrs.asdict(row)) + (f"  {reason}" if reason else ""))
        if reason is None or row.divergences:
            _record(row)
        failed = failed or reason is not None
    sys.exit(1 if failed else 0)


def measure(release: str, count: int, seed: int) -> tuple[Measurement, str | None]:
    """What came of running a release, and why it isn't all, if it isn't."""
    name = likely_revision(release)
    asked = What(name=f"vllm:{release}", against=release, revision=REVISIONS[name])
    say = _say
    sut = start(asked, profile="identity", source=None, limits=Limits(), progress=say)
    with sut:
        verdict = Judge(
            sut=sut, against=release, revision=asked.revision, profile="identity"
        ).judge(scenarios(seed=seed, count=count, lacks=asked.revision.lacks), progress=say)
    row = Measurement(
        release=release,
        revision=name,
        profile="identity",
        scenarios=verdict.scenarios,
        steps=verdict.steps,
        seed=seed,
        divergences=verdict.diverged,
    )
    return row, verdict.reason


def _say(message: str) -> None:
    click.echo(message, err=True)


def _record(row: Measurement) -> None:
    with as_file(files("mustfit_checks").joinpath("measured.json")) as path:
        rows = {r["release"]: r for r in json.loads(path.read_text(encoding="utf-8"))}
        rows[row.release] = attrs.asdict(row)
        ordered = sorted(rows.values(), key=lambda r: order(r["release"]))
        path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
