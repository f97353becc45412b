"""The table of measured releases: what is listed, and what may replace what."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from mustfit_checks import measure, measured
from mustfit_checks.measured import (
    MINIMUM,
    Measurement,
    UnknownRelease,
    measurements,
    newest_release,
    revision_for,
)


def row(release: str = "0.33.0", *, scenarios: int = 20_000, divergences: int = 0) -> Measurement:
    return Measurement(
        release=release,
        revision="0.33.0",
        profile="identity",
        scenarios=scenarios,
        steps=scenarios * 27,
        seed=1,
        divergences=divergences,
    )


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table of the test's own, empty at first."""
    path = tmp_path / "measured.json"
    path.write_text("[]\n", encoding="utf-8")
    monkeypatch.setattr(measured, "TABLE", path)
    measurements.cache_clear()
    yield path
    measurements.cache_clear()


def fill(table: Path, *rows: Measurement) -> None:
    table.write_text(json.dumps([attrs.asdict(r) for r in rows]), encoding="utf-8")
    measurements.cache_clear()


def test_only_what_agreed_in_enough_scenarios_is_listed(table: Path) -> None:
    fill(
        table,
        row("0.40.0", scenarios=MINIMUM - 1),
        row("0.33.0", scenarios=MINIMUM),
        row("0.9.0", scenarios=MINIMUM),
        row("0.34.0", divergences=1),
    )
    assert list(measurements()) == ["0.9.0", "0.33.0"]
    assert newest_release() == "0.33.0"
    for release in ("0.40.0", "0.34.0"):
        with pytest.raises(UnknownRelease, match=r"was never measured.*nearest measured: 0\.33\.0"):
            revision_for(release)


def test_the_table_that_comes_with_the_package_lists_all_its_rows() -> None:
    assert list(measurements()) == [r.release for r in measured.rows()]


@pytest.mark.parametrize(
    ("before", "after", "replaced"),
    [
        (row(scenarios=20_000), row(scenarios=19_999), False),
        (row(scenarios=20_000), row(scenarios=20_000), True),
        (row(scenarios=20_000), row(scenarios=20_001), True),
        (row(scenarios=20_000), row(scenarios=5, divergences=1), True),
        (row(scenarios=20_000, divergences=1), row(scenarios=10_000), True),
        (row("0.32.0"), row("0.33.0", scenarios=1), True),
    ],
)
def test_a_larger_row_without_divergence_gives_way_only_to_a_divergence(
    table: Path, before: Measurement, after: Measurement, *, replaced: bool
) -> None:
    fill(table, before)
    said = measure.record(after)
    assert (said is None) is replaced
    assert (after in measured.rows()) is replaced
    if said is not None:
        assert measured.rows() == [before]
        assert "20000 scenarios agreed before" in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("found", "code", "recorded"),
    [
        ((row(scenarios=300), None), 1, False),
        ((row(scenarios=30_000), None), 0, True),
        ((row(scenarios=300, divergences=2), "2 scenarios diverge"), 1, True),
        ((row(scenarios=30_000), "it ended early"), 1, False),
    ],
)
def test_the_command_says_what_it_refuses(
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[Measurement, str | None],
    code: int,
    *,
    recorded: bool,
) -> None:
    fill(table, row())

    def stand_in(*_: Any) -> tuple[Measurement, str | None]:
        return found

    monkeypatch.setattr(measure, "measure", stand_in)
    done = CliRunner().invoke(measure.main, ["0.33.0"])
    assert done.exit_code == code
    assert ("not recorded" in done.output) is (found == (row(scenarios=300), None))
    assert (found[1] or "") in done.output
    assert (found[0] in measured.rows()) is recorded


def test_rows_are_in_order_and_the_file_is_whole(table: Path) -> None:
    table.chmod(0o640)
    for release in ("0.33.0", "0.9.0", "0.22.1"):
        assert measure.record(row(release)) is None
    assert [r.release for r in measured.rows()] == ["0.9.0", "0.22.1", "0.33.0"]
    assert table.read_text(encoding="utf-8").endswith("]\n")
    assert table.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in table.parent.iterdir()] == ["measured.json"]


def test_what_fails_leaves_the_table_as_it_was(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(table, row())

    def fail(_: Path, __: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        measure.record(row("0.34.0"))
    assert measured.rows() == [row()]
    assert [path.name for path in table.parent.iterdir()] == ["measured.json"]


def test_none_is_lost_when_several_are_recorded_at_once(table: Path) -> None:
    names = [f"0.{n}.0" for n in range(40)]
    threads = [threading.Thread(target=measure.record, args=(row(name),)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.release for r in measured.rows()] == names
    assert table.is_file()
