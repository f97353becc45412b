"""What the tests share: the real vLLM schedulers, and where their sources are.

Tests that run a real vLLM carry the mark ``vllm``. Which releases they run is said by
``--vllm RELEASES``; ``--vllm none`` leaves them out. A release is set up on first use, as
``mustfit judge --sut vllm:RELEASE`` does it, or taken from ``MUSTFIT_TEST_SOURCES``: a folder that
holds ``RELEASE/vllm/...``.

How long the stateful machines run, and from which seed, is said by ``--machines`` and its like;
``test_stateful.py`` says how.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, settings

from mustfit_checks.measured import likely_revision
from mustfit_checks.sut import Limits, Sut
from mustfit_checks.vllm_setup import (
    RELEASE,
    SCHEDULER,
    Installed,
    SetupError,
    cache_folder,
    set_up,
    source_tree,
)
from mustfit_checks.what import What, start
from mustfit_impl import run as run_impl
from mustfit_impl import run_in_strides
from mustfit_spec import REVISIONS, Scenario, Trace, run

DEFAULT_RELEASES = "0.22.1,0.33.0"

#: For each profile of the stateful machines, examples in a round and operations in an example. The
#: Hypothesis profiles are called ``machines-quick`` and so on: it has a ``ci`` of its own.
MACHINES = {"quick": (200, 40), "ci": (1000, 50), "soak": (500, 60)}
for _name, (_examples, _operations) in MACHINES.items():
    settings.register_profile(
        f"machines-{_name}",
        max_examples=_examples,
        stateful_step_count=_operations,
        deadline=None,
        # A run is made again from its seed or its blob, by anybody, whatever was run before.
        database=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
#: The property under which a machine's test reports what it did.
MACHINE_REPORT = "machine"

#: Gives the real scheduler of a release.
Vllm = Callable[[str], Sut]
#: Gives a release, ready to run.
Install = Callable[[str], Installed]
#: Gives the folder that holds a release's ``vllm`` package, or ``None`` if it isn't there.
Sources = Callable[[str], Path | None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm",
        metavar="RELEASES",
        default=DEFAULT_RELEASES,
        help="vLLM releases to run, separated by commas, or 'none' (default: %(default)s)",
    )
    parser.addoption(
        "--machines",
        choices=tuple(MACHINES),
        default="quick",
        help="how much the stateful machines do; but for 'quick', with a new seed each time",
    )
    parser.addoption(
        "--soak-seconds",
        type=float,
        metavar="N",
        default=0.0,
        help="with --machines soak: start rounds for so long, for each revision (default: one)",
    )
    parser.addoption(
        "--machines-seed", type=int, metavar="SEED", help="the seed of the machines' first round"
    )
    parser.addoption(
        "--machines-blob",
        metavar="BLOB",
        help="run only the example that Hypothesis gave as @reproduce_failure(..., b'BLOB')",
    )


@attrs.frozen(kw_only=True)
class Machines:
    """How the stateful machines run.

    Attributes:
        profile: A Hypothesis profile.
        command: What selects it, and a seed, on the command line.
        seed: That of the first round; each round after it has the next.
        seconds: How long rounds are started for.
        blob: The one example to run, if it is one.
    """

    profile: str
    command: str
    seed: int
    seconds: float
    blob: str | None


@pytest.fixture(scope="session")
def machines(pytestconfig: pytest.Config) -> Machines:
    """What the command line asks of the stateful machines."""
    name = str(pytestconfig.getoption("--machines"))
    seconds = float(pytestconfig.getoption("--soak-seconds"))
    if seconds and name != "soak":
        raise pytest.UsageError("--soak-seconds goes with --machines soak")
    seed = pytestconfig.getoption("--machines-seed")
    if seed is None:
        seed = 0 if name == "quick" else secrets.randbits(32)
    return Machines(
        profile=f"machines-{name}",
        command=f"--machines {name} --machines-seed",
        seed=int(seed),
        seconds=seconds,
        blob=pytestconfig.getoption("--machines-blob"),
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the machines did, unless it is the same every time."""
    if terminalreporter.config.getoption("--machines") == "quick":
        return
    reports = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == MACHINE_REPORT
    ]
    if reports:
        terminalreporter.section("stateful machines")
        for report in reports:
            terminalreporter.write_line(str(report))


