"""The command ``mustfit explore``."""

from __future__ import annotations

import hashlib
import json
import pickle
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
from rich.table import Table

import mustfit_impl
import mustfit_spec
from mustfit_checks import explore as explorer
from mustfit_checks import invariants, moves, show, sides
from mustfit_checks import liveness as alive
from mustfit_checks.cases import save_scenario
from mustfit_checks.console import (
    EXIT_CODES,
    PlainConsole,
    as_json,
    fail,
    interrupts_wait,
    progress,
)
from mustfit_checks.exercise import watched
from mustfit_checks.explore import Explorer, Finding
from mustfit_checks.liveness import Liveness, Starvation
from mustfit_checks.moves import Scope
from mustfit_checks.scopes import UnknownScope, chosen
from mustfit_checks.what import asked_for
from mustfit_spec import rules_of

#: Seconds between two times that what was found is saved.
SAVED_EVERY = 60.0
#: States between two looks at the clock.
LOOK_EVERY = 64
#: Findings in a scope after which no more are looked for.
MOST_FINDINGS = 10


@attrs.frozen(kw_only=True)
class Explored:
    """What was found in a scope.

    Attributes:
        scope: Its name.
        states: States that were reached.
        transitions: Moves that were taken.
        depth: Operations on the shortest way to the state that is furthest off.
        complete: Whether there are no others.
        findings: What is wrong.
        seconds: How long it took.
        liveness: Whether everybody ends, if there are no other states and nothing is wrong.
    """

    scope: str
    states: int
    transitions: int
    depth: int
    complete: bool
    findings: tuple[Finding, ...]
    seconds: float
    liveness: Liveness | None = None


