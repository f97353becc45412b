"""The command ``mustfit``.

Exit 0: conformant. 1: a divergence. 2: it could not be decided, with one clear line why.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, get_args

import attrs
import click

from mustfit_checks import show
from mustfit_checks.bench_cli import bench
from mustfit_checks.cases import save, save_scenario
from mustfit_checks.console import EXIT_CODES, FiniteRange, PlainConsole, as_json, fail, progress
from mustfit_checks.explore_cli import explore
from mustfit_checks.generate import scenarios
from mustfit_checks.judge import BadScenario, Judge, Verdict
from mustfit_checks.measured import UnknownRelease, measurements
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.protocol import ProtocolError, json_schema, read_scenarios
from mustfit_checks.prove_cli import prove
from mustfit_checks.replay_cli import replay
from mustfit_checks.scopes import UnknownScope, chosen
from mustfit_checks.sut import Limits, SutError
from mustfit_checks.vllm_setup import SetupError
from mustfit_checks.walks import NotSound, scenarios_of
from mustfit_checks.what import KINDS, SOURCE, UnknownSut, What, start, what
from mustfit_spec import REVISIONS, ConfigError, Profile, Scenario, Scheduler, rules_of


def entry() -> None:
    """The console script: every end has its exit code, and none is a traceback."""
    # What a CI system sends when time is up; what was found by then is wanted.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_CODES["undecided"])
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted")
    except BrokenPipeError:
        # Whoever read this has seen enough; nor is there anybody to flush to at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_CODES["undecided"])
    except Exception as error:
        if os.environ.get("MUSTFIT_TRACEBACK"):
            raise
        message = " ".join(str(error).split())
        fail(f"{type(error).__name__}: {message} (MUSTFIT_TRACEBACK=1 shows where)")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mustfit")
def main() -> None:
    """What vLLM's scheduler does when KV cache is short, and who else does it."""


@main.command()
@click.option("--sut", "sut_name", metavar="WHAT", help=f"Whom to judge: {KINDS}. [default: impl]")
@click.option(
    "--against",
    metavar="RELEASE",
    help="The vLLM release to judge by; vllm:RELEASE is the real scheduler itself, instead of the "
    "specification. [default: the SUT's own, or the newest measured]",
)
@click.option(
    "--profile",
    type=click.Choice(get_args(Profile)),
    help="What is compared. [default: decisions for cmd:, else identity]",
)
@click.option("--scenarios", "count", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Makes the same scenarios.")
@click.option(
    "--start",
    "first",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The first scenario of the seed, counted from 0.",
)
@click.option(
    "--case",
    "case_files",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Judge by the scenarios of this file instead; may be given more than once.",
)
@click.option(
    "--scope",
    "scopes",
    metavar="NAME",
    multiple=True,
    help="Judge by walks through every state of a small scope instead: `default`, `large`, or one "
    "of theirs (see `mustfit explore`); may be given more than once.",
)
@click.option(
    "--cases",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("mustfit-cases"),
    show_default=True,
    help="Where divergent cases are saved.",
)
@click.option(
    "--stop-after",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Divergent scenarios after which judging stops.",
)
@click.option(
    "--timeout",
    type=FiniteRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that the SUT has for each answer.",
)
@click.option(
    "--vllm-source",
    "source",
    type=click.Path(path_type=Path, file_okay=False),
    help="Judge the vLLM source tree in this folder.",
)
@as_json
def judge(
    *,
    sut_name: str | None,
    against: str | None,
    profile: Profile | None,
    count: int,
    seed: int,
    first: int,
    case_files: tuple[Path, ...],
    scopes: tuple[str, ...],
    folder: Path,
    stop_after: int,
    timeout: float,
    source: Path | None,
    as_json: bool,
) -> None:
    """Run scenarios on a scheduler and on the specification, and say whether they agree.

    Exit 0: conformant; 1: divergent, with the smallest case of each kind; 2: undecided.
    """
    name = sut_name or (f"vllm:{SOURCE}" if source is not None else "impl")
    try:
        asked = what(name, against, source)
    except (UnknownSut, UnknownRelease) as error:
        fail(str(error), as_json=as_json)
    profile = profile or ("decisions" if name.startswith("cmd:") else "identity")
    if case_files and scopes:
        fail("--case and --scope each say what to judge by; give one of them", as_json=as_json)
    try:
        judged_by: Iterator[Scenario]
        if case_files:
            total, judged_by = None, _checked(_read(case_files), asked)
        elif scopes:
            total, judged_by = None, _walks(scopes, asked.revision)
        else:
            total = count
            judged_by = scenarios(seed=seed, count=count, lacks=asked.revision.lacks, start=first)
        result = _judge(
            asked, profile, source, timeout, stop_after, judged_by, total, any_release=bool(against)
        )
    except UnknownScope as error:
        fail(str(error), as_json=as_json)
    except (SetupError, SutError) as error:
        fail(str(error), as_json=as_json)
    files, notes = _save(result, folder)
    if as_json:
        click.echo(json.dumps(_as_json(result, seed, files)))
    else:
        report = show.Report(
            result=result,
            revision=asked.revision,
            files=files,
            notes=notes,
            repeat=_repeat(asked, profile, source, seed, first, count, case_files, scopes),
            sampled=not case_files,
        )
        # "cmd:cat:" is no emoji.
        show.verdict(PlainConsole(emoji=False), report)
    sys.exit(EXIT_CODES[result.verdict])


def _save(result: Verdict, folder: Path) -> tuple[list[Path | None], list[str]]:
    """Where each divergence's case was saved, and what is to be said about what was."""
    notes: list[str] = []
    files: list[Path | None] = [None] * len(result.divergences)
    try:
        files = [save(divergence, folder) for divergence in result.divergences]
        if result.stuck_on is not None:
            file = save_scenario(result.stuck_on, "undecided", folder)
            notes.append(f"what it was given then is saved as {file}")
    except OSError as error:
        notes.append(f"the cases could not be saved in {folder}: {error.strerror}; see --cases")
        click.echo(f"mustfit: {notes[-1]}", err=True)
    said = [line for line in result.stderr.splitlines() if line.strip()][-SHOWN_STDERR:]
    notes += [f"  stderr: {_printable(line)}" for line in said]
    return files, notes


#: Lines of a scheduler's stderr that are shown when it lets go.
SHOWN_STDERR = 6


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line)


