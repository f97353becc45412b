"""From what the command line calls a scheduler to the scheduler: ``spec``, ``vllm:0.33.0``, ..."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import attrs

import mustfit_impl as impl
from mustfit_checks.attribute import mutant_trace, revision_name
from mustfit_checks.measured import measurements, newest_release, revision_for
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.sut import InProcess, Limits, ProcessSut, Sut
from mustfit_checks.vllm_setup import set_up, source_tree
from mustfit_spec import Profile, Scenario, Scheduler, Trace, run

KINDS = "impl, impl:strides, spec, mutant:NAME, vllm:RELEASE, cmd:COMMAND LINE"

#: What stands for a release where a source tree is given that claims none.
SOURCE = "source"


class UnknownSut(ValueError):
    """Nothing is called that. Its text is one line that says what there is."""


@attrs.frozen(kw_only=True)
class What:
    """A scheduler that was asked for, and what it is to be judged by.

    Attributes:
        name: As it was asked for.
        against: The release that it is judged by.
        revision: The revision of the specification that this release agrees with.
        reference: The scheduler that says what is right, if it isn't the specification.
    """

    name: str
    against: str
    revision: type[Scheduler]
    reference: str | None = None


def what(name: str, against: str | None, source: Path | None) -> What:
    """What was asked for: by what release it is judged, if none is given its own, or the newest.

    Raises:
        UnknownSut: There is no such kind of scheduler.
        UnknownRelease: The release that it would be judged by was never measured.
    """
    kind, _, rest = name.partition(":")
    reference = against if against and against.startswith("vllm:") else None
    if against:
        against = against.removeprefix("vllm:").removeprefix("v")
    takes_rest = kind in {"mutant", "vllm", "cmd"}
    if name not in {"impl", "impl:strides", "spec"} and not (takes_rest and rest):
        hint = f"; to run a program, cmd:{name}" if "/" in name else ""
        raise UnknownSut(f"nothing is called {name!r}; there are: {KINDS}{hint}")
    if kind == "mutant" and rest not in MUTANTS:
        near = get_close_matches(rest, MUTANTS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownSut(f"there is no mutant {rest!r}; `mustfit mutants` lists them{hint}")
    if source is not None and kind != "vllm":
        raise UnknownSut(f"--vllm-source goes with --sut vllm:RELEASE or alone, not with {name!r}")
    if source is None and rest == SOURCE:
        raise UnknownSut(f"{name} needs --vllm-source, the folder that holds the vllm package")
    own = rest if kind == "vllm" and rest != SOURCE else None
    release = against or own or newest_release()
    return What(name=name, against=release, revision=revision_for(release), reference=reference)


def start(
    asked: What,
    *,
    profile: Profile,
    source: Path | None,
    limits: Limits,
    progress: Callable[[str], None],
) -> Sut:
    """The scheduler itself, set up if need be.

    Raises:
        SetupError: vLLM could not be set up.
        SutError: The command line makes no sense.
    """
    kind, _, rest = asked.name.partition(":")
    if kind == "vllm":
        installed = (
            set_up(rest, progress=progress)
            if source is None
            else source_tree(source, progress=progress)
        )
        return ProcessSut(
            installed.command,
            profile=profile,
            name=asked.name,
            env=installed.environment(),
            limits=limits,
        )
    if kind == "cmd":
        return ProcessSut(rest, profile=profile, name=asked.name, limits=limits)
    return InProcess(_answer(kind, rest, asked.revision), name=asked.name)


def _answer(kind: str, rest: str, spec: type[Scheduler]) -> Callable[[Scenario], Trace]:
    """What a scheduler of this process does with a scenario."""
    revision = revision_name(spec)
    if kind == "mutant":
        return lambda scenario: mutant_trace(scenario, MUTANTS[rest], revision)
    if kind == "spec":
        return lambda scenario: run(scenario, spec(scenario.config))
    if rest:
        return lambda scenario: impl.run_in_strides(scenario, revision=revision).expand()
    return lambda scenario: impl.run(scenario, revision=revision)


def asked_for(against: str | None, mutant: str | None) -> tuple[str, str, type[Scheduler]]:
    """A release, its revision, and that or the wrong scheduler that was asked for.

    Raises:
        ValueError: There is no such release, or no such mutant of it.
    """
    release = (against or newest_release()).removeprefix("v")
    scheduler = revision_for(release)
    revision = measurements()[release].revision
    if mutant is None:
        return release, revision, scheduler
    if mutant not in MUTANTS:
        raise ValueError(f"there is no mutant {mutant!r}; `mustfit mutants` lists them")
    if not MUTANTS[mutant].exists_in(revision):
        raise ValueError(f"mutant {mutant!r} isn't wrong in revision {revision}")
    return release, revision, MUTANTS[mutant].of(revision)