@click.command(context_settings={"show_default": True})
@click.option(
    "--against",
    metavar="RELEASE",
    help="The vLLM release whose revision is explored. [default: the newest measured]",
)
@click.option(
    "--scope",
    "names",
    multiple=True,
    default=("default",),
    help="`default`, `large`, or the name of one of theirs; may be given more than once.",
)
@click.option("--max-depth", type=click.IntRange(1), help="Only so many operations.")
@click.option(
    "--mutant",
    metavar="NAME",
    help="Explore a wrong scheduler in the specification's place; `mustfit mutants` lists them.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep what was found in this file, and go on from there if it exists.",
)
@click.option(
    "--cases",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("mustfit-cases"),
    help="Where the ways to what is wrong are saved.",
)
@as_json
def explore(
    *,
    against: str | None,
    names: tuple[str, ...],
    max_depth: int | None,
    mutant: str | None,
    checkpoint: Path | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Reach every state of a small scope, on the specification and the implementation at once.

    Every sequence of operations is taken: additions, steps, aborts, resets. Exit 0: they agree and
    keep their promises; 1: they don't, with the shortest way there; 2: it could not be decided.
    """
    try:
        release, revision, scheduler = asked_for(against, mutant)
        scopes, lacking = chosen(names, scheduler)
    except (ValueError, UnknownScope) as error:
        fail(str(error), as_json=as_json)
    kept = _Kept(checkpoint, (revision, mutant, max_depth, tuple(s.name for s in scopes)))
    try:
        kept.load()
    except (OSError, CheckpointError) as error:
        fail(str(error), as_json=as_json)
    observed, seen = watched(scheduler)
    seen |= kept.seen
    interrupted = False
    with progress(None, what="states") as (say, advance), interrupts_wait() as interruptible:
        try:
            for scope in scopes:
                if scope.name not in kept.done:
                    say(f"exploring {scope.name}")
                    made = Explorer(scope=scope, revision=revision, scheduler=observed)
                    _explore(made, kept, seen, max_depth, advance, interruptible)
        except KeyboardInterrupt:
            interrupted = True
    results = tuple(kept.done.values())
    files = _save(results, folder, as_json=as_json)
    never = sorted(rules_of(scheduler).keys() - seen) if mutant is None else []
    repeat = _repeat(release, names, max_depth, mutant)
    if as_json:
        click.echo(json.dumps(_as_json(revision, scopes, results, files, never)))
    else:
        _show(revision, results, files, lacking, never, repeat)
    if interrupted:
        left = len(scopes) - sum(result.complete for result in results)
        where = f"; --checkpoint {checkpoint} goes on from here" if checkpoint else ""
        fail(f"interrupted with {left} of {len(scopes)} scopes to go{where}")
    sys.exit(EXIT_CODES["divergent" if any(r.findings for r in results) else "conformant"])


def _explore(
    made: Explorer,
    kept: _Kept,
    seen: set[str],
    max_depth: int | None,
    advance: Callable[[int], None],
    interruptible: Callable[[], None],
) -> None:
    """Explores one scope, and keeps what is found, also when interrupted."""
    seconds = kept.resume(made)
    started = saved = time.monotonic()

    def keep(*, done: bool = False) -> None:
        left = made.frontier and (max_depth is None or made.frontier[0].depth < max_depth)
        whole = done and not made.frontier and not made.findings
        result = Explored(
            scope=made.scope.name,
            states=len(made.graph.numbers),
            transitions=made.num_transitions,
            depth=made.depth,
            complete=not made.frontier,
            findings=tuple(made.findings),
            liveness=alive.liveness(made) if whole else None,
            seconds=seconds + time.monotonic() - started,
        )
        kept.save(result, seen, made if left and not made.findings else None)

    try:
        while made.frontier and len(made.findings) < MOST_FINDINGS:
            if max_depth is not None and made.frontier[0].depth >= max_depth:
                break
            if made.findings and made.frontier[0].depth > made.depth:
                # All that are as near as the first have been found.
                break
            made.expand()
            interruptible()
            if len(made.graph.transitions) % LOOK_EVERY:
                continue
            advance(len(made.graph.numbers))
            if kept.path is not None and time.monotonic() - saved > SAVED_EVERY:
                keep()
                saved = time.monotonic()
    finally:
        keep(done=True)


# --- What is kept -----------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A file from which exploring can't go on. Its text says why."""


class _Kept:
    """What was found, in a file if one was given.

    It is a pickle, which is as trustworthy as whoever wrote it: a file of one's own.

    Attributes:
        path: The file.
        asked: What was asked for. A file that was made for something else is refused.
        done: For each scope that was begun, by its name, what was found.
        seen: Rules that mattered.
    """

    def __init__(self, path: Path | None, asked: tuple[Any, ...]) -> None:
        self.path = path
        self.asked = (_FORMAT, _digest_of_code(), *asked)
        self.done: dict[str, Explored] = {}
        self.seen: set[str] = set()
        self._begun: tuple[str, dict[str, Any]] | None = None
        self._seconds = 0.0

    def load(self) -> None:
        """Reads the file, if there is one.

        Raises:
            CheckpointError: It is none of ours, or was made for something else.
            OSError: It can't be read.
        """
        if self.path is None or not self.path.exists():
            return
        try:
            asked, done, seen, begun = pickle.loads(self.path.read_bytes())  # noqa: S301 - our own
        except (pickle.UnpicklingError, ValueError, TypeError, EOFError, AttributeError) as error:
            raise CheckpointError(f"{self.path} is no checkpoint; choose another file") from error
        if asked != self.asked:
            raise CheckpointError(
                f"{self.path} was made by other code or for other options; choose another file"
            )
        self.done, self.seen, self._begun = done, seen, begun
        if begun is not None:
            self._seconds = self.done.pop(begun[0]).seconds

    def resume(self, made: Explorer) -> float:
        """Goes on with a scope that was begun; for how many seconds it was explored before."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != made.scope.name:
            return 0.0
        made.resume(begun[1])
        return self._seconds

    def save(self, result: Explored, seen: set[str], unfinished: Explorer | None) -> None:
        """Notes what was found in a scope, and writes the file, whole or not at all."""
        self.done[result.scope] = result
        if self.path is None:
            return
        begun = (result.scope, unfinished.saved()) if unfinished is not None else None
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_bytes(pickle.dumps((self.asked, self.done, seen, begun)))
        new.replace(self.path)


_FORMAT = "mustfit explore 1"


def _digest_of_code() -> str:
    """Changes whenever what is explored, or how, does."""
    files = [Path(module.__file__ or "") for module in (explorer, invariants, moves, sides)]
    for package in (mustfit_spec, mustfit_impl):
        files += sorted(Path(package.__file__ or "").parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# --- What is said -----------------------------------------------------------------------------


def _save(results: tuple[Explored, ...], folder: Path, *, as_json: bool) -> dict[str, list[Path]]:
    """For each scope, where the ways to its findings were saved."""
    try:
        return {
            result.scope: [
                save_scenario(finding.scenario, f"explore-{result.scope}", folder)
                for finding in result.findings
            ]
            for result in results
        }
    except OSError as error:
        fail(
            f"the cases could not be saved in {folder}: {error.strerror}; see --cases",
            as_json=as_json,
        )


def _rate(results: tuple[Explored, ...]) -> float:
    seconds = sum(result.seconds for result in results)
    return sum(result.transitions for result in results) / max(seconds, 1e-9)


def _as_json(
    revision: str,
    scopes: tuple[Scope, ...],
    results: tuple[Explored, ...],
    files: dict[str, list[Path]],
    never: list[str],
) -> dict[str, Any]:
    complete = len(results) == len(scopes) and all(result.complete for result in results)
    return {
        "revision": revision,
        "scope": [scope.name for scope in scopes],
        "states": sum(result.states for result in results),
        "transitions": sum(result.transitions for result in results),
        "depth": max((result.depth for result in results), default=0),
        "complete": complete,
        "divergences": [
            {
                "scope": result.scope,
                "what": finding.what,
                "case": str(file),
                "operations": len(finding.scenario.operations),
            }
            for result in results
            for finding, file in zip(result.findings, files[result.scope], strict=True)
        ],
        "transitions_per_second": round(_rate(results)),
        "scopes": [
            {
                "name": result.scope,
                "states": result.states,
                "transitions": result.transitions,
                "depth": result.depth,
                "complete": result.complete,
                "seconds": round(result.seconds, 3),
                "liveness": _liveness_as_json(result.liveness),
            }
            for result in results
        ],
        "never_exercised": never,
    }


def _liveness_as_json(liveness: Liveness | None) -> dict[str, Any] | None:
    if liveness is None:
        return None
    return {
        "longest_drain_steps": liveness.longest_drain,
        "starves_by_steps": _starvation_as_json(liveness.by_steps),
        "starves_by_anything": _starvation_as_json(liveness.by_anything),
    }


def _starvation_as_json(found: Starvation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "request": found.request_id,
        "stem": show.operations(found.stem),
        "cycle": show.operations(found.cycle),
    }


def _liveness_in_words(liveness: Liveness) -> str:
    if liveness.by_steps is not None:
        return f"starves, {_starvation_in_words(liveness.by_steps)}"
    ends = f"by steps alone, everybody ends within {liveness.longest_drain}"
    if liveness.by_anything is not None:
        return f"{ends}; starves, {_starvation_in_words(liveness.by_anything)}"
    return f"{ends}; whoever else comes and goes, everybody ends"


def _starvation_in_words(found: Starvation) -> str:
    return (
        f"{found.request_id}: {show.operations(found.stem)}; "
        f"and for ever: {show.operations(found.cycle)}"
    )


def _show(
    revision: str,
    results: tuple[Explored, ...],
    files: dict[str, list[Path]],
    lacking: tuple[str, ...],
    never: list[str],
    repeat: str,
) -> None:
    console = PlainConsole(emoji=False)
    table = Table(box=None)
    table.add_column("scope")
    for title in ("states", "transitions", "depth", "seconds"):
        table.add_column(title, justify="right")
    table.add_column("")
    for result in results:
        table.add_row(
            result.scope,
            f"{result.states:,}",
            f"{result.transitions:,}",
            str(result.depth),
            f"{result.seconds:.1f}",
            "complete" if result.complete else "not complete",
        )
    console.print(table)
    for result in results:
        for finding, file in zip(result.findings, files[result.scope], strict=True):
            steps = len(finding.scenario.operations)
            console.print(
                f"{result.scope}: {finding.what}, after {steps} operations: {file}", markup=False
            )
    for result in results:
        if result.liveness is not None:
            told = f"{result.scope}: {_liveness_in_words(result.liveness)}"
            console.print(told, markup=False, soft_wrap=True)
    if lacking:
        console.print(f"not in this revision: {', '.join(lacking)}", markup=False)
    if never:
        console.print(f"rules that never mattered: {', '.join(never)}", markup=False)
    found = sum(len(result.findings) for result in results)
    states = sum(result.states for result in results)
    transitions = sum(result.transitions for result in results)
    console.print(
        f"revision {revision}: {states:,} states, {transitions:,} transitions, {found} findings; "
        f"{_rate(results):,.0f} transitions a second",
        markup=False,
    )
    console.print(f"repeat with: {repeat}", markup=False, soft_wrap=True)


def _repeat(release: str, names: tuple[str, ...], max_depth: int | None, mutant: str | None) -> str:
    words = ["mustfit", "explore", "--against", release]
    for name in names:
        words += ["--scope", name]
    if max_depth is not None:
        words += ["--max-depth", str(max_depth)]
    if mutant is not None:
        words += ["--mutant", mutant]
    return shlex.join(words)
