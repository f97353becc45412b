"""The command ``mustfit prove``."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import attrs
import click
from rich.table import Table

from mustfit_checks.console import EXIT_CODES, PlainConsole, as_json, fail, progress
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.proofs import Result, tried_on
from mustfit_checks.proofs import prove as prove_one
from mustfit_checks.statements import CHECKS
from mustfit_checks.symbolic import Covered
from mustfit_checks.what import asked_for
from mustfit_spec import REVISIONS

NAMES = {check.name: check for check in CHECKS}

#: A check, and the wrong scheduler that it is tried on, or none for the right one.
Job = tuple[str, str | None]


@attrs.define(kw_only=True)
class Proof:
    """What came of a check.

    Attributes:
        name: Its name.
        answer: What came of it on the right scheduler, once it has.
        refutes: The wrong schedulers that it refutes.
        seconds: How long all of that took.
    """

    name: str
    answer: Result | None = None
    refutes: list[str] = attrs.field(factory=list)
    seconds: float = 0.0

    @property
    def covered(self) -> Covered:
        """What was covered."""
        return self.answer.covered if self.answer is not None else Covered()

    def result(self, *, with_mutants: bool) -> tuple[str, str | None]:
        """``proved``, ``refuted`` or ``unknown``; and why, if it isn't proved."""
        if self.answer is None:
            return "unknown", "it wasn't reached"
        if self.answer.result == "proved" and with_mutants and not self.refutes:
            return "unknown", "no wrong scheduler is refuted by it"
        return self.answer.result, self.answer.reason


@click.command(context_settings={"show_default": True})
@click.option(
    "--against",
    metavar="RELEASE",
    help="The vLLM release whose revision it is about. [default: the newest measured]",
)
@click.option(
    "--check",
    "names",
    metavar="NAME",
    multiple=True,
    help="Only this check; may be given more than once.",
)
@click.option("--mutant", metavar="NAME", help="Try them on a wrong scheduler instead.")
@click.option(
    "--mutants/--no-mutants",
    "with_mutants",
    default=True,
    help="Whether each check has to refute a wrong scheduler, too.",
)
@click.option("--witnesses", is_flag=True, help="Show for which values each premise happens.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.")
@as_json
def prove(
    *,
    against: str | None,
    names: tuple[str, ...],
    mutant: str | None,
    with_mutants: bool,
    witnesses: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Show what holds for all values, by z3, on the code as it ships.

    Exit 0: all of it is proved, and each check refutes some wrong scheduler; 1: something is
    refuted, with values; 2: something could not be decided.
    """
    try:
        release, revision, _ = asked_for(against, mutant)
    except ValueError as error:
        fail(str(error), as_json=as_json)
    for name in names:
        if name not in NAMES:
            known = ", ".join(NAMES)
            fail(f"there is no check {name!r}; there are: {known}", as_json=as_json)
    with_mutants = with_mutants and mutant is None
    proofs = {name: Proof(name=name) for name in names or NAMES}
    todo: list[Job] = [(name, mutant) for name in proofs]
    if with_mutants:
        todo += [(name, other) for name in proofs for other in tried_on(NAMES[name], revision)]
    with progress(len(todo), what="proofs") as (say, advance):
        say(f"proving {len(proofs)} checks")
        interrupted = not _prove_all(proofs, todo, mutant, revision, jobs, advance)
    needs = with_mutants and not interrupted
    results = {name: proof.result(with_mutants=needs) for name, proof in proofs.items()}
    if as_json:
        click.echo(json.dumps({"revision": revision, "checks": _as_json(proofs, results)}))
    else:
        _show(revision, proofs, results, witnesses=witnesses)
        repeat = _repeat(release, names, mutant, with_mutants=with_mutants)
        PlainConsole(emoji=False).print(f"repeat with: {repeat}", markup=False, soft_wrap=True)
    if interrupted:
        fail("interrupted")
    found = {result for result, _ in results.values()}
    worst = next((result for result in ("refuted", "unknown") if result in found), "proved")
    sys.exit(_EXIT_CODES[worst])


_EXIT_CODES = {
    "proved": EXIT_CODES["conformant"],
    "refuted": EXIT_CODES["divergent"],
    "unknown": EXIT_CODES["undecided"],
}


def _prove_all(
    proofs: dict[str, Proof],
    todo: list[Job],
    mutant: str | None,
    revision: str,
    jobs: int,
    advance: Callable[[int], None],
) -> bool:
    """Does all jobs and notes what comes of them; whether that wasn't interrupted."""
    try:
        for done, ((name, wrong), answer) in enumerate(_answers(todo, revision, jobs), 1):
            proof = proofs[name]
            proof.seconds += answer.seconds
            if wrong == mutant:
                proof.answer = answer
            elif answer.result == "refuted":
                proof.refutes.append(str(wrong))
            advance(done)
    except KeyboardInterrupt:
        return False
    return True


def _answers(todo: list[Job], revision: str, jobs: int) -> Iterator[tuple[Job, Result]]:
    """What comes of each job, as it does."""
    if jobs == 1:
        for job in todo:
            yield job, _answer(job, revision)
        return
    # Started afresh: a process that z3 or threads were used in can't be copied.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context)
    try:
        under_way = {pool.submit(_answer, job, revision): job for job in todo}
        for future in as_completed(under_way):
            yield under_way[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _answer(job: Job, revision: str) -> Result:
    name, wrong = job
    scheduler = REVISIONS[revision] if wrong is None else MUTANTS[wrong].of(revision)
    return prove_one(NAMES[name], scheduler)


# --- What is said -----------------------------------------------------------------------------


def _as_json(
    proofs: dict[str, Proof], results: dict[str, tuple[str, str | None]]
) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "statement": NAMES[name].statement,
            "rules": list(NAMES[name].rules),
            "scope": NAMES[name].scope,
            "result": results[name][0],
            "reason": results[name][1],
            "seconds": round(proof.seconds, 3),
            "paths": proof.covered.paths,
            "queries": proof.covered.queries,
            "witness": proof.covered.witnesses,
            "refutes": sorted(proof.refutes),
        }
        for name, proof in proofs.items()
    ]