def releases(config: pytest.Config) -> tuple[str, ...]:
    """The releases that were asked for."""
    given = str(config.getoption("--vllm"))
    if given == "none":
        return ()
    names = tuple(name.strip() for name in given.split(","))
    for name in names:
        if not RELEASE.fullmatch(name):
            raise pytest.UsageError(f"--vllm: {name!r} is no vLLM release; write it like 0.33.0")
    return names


def pytest_configure(config: pytest.Config) -> None:
    releases(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests once for each scheduler that they are about.

    One that takes ``vllm_release``: for every release that was asked for. One that takes ``ask``
    and ``release``: for every revision of the specification and of the implementation, and for
    these releases.
    """
    # With none at all a test still appears, to be skipped with a message.
    asked = releases(metafunc.config) or ("none",)
    if "vllm_release" in metafunc.fixturenames:
        metafunc.parametrize("vllm_release", asked)
    if "subject" in metafunc.fixturenames:
        ours = [
            pytest.param((kind, name), id=f"{kind}-{name}") for kind in OURS for name in REVISIONS
        ]
        real = [
            pytest.param(("vllm", name), id=f"vllm-{name}", marks=pytest.mark.vllm)
            for name in asked
        ]
        metafunc.parametrize("subject", [*ours, *real], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="--vllm none: the real vLLM is left out")
    for item in items:
        needs_vllm = {"vllm", "vllm_release", "install"} & set(getattr(item, "fixturenames", ()))
        marked = item.get_closest_marker("vllm") is not None
        if needs_vllm and not marked:
            raise pytest.UsageError(f"{item.nodeid} runs vLLM and lacks the mark 'vllm'")
        if marked and not releases(config):
            item.add_marker(skip)


def given_sources(release: str) -> Path | None:
    """That release below ``MUSTFIT_TEST_SOURCES``, if it is there."""
    folder = os.environ.get("MUSTFIT_TEST_SOURCES")
    source = Path(folder, release) if folder else None
    return source if source is not None and (source / SCHEDULER).is_file() else None


@pytest.fixture(scope="session")
def sources() -> Sources:
    """Where a release's sources are, without setting anything up."""

    def find(release: str) -> Path | None:
        source = given_sources(release)
        if source is None:
            source = cache_folder().expanduser().absolute() / "vllm" / release
        return source if (source / SCHEDULER).is_file() else None

    return find


def ignore(_: str) -> None:
    """Takes progress messages."""


@pytest.fixture(scope="session")
def install() -> Install:
    """Sets a release up, if it isn't yet."""

    def install(release: str) -> Installed:
        source = given_sources(release)
        try:
            if source is not None:
                return source_tree(source, progress=ignore)
            return set_up(release, progress=ignore)
        except SetupError as error:
            pytest.fail(f"vLLM {release}: {error}", pytrace=False)

    return install


@pytest.fixture(scope="module")
def vllm(install: Install) -> Iterator[Vllm]:
    """The real scheduler of a release; it keeps running until the module's last test.

    Not longer: other modules make sure that they leave no process behind.
    """
    started: dict[str, Sut] = {}

    def get(release: str) -> Sut:
        if release not in started:
            install(release)
            started[release] = start(
                What(
                    name=f"vllm:{release}",
                    against=release,
                    revision=REVISIONS[likely_revision(release)],
                ),
                profile="identity",
                source=given_sources(release),
                limits=Limits(),
                progress=ignore,
            )
        return started[release]

    yield get
    for sut in started.values():
        sut.close()


#: Who answers to every revision.
OURS: dict[str, Callable[[Scenario, str], Trace]] = {
    "spec": lambda scenario, name: run(scenario, REVISIONS[name](scenario.config)),
    "impl": lambda scenario, name: run_impl(scenario, revision=name),
    "strides": lambda scenario, name: run_in_strides(scenario, revision=name).expand(),
}


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Who is asked: one of ``OURS`` or ``vllm``, and which revision or release."""
    kind, name = request.param
    return str(kind), str(name)


@pytest.fixture
def release(subject: tuple[str, str]) -> str:
    """The release that ``ask`` asks; of a revision, the first that behaves so."""
    return subject[1]


@pytest.fixture
def ask(subject: tuple[str, str], request: pytest.FixtureRequest) -> Callable[[Scenario], Trace]:
    """Runs a scenario on the specification, the implementation or the real scheduler."""
    kind, name = subject
    if kind in OURS:
        return lambda scenario: OURS[kind](scenario, name)
    real: Vllm = request.getfixturevalue("vllm")
    return real(name).ask