def _read(files: tuple[Path, ...]) -> Iterator[Scenario]:
    return chain.from_iterable((s for _, s in read_scenarios(file)) for file in files)


def _checked(given: Iterator[Scenario], asked: What) -> Iterator[Scenario]:
    """The same scenarios; one that the revision doesn't know is refused by name."""
    try:
        for scenario in given:
            asked.revision(scenario.config)
            yield scenario
    except ProtocolError as error:
        raise BadScenario(str(error)) from error
    except ConfigError as error:
        raise BadScenario(
            f"scenario {scenario.scenario_id!r}: {error}; --against picks another release"
        ) from error
    except OSError as error:
        raise BadScenario(f"cannot read {error.filename}: {error.strerror}") from error


def _walks(names: tuple[str, ...], revision: type[Scheduler]) -> Iterator[Scenario]:
    """Walks through these scopes.

    Raises:
        UnknownScope: At once, if there is no such scope.
    """
    scopes, _ = chosen(names, revision)

    def walks() -> Iterator[Scenario]:
        try:
            yield from scenarios_of(scopes, revision)
        except NotSound as error:
            raise BadScenario(str(error)) from error

    return walks()


def _judge(
    asked: What,
    profile: Profile,
    source: Path | None,
    timeout: float,
    stop_after: int,
    judged_by: Iterator[Scenario],
    total: int | None,
    *,
    any_release: bool,
) -> Verdict:
    # vLLM takes a while to import; of others nothing is known but what the user says.
    is_real = asked.name.startswith("vllm:") or asked.reference is not None
    patience = max(timeout, Limits().start_timeout) if is_real else timeout
    limits = Limits(timeout=timeout, start_timeout=patience)
    with progress(total) as (say, advance):
        try:
            sut = start(asked, profile=profile, source=source, limits=limits, progress=say)
            reference = None
            if asked.reference is not None:
                right = attrs.evolve(asked, name=asked.reference)
                reference = start(right, profile=profile, source=None, limits=limits, progress=say)
        except KeyboardInterrupt:
            raise SetupError("interrupted while setting up; what was set up is kept") from None
        say(f"judging {asked.name}")
        with sut, reference or nullcontext():
            return Judge(
                sut=sut,
                against=asked.reference or asked.against,
                revision=asked.revision,
                profile=profile,
                stop_after=stop_after,
                any_release=any_release,
                reference=reference,
            ).judge(judged_by, progress=say, advance=advance)


