"""Measures vLLM releases against the specification and writes ``measured.json``.

    python -m mustfit_checks.measure 0.22.1 0.33.0 --scenarios 100000 --seed 1

A release that is measured again replaces its row, but for a larger row without a divergence: only
what diverges replaces that. One that diverges is recorded as diverging, and so is not listed as
agreeing. Neither is one with fewer than ``measured.MINIMUM`` scenarios. Releases may be measured by
several processes at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from mustfit_checks import measured
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
        if reason is None or row.divergences:
            reason = record(row) or reason
        click.echo(json.dumps(attrs.asdict(row)) + (f"  {reason}" if reason else ""))
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


def record(row: Measurement) -> str | None:
    """Enters a row in the table; or says, in one line, why that would make the table worse."""
    with _locked(measured.TABLE.parent):
        found = {r.release: r for r in measured.rows()}
        before = found.get(row.release)
        if (
            before is not None
            and not before.divergences
            and not row.divergences
            and before.scenarios > row.scenarios
        ):
            return (
                f"vLLM {row.release} not recorded: {before.scenarios} scenarios agreed before, "
                f"these are only {row.scenarios}; give --scenarios {before.scenarios} or more"
            )
        found[row.release] = row
        ordered = sorted(found.values(), key=lambda r: order(r.release))
        _replace(measured.TABLE, json.dumps([attrs.asdict(r) for r in ordered], indent=1) + "\n")
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps others out. The folder's lock: the file's own would go with the file replaced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Writes a file at once or not at all, so that no reader finds half of it."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        new = Path(file.name)
        try:
            file.write(text)
            file.flush()
            new.chmod(path.stat().st_mode & 0o777)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


if __name__ == "__main__":
    main()
