"""What the tests share: the real vLLM schedulers, and where their sources are.

Tests that run a real vLLM carry the mark ``vllm``. Which releases they run is said by
``--vllm RELEASES``; ``--vllm none`` leaves them out. A release is set up on first use, as
``mustfit judge --sut vllm:RELEASE`` does it, or taken from ``MUSTFIT_TEST_SOURCES``: a folder that
holds ``RELEASE/vllm/...``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
from mustfit_spec import REVISIONS, Scenario, Trace, run

DEFAULT_RELEASES = "0.22.1,0.33.0"

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
    and ``release``: for every revision of the specification, and for these releases.
    """
    # With none at all a test still appears, to be skipped with a message.
    asked = releases(metafunc.config) or ("none",)
    if "vllm_release" in metafunc.fixturenames:
        metafunc.parametrize("vllm_release", asked)
    if "subject" in metafunc.fixturenames:
        spec = [pytest.param(("spec", name), id=f"spec-{name}") for name in REVISIONS]
        real = [
            pytest.param(("vllm", name), id=f"vllm-{name}", marks=pytest.mark.vllm)
            for name in asked
        ]
        metafunc.parametrize("subject", [*spec, *real], indirect=True)


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


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Who is asked: ``spec`` or ``vllm``, and which revision or release."""
    kind, name = request.param
    return str(kind), str(name)


@pytest.fixture
def release(subject: tuple[str, str]) -> str:
    """The release that ``ask`` asks; of a revision, the first that behaves so."""
    return subject[1]


@pytest.fixture
def ask(subject: tuple[str, str], request: pytest.FixtureRequest) -> Callable[[Scenario], Trace]:
    """Runs a scenario on the specification or on the real scheduler."""
    kind, name = subject
    if kind == "spec":
        return lambda scenario: run(scenario, REVISIONS[name](scenario.config))
    real: Vllm = request.getfixturevalue("vllm")
    return real(name).ask
