"""The set-up of the real vLLM, as far as it needs no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mustfit_checks import vllm_setup
from mustfit_checks.vllm_setup import MARKER, SCHEDULER, SetupError, set_up, source_tree, unpack

WHEEL = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"


def ignore(_: str) -> None:
    """Takes progress messages."""


def make_wheel(path: Path, members: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, member)
    return path


class Commands:
    """Stands in for ``venv`` and ``pip``: does what they do to the disk, and keeps count."""

    def __init__(self, members: Sequence[str] = (str(SCHEDULER),)) -> None:
        self.members = members
        self.run: list[str] = []
        self.fail_at = ""
        self.seconds = 0.0

    def __call__(self, command: Sequence[str], what: str, *, lock: int) -> None:
        assert lock > 2
        words = " ".join(command)
        self.run.append(words)
        time.sleep(self.seconds)
        if self.fail_at and self.fail_at in words:
            raise SetupError(f"{what}: failed here")
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        elif "download" in command:
            make_wheel(Path(command[command.index("--dest") + 1]) / WHEEL, self.members)

    def count(self, word: str) -> int:
        return sum(word in words.split() for words in self.run)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    stand_in = Commands()
    monkeypatch.setattr(vllm_setup, "_run", stand_in)
    return stand_in


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


@pytest.mark.parametrize(
    ("member", "wanted"),
    [
        ("vllm/__init__.py", True),
        ("vllm/third_party/pynvml.py", True),
        ("vllm/model_executor/layers/fused_moe/configs/E=8.json", True),
        ("vllm-0.33.0.dist-info/METADATA", True),
        ("vllm-0.33.0.dist-info/entry_points.txt", True),
        ("vllm-0.33.0.dist-info/RECORD", False),
        ("vllm/_C.abi3.so", False),
        ("vllm/vllm_flash_attn/METADATA.bin", False),
        ("vllm/", False),
    ],
)
def test_only_python_json_and_metadata_are_unpacked(
    tmp_path: Path, member: str, *, wanted: bool
) -> None:
    wheel = make_wheel(tmp_path / WHEEL, [member])
    unpack(wheel, tmp_path / "out")
    assert (tmp_path / "out" / member).is_file() is wanted


@pytest.mark.parametrize(
    "member",
    [
        "../evil.py",
        "vllm/../../evil.py",
        "/evil.py",
        "C:/evil.py",
        "C:evil.py",
        "\\\\host\\e\\x.py",
    ],
)
def test_a_member_that_leads_out_of_the_folder_is_refused(tmp_path: Path, member: str) -> None:
    wheel = make_wheel(tmp_path / WHEEL, ["vllm/a.py", member])
    with pytest.raises(SetupError, match="not to be trusted"):
        unpack(wheel, tmp_path / "a" / "b" / "out")
    assert not list(tmp_path.rglob("*evil*"))


def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    wheel.write_bytes(b"not a zip")
    with pytest.raises(SetupError, match=r"0\.33\.0.*is damaged"):
        unpack(wheel, tmp_path / "out")


def test_the_first_use_sets_up_and_the_second_does_nothing(
    tmp_path: Path, commands: Commands
) -> None:
    said: list[str] = []
    installed = set_up("0.33.0", cache=tmp_path, progress=said.append)
    assert installed.source == tmp_path / "vllm" / "0.33.0"
    assert (installed.source / SCHEDULER).is_file()
    assert installed.python.is_file()
    assert any("0.33.0" in message for message in said)
    before = list(commands.run)
    said.clear()
    assert set_up("0.33.0", cache=tmp_path, progress=said.append) == installed
    assert commands.run == before
    assert not said


def test_releases_share_the_environment(tmp_path: Path, commands: Commands) -> None:
    first = set_up("0.33.0", cache=tmp_path, progress=ignore)
    second = set_up("0.22.1", cache=tmp_path, progress=ignore)
    assert first.python == second.python
    assert commands.count("venv") == 1
    assert commands.count("download") == 2


def test_another_torch_is_another_environment(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = set_up("0.33.0", cache=tmp_path, progress=ignore)
    monkeypatch.setenv("MUSTFIT_TORCH", "torch==2.13.0+cpu --pre")
    second = set_up("0.33.0", cache=tmp_path, progress=ignore)
    assert first.python != second.python
    assert commands.count("torch==2.13.0+cpu") == 1
    assert commands.count("--pre") == 1


def test_the_cache_folder_can_be_named(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTFIT_CACHE_DIR", str(tmp_path))
    assert set_up("0.33.0", progress=ignore).source == tmp_path / "vllm" / "0.33.0"
    assert commands.run


def test_an_environment_without_its_marker_is_built_anew(
    tmp_path: Path, commands: Commands
) -> None:
    installed = set_up("0.33.0", cache=tmp_path, progress=ignore)
    environment = installed.python.parent.parent
    (environment / MARKER).unlink()
    (environment / "half").touch()
    assert set_up("0.33.0", cache=tmp_path, progress=ignore) == installed
    assert not (environment / "half").exists()
    assert commands.count("venv") == 2
    assert commands.count("download") == 1


def test_an_environment_whose_interpreter_is_gone_is_built_anew(
    tmp_path: Path, commands: Commands
) -> None:
    installed = set_up("0.33.0", cache=tmp_path, progress=ignore)
    installed.python.unlink()
    installed.python.symlink_to(tmp_path / "uninstalled")
    set_up("0.33.0", cache=tmp_path, progress=ignore)
    assert installed.python.exists()
    assert commands.count("venv") == 2


def test_what_an_interrupted_set_up_left_is_removed(tmp_path: Path, commands: Commands) -> None:
    left = tmp_path / "vllm" / ".0.33.0.partial" / "wheel"
    make_wheel(left / "old.whl", ["a.py"])
    half = tmp_path / "vllm" / "0.33.0" / "vllm"
    half.mkdir(parents=True)
    (half / "half.py").touch()
    installed = set_up("0.33.0", cache=tmp_path, progress=ignore)
    assert commands.count("download") == 1
    assert not (installed.source / "vllm" / "half.py").exists()
    assert names(tmp_path / "vllm") == {"0.33.0", installed.python.parent.parent.name}
    assert not list(tmp_path.rglob("*.whl"))


@pytest.mark.parametrize("fail_at", ["download", "venv", "xgrammar"])
def test_a_failed_set_up_is_not_taken_for_a_whole_one(
    tmp_path: Path, commands: Commands, fail_at: str
) -> None:
    commands.fail_at = fail_at
    with pytest.raises(SetupError, match=r"failed here; to try again|python -m venv failed"):
        set_up("0.33.0", cache=tmp_path, progress=ignore)
    assert not any(name.endswith(".partial") for name in names(tmp_path / "vllm"))
    commands.fail_at = ""
    installed = set_up("0.33.0", cache=tmp_path, progress=ignore)
    assert (installed.python.parent.parent / MARKER).is_file()


def test_two_at_once_set_up_once(tmp_path: Path, commands: Commands) -> None:
    commands.seconds = 0.05
    results: list[Any] = []
    said: list[str] = []

    def one() -> None:
        results.append(set_up("0.33.0", cache=tmp_path, progress=said.append))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len(set(results)) == 1
    assert commands.count("download") == 1
    assert commands.count("venv") == 1
    assert any("waiting for another set-up" in message for message in said)


def test_a_child_that_outlives_its_parent_keeps_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    code = "import time; time.sleep(0.4)"
    with vllm_setup._locked(lock, ignore) as descriptor:
        child = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", code], pass_fds=(descriptor,)
        )
    said: list[str] = []
    with vllm_setup._locked(lock, said.append):
        assert said == ["waiting for another set-up (x)"]
    assert child.wait() == 0


@pytest.mark.parametrize(
    "release", ["", "newest", "../0.33.0", "0.33.0/..", "33", "--pre", "0.33.0 x"]
)
def test_what_is_no_release_is_refused_before_anything_is_done(
    tmp_path: Path, commands: Commands, release: str
) -> None:
    with pytest.raises(SetupError, match="is no vLLM release; write it like"):
        set_up(release, cache=tmp_path, progress=ignore)
    assert not commands.run
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ("0.1.0, 0.2.0, 0.33.0", r"there is no vLLM 9\.9\.9; the newest is 0\.33\.0"),
        ("none", r"cannot download vLLM 9\.9\.9: pip finds no vLLM at all"),
    ],
)
def test_a_release_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: str, message: str
) -> None:
    said = (
        "Looking in links: somewhere\n"
        "ERROR: Could not find a version that satisfies the requirement vllm==9.9.9 "
        f"(from versions: {versions})\n"
        "ERROR: No matching distribution found for vllm==9.9.9\n"
    )

    def fail(command: Sequence[str], what: str, *, lock: int) -> None:
        assert lock > 2
        if "download" in command:
            raise SetupError(f"{what}: {vllm_setup.last_words(said)}")

    monkeypatch.setattr(vllm_setup, "_run", fail)
    with pytest.raises(SetupError, match=message) as caught:
        set_up("9.9.9", cache=tmp_path, progress=ignore)
    assert "\n" not in str(caught.value)


def test_a_wheel_without_the_scheduler_is_refused(tmp_path: Path, commands: Commands) -> None:
    commands.members = ["vllm/__init__.py"]
    with pytest.raises(SetupError, match=r"vLLM 0\.3\.0 has no vllm/v1"):
        set_up("0.3.0", cache=tmp_path, progress=ignore)


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, commands: Commands) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot set vLLM up in .*file.*MUSTFIT_CACHE_DIR"):
        set_up("0.33.0", cache=tmp_path / "file", progress=ignore)
    assert not commands.run


def test_last_words_of_a_failed_command() -> None:
    assert vllm_setup.last_words("a\nERROR: b\nERROR: No matching distribution found\nc\n") == "b"
    assert vllm_setup.last_words("ERROR: No matching distribution found\n") == (
        "No matching distribution found"
    )
    assert vllm_setup.last_words("a\n\nb\n\n") == "b"
    assert not vllm_setup.last_words("")


def test_a_failed_command_is_reported_in_one_line(tmp_path: Path) -> None:
    code = "print('x'); print('ERROR: no space'); raise SystemExit(3)"
    with (
        vllm_setup._locked(tmp_path / "x.lock", ignore) as lock,
        pytest.raises(SetupError, match=r"^cannot do it: no space$"),
    ):
        vllm_setup._run([sys.executable, "-c", code], "cannot do it", lock=lock)


def test_a_source_tree_runs_as_it_is(tmp_path: Path, commands: Commands) -> None:
    tree = tmp_path / "mine"
    (tree / SCHEDULER).parent.mkdir(parents=True)
    (tree / SCHEDULER).touch()
    installed = source_tree(tree, cache=tmp_path / "cache", progress=ignore)
    assert installed.source == tree
    assert installed.release is None
    assert commands.count("download") == 0
    assert installed.environment()["PYTHONPATH"] == str(tree)
    assert installed.command == (str(installed.python), str(vllm_setup.DRIVER))
    assert vllm_setup.DRIVER.is_file()


def test_what_is_no_source_tree_is_refused(tmp_path: Path, commands: Commands) -> None:
    with pytest.raises(SetupError) as caught:
        source_tree(tmp_path / "absent", cache=tmp_path, progress=ignore)
    message = str(caught.value)
    assert str(tmp_path / "absent") in message
    assert "vllm/v1/core/sched/scheduler.py" in message
    assert "give the folder" in message
    assert "\n" not in message
    assert not commands.run


#: What a user may have set that would change what Python does.
HOSTILE = {
    "PYTHONOPTIMIZE": "2",
    "PYTHONHOME": "/nowhere",
    "PYTHONSTARTUP": "/nowhere.py",
    "PYTHONWARNINGS": "error",
    "PYTHONBREAKPOINT": "nothing.there",
    "PYTHONINSPECT": "1",
    "PYTHONVERBOSE": "1",
    "PYTHONDEVMODE": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONIOENCODING": "latin-1",
    "PYTHONUTF8": "0",
    "PYTHONPLATLIBDIR": "nowhere",
    "PYTHONMALLOC": "debug",
    "PYTHONPROFILEIMPORTTIME": "1",
    "PYTHONUNBUFFERED": "1",
}

ABOUT = """
import json, os, sys
names = [name for name in os.environ if name.startswith("PYTHON") and os.environ[name]]
print(json.dumps([list(sys.flags), sys.warnoptions, sys.prefix, sys.stdout.encoding, names]))
"""


def test_no_python_variable_of_the_user_has_any_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = vllm_setup.Installed(
        python=Path(sys.executable), source=tmp_path, release="0.33.0", state=tmp_path
    )

    def about() -> tuple[Any, str]:
        # As ProcessSut does it.
        environment = {**os.environ, **installed.environment()}
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", ABOUT],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        return json.loads(done.stdout), done.stderr

    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)
    clean = about()
    assert clean[0][-1] == ["PYTHONPATH"]
    for name, value in (HOSTILE | {"PYTHONPATH": "/nowhere"}).items():
        monkeypatch.setenv(name, value)
    assert about() == clean
    assert installed.environment()["PYTHONPATH"] == str(tmp_path)


@pytest.mark.parametrize(("options", "optimize"), [(["-O"], ""), (["-OO"], ""), ([], "1")])
def test_the_driver_refuses_a_python_that_skips_assertions(
    options: list[str], optimize: str
) -> None:
    done = subprocess.run(  # noqa: S603
        [sys.executable, *options, str(vllm_setup.DRIVER)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONOPTIMIZE": optimize},
    )
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.startswith("vllm_driver: Python skips assertions")
    assert done.stderr.count("\n") == 1