def _as_json(result: Verdict, seed: int, files: list[Path | None]) -> dict[str, Any]:
    return {
        "verdict": result.verdict,
        "reason": result.reason,
        "sut": result.sut,
        "against": result.against,
        "profile": result.profile,
        "seed": seed,
        "scenarios": result.scenarios,
        "steps": result.steps,
        "diverged": result.diverged,
        "seconds": round(result.seconds, 3),
        "divergences": [
            {
                "rule": d.rule,
                "case": str(file) if file is not None else None,
                "step": d.difference.step,
                "field": d.difference.field,
                "expected": d.difference.expected,
                "observed": d.difference.observed,
                "behaves_like": d.behaves_like,
                "rule_is_a_guess": d.behaves_like is None,
                "found_in": list(d.found_in),
            }
            for d, file in zip(result.divergences, files, strict=True)
        ],
        "rules": result.rules,
        "never_exercised": list(result.never_exercised),
    }


def _repeat(
    asked: What,
    profile: Profile,
    source: Path | None,
    seed: int,
    first: int,
    count: int,
    case_files: tuple[Path, ...],
    scopes: tuple[str, ...],
) -> str:
    words = ["mustfit", "judge", "--sut", asked.name]
    words += ["--against", asked.reference or asked.against]
    words += ["--profile", profile]
    if source is not None:
        words += ["--vllm-source", str(source)]
    for file in case_files:
        words += ["--case", str(file)]
    for scope in scopes:
        words += ["--scope", scope]
    if not case_files and not scopes:
        words += ["--seed", str(seed), "--scenarios", str(count)]
        words += ["--start", str(first)] if first else []
    return shlex.join(words)


# --- Tables -----------------------------------------------------------------------------------


@main.command()
@as_json
def revisions(*, as_json: bool) -> None:
    """The revisions of the semantics, and the releases that were run and agreed with each."""
    found: dict[str, list[Any]] = {name: [] for name in REVISIONS}
    for row in measurements().values():
        found[row.revision].append(row)
    if as_json:
        table = [
            {"revision": name, "releases": [r.release for r in rows]}
            for name, rows in found.items()
        ]
        click.echo(json.dumps({"revisions": table}))
        return
    for name, rows in found.items():
        changed = " ".join((REVISIONS[name].__doc__ or "").split())
        click.echo(f"{name}  {changed}")
        for row in rows:
            click.echo(f"  {show.measurement(row)}")


@main.command()
@click.option("--revision", type=click.Choice(list(REVISIONS)), default=list(REVISIONS)[-1])
@as_json
def rules(*, revision: str, as_json: bool) -> None:
    """The rules of a revision: statement, method, source, and the mutants that break each."""
    table: list[dict[str, Any]] = [
        {
            "rule": rule.id,
            "statement": rule.statement,
            "method": rule.method,
            "source": rule.source,
            "mutants": [m.name for m in MUTANTS.values() if m.breaks == rule.id],
        }
        for rule in rules_of(REVISIONS[revision]).values()
    ]
    if as_json:
        click.echo(json.dumps({"revision": revision, "rules": table}))
        return
    for row in table:
        broken_by = ", ".join(row["mutants"])
        click.echo(f"{row['rule']}  {row['statement']} ({row['source']}; broken by {broken_by})")


@main.command()
@as_json
def mutants(*, as_json: bool) -> None:
    """The wrong schedulers: what each does, the rule it breaks, and where that was seen."""
    if as_json:
        table = [
            {
                "mutant": m.name,
                "breaks": m.breaks,
                "description": m.description,
                "seen_in": m.seen_in or None,
            }
            for m in MUTANTS.values()
        ]
        click.echo(json.dumps({"mutants": table}))
        return
    for m in MUTANTS.values():
        seen = f" (seen in {m.seen_in})" if m.seen_in else ""
        click.echo(f"{m.name}  breaks {m.breaks}: {m.description}{seen}")


@main.command()
def schema() -> None:
    """The JSON Schema of scenarios and traces."""
    click.echo(json.dumps(json_schema(), indent=2))


main.add_command(replay)
main.add_command(bench)
main.add_command(explore)
main.add_command(prove)


if __name__ == "__main__":
    entry()