def _show(
    revision: str,
    proofs: dict[str, Proof],
    results: dict[str, tuple[str, str | None]],
    *,
    witnesses: bool,
) -> None:
    console = PlainConsole(emoji=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True, highlight=False)

    table = Table(box=None)
    for title in ("check", "result"):
        table.add_column(title)
    for title in ("paths", "queries", "seconds", "refutes"):
        table.add_column(title, justify="right")
    for name, proof in proofs.items():
        table.add_row(
            name,
            results[name][0],
            f"{proof.covered.paths:,}",
            f"{proof.covered.queries:,}",
            f"{proof.seconds:.1f}",
            f"{len(proof.refutes)} mutants",
        )
    console.print(table)
    for name, proof in proofs.items():
        check, reason = NAMES[name], results[name][1]
        say(f"{name}: {check.statement} ({', '.join(check.rules)})")
        say(f"  scope: {check.scope}")
        if proof.refutes:
            say(f"  refutes: {', '.join(sorted(proof.refutes))}")
        if reason:
            say(f"  {results[name][0]}: {reason}")
        if witnesses:
            for what, values in proof.covered.witnesses.items():
                told = ", ".join(f"{key}={value}" for key, value in values.items())
                say(f"  {what}: {told}")
    counts = Counter(result for result, _ in results.values())
    say(f"revision {revision}: {', '.join(f'{n} {result}' for result, n in counts.items())}")


def _repeat(release: str, names: tuple[str, ...], mutant: str | None, *, with_mutants: bool) -> str:
    words = ["mustfit", "prove", "--against", release]
    for name in names:
        words += ["--check", name]
    if mutant is not None:
        words += ["--mutant", mutant]
    elif not with_mutants:
        words += ["--no-mutants"]
    return shlex.join(words)
