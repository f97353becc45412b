"""Sets up the real vLLM scheduler on first use, in the user's cache folder.

No GPU and none of vLLM's compiled parts are needed: one Python environment, without vLLM, serves
every release, and a release is the Python files of its wheel. On disk::

    <cache>/vllm/env-<digest>/   the environment (about 1.3 GB with a CPU build of torch)
    <cache>/vllm/<release>/      the Python files of a release (about 30 MB)
    <cache>/vllm/state/          what vLLM keeps between runs

Both carry a marker, written last, and a folder without one is built anew. Two set-ups at once wait
for each other; what one that was interrupted leaves, the next one removes. Once all is
there, the network isn't used.

Environment variables:
    MUSTFIT_CACHE_DIR: The cache folder, instead of the platform's usual one.
    MUSTFIT_TORCH: What to install as torch, instead of ``torch==2.13.0``, in the words of
        ``pip install``; on Linux pip's default is a build with several gigabytes of CUDA.

pip's own settings are honoured.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

import attrs
import platformdirs

Progress = Callable[[str], None]

MARKER = ".mustfit-complete"
SCHEDULER = PurePosixPath("vllm/v1/core/sched/scheduler.py")
DRIVER = Path(__file__).with_name("vllm_driver.py")

TORCH = "torch==2.13.0"
#: What vLLM imports on the way to its scheduler. Bounds: newer ones don't go with these releases.
PACKAGES = (
    "aiohttp",
    "apache-tvm-ffi",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "depyf",
    "diskcache",
    "einops",
    "fastapi",
    "filelock",
    "gguf",
    "ijson",
    "jsonschema",
    "lark",
    "mcp",
    "msgspec",
    "numpy",
    "openai",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "orjson",
    "oss-harmony",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pydantic",
    "python-json-logger",
    "pyyaml",
    "pyzmq",
    "regex",
    "requests",
    "setproctitle",
    "tqdm",
    "transformers<5.21",
    "typing_extensions",
    "uvloop",
)
#: Their dependencies are gigabytes of CUDA, and not needed to import them.
PACKAGES_ALONE = ("compressed-tensors==0.17.0", "llguidance", "xgrammar")

# The Python files are the same in every wheel of a release, so all machines take this one.
WHEEL_TAGS = (
    *("--implementation", "cp", "--abi", "abi3", "--python-version", "3.12"),
    *(part for minor in range(17, 41) for part in ("--platform", f"manylinux_2_{minor}_x86_64")),
    *("--platform", "manylinux2014_x86_64"),
)
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")

RELEASE = re.compile(r"\d+(\.\d+)+((a|b|rc|\.post|\.dev)\d+)?")


class SetupError(Exception):
    """vLLM cannot be set up; the message is one line that says what failed and what to do."""


@attrs.frozen(kw_only=True)
class Installed:
    """A vLLM that is ready to run.

    Attributes:
        python: The interpreter of the environment.
        source: The folder that holds the ``vllm`` package; it goes first on ``PYTHONPATH``.
        release: The release, or ``None`` for somebody's own source tree.
        state: A folder for what vLLM keeps between runs.
    """

    python: Path
    source: Path
    release: str | None
    state: Path

    @property
    def command(self) -> tuple[str, ...]:
        """The command that reads scenarios on stdin and writes traces to stdout."""
        return (str(self.python), str(DRIVER))

    def environment(self) -> dict[str, str]:
        """This process's environment variables, with those that the command needs.

        Python's own (``PYTHONOPTIMIZE``, ``PYTHONHOME``, ``PYTHONWARNINGS``, ...) are empty, which
        is to Python as if they weren't there. They are not left out: this is laid over
        ``os.environ``. So nothing of a user's changes what is measured.
        """
        variables = {
            **os.environ,
            **{name: "" for name in os.environ if name.startswith("PYTHON")},
            "PYTHONPATH": str(self.source),
            "VLLM_CACHE_ROOT": str(self.state),
        }
        if self.release is not None:
            variables["MUSTFIT_VLLM_RELEASE"] = self.release
        return variables


def cache_folder() -> Path:
    """The folder that everything is set up in."""
    return Path(os.environ.get("MUSTFIT_CACHE_DIR") or platformdirs.user_cache_dir("mustfit"))


def set_up(release: str, *, cache: Path | None = None, progress: Progress) -> Installed:
    """Makes sure that a vLLM release can run; takes minutes the first time, and no time later.

    Args:
        release: Such as ``0.33.0``.
        cache: The cache folder; ``None``: ``cache_folder()``.
        progress: Called with a few words on what is going on, if anything has to be done.

    Raises:
        SetupError: There is no such release, or it could not be set up.
    """
    if not RELEASE.fullmatch(release):
        raise SetupError(f"{release!r} is no vLLM release; write it like 0.33.0")
    folder = _folder(cache)
    with _as_setup_error(folder):
        source = folder / release
        if not _is_complete(source):
            # Before the environment, which takes longer, so that a wrong number shows at once.
            has_pip = importlib.util.find_spec("pip") is not None
            python = Path(sys.executable) if has_pip else _environment(folder, progress)
            with _locked(folder / f"{release}.lock", progress) as lock:
                if not _is_complete(source):
                    _download(release, source, python, progress, lock=lock)
        return Installed(
            python=_environment(folder, progress),
            source=source,
            release=release,
            state=folder / "state" / release,
        )


def source_tree(path: Path, *, cache: Path | None = None, progress: Progress) -> Installed:
    """Makes sure that somebody's own vLLM source tree can run; no part of it is built.

    Args:
        path: The root of the tree: the folder that holds ``vllm/``.
        cache: The cache folder; ``None``: ``cache_folder()``.
        progress: Called with a few words on what is going on, if anything has to be done.

    Raises:
        SetupError: It is no vLLM source tree, or the environment could not be set up.
    """
    source = path.expanduser().absolute()
    if not (source / SCHEDULER).is_file():
        raise SetupError(
            f"{path} is no vLLM source tree: it has no {SCHEDULER}; "
            "give the folder that holds the vllm package"
        )
    folder = _folder(cache)
    with _as_setup_error(folder):
        digest = hashlib.sha256(os.fsencode(source)).hexdigest()[:12]
        return Installed(
            python=_environment(folder, progress),
            source=source,
            release=None,
            state=folder / "state" / digest,
        )


def _folder(cache: Path | None) -> Path:
    return (cache_folder() if cache is None else cache).expanduser().absolute() / "vllm"


@contextlib.contextmanager
def _as_setup_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"cannot set vLLM up in {folder}: {error.strerror or error}; "
            "MUSTFIT_CACHE_DIR names another folder"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[int]:
    """Holds a lock file; yields its descriptor, to hand on to child processes.

    A child keeps the lock, even once this process has been killed. So nobody removes a folder that
    a pip without a parent still writes to.
    """
    if sys.platform == "win32":
        raise SetupError("vLLM's packages need Linux or macOS")
    import fcntl  # noqa: PLC0415 - not on Windows

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another set-up ({path.stem})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _torch() -> str:
    return os.environ.get("MUSTFIT_TORCH") or TORCH


def _environment(folder: Path, progress: Progress) -> Path:
    """The interpreter of the environment, which is built if it isn't there."""
    torch = _torch()
    about = json.dumps(
        {
            "requirements": [torch, *PACKAGES, "alone:", *PACKAGES_ALONE],
            "python": platform.python_version(),
            "platform": [sys.platform, platform.machine()],
        }
    )
    environment = folder / f"env-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
    python = environment / "bin" / "python"
    # The interpreter is a link to this one's, which may have been removed since.
    if _is_complete(environment) and python.exists():
        return python
    with _locked(folder / f"{environment.name}.lock", progress) as lock:
        if _is_complete(environment) and python.exists():
            return python
        # An environment knows its own path, so it is built where it stays: the marker says that
        # it is whole.
        _remove(environment)
        progress("creating an environment for vLLM")
        command = [sys.executable, "-m", "venv", str(environment)]
        _run(command, "python -m venv failed", lock=lock)
        words = shlex.split(torch)
        progress(f"installing {words[0]}")
        _pip(python, ["install", *words], f"cannot install {words[0]}", lock=lock)
        what = "cannot install what vLLM imports"
        progress(f"installing {len(PACKAGES)} packages that vLLM imports")
        _pip(python, ["install", *PACKAGES], what, lock=lock)
        progress(f"installing {len(PACKAGES_ALONE)} more without their dependencies")
        _pip(python, ["install", "--no-deps", *PACKAGES_ALONE], what, lock=lock)
        (environment / MARKER).write_text(about + "\n", encoding="utf-8")
    return python


def _download(release: str, target: Path, python: Path, progress: Progress, *, lock: int) -> None:
    """Puts the Python files of a release in place; call it with the release locked."""
    partial = target.with_name(f".{release}.partial")
    # What an interrupted set-up left.
    _remove(partial)
    _remove(target)
    partial.mkdir(parents=True)
    progress(f"downloading vLLM {release} (some 300 MB)")
    wheels = partial / "wheel"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(wheels)]
    try:
        _pip(
            python,
            ["download", *options, *WHEEL_TAGS, f"vllm=={release}"],
            f"cannot download vLLM {release}",
            release=release,
            lock=lock,
        )
        found = list(wheels.glob("*.whl"))
        if len(found) != 1:
            raise SetupError(f"cannot download vLLM {release}: pip left {len(found)} wheels, not 1")
        progress(f"unpacking vLLM {release}")
        whole = partial / "unpacked"
        unpack(found[0], whole)
        if not (whole / SCHEDULER).is_file():
            raise SetupError(f"vLLM {release} has no {SCHEDULER}, so it cannot be measured")
        (whole / MARKER).write_text(f"{found[0].name}\n", encoding="utf-8")
        whole.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_wanted(member: str) -> bool:
    """Whether the member of a wheel is among those that running the scheduler takes."""
    name = member.rpartition("/")[2]
    return name.endswith((".py", ".json")) or name in {"METADATA", "entry_points.txt"}


def unpack(wheel: Path, folder: Path) -> None:
    """Extracts a wheel's wanted members.

    Raises:
        SetupError: It is no wheel, or a member's path leads out of the folder.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if not is_wanted(member):
                    continue
                path = PurePosixPath(member)
                # The second is for a name that only Windows takes for an absolute one.
                if path.is_absolute() or ".." in path.parts or PureWindowsPath(member).anchor:
                    raise SetupError(f"{wheel.name} is not to be trusted: it contains {member!r}")
                archive.extract(member, folder)
    except zipfile.BadZipFile as error:
        raise SetupError(f"{wheel.name} is damaged ({error}); try again") from error


def _run(command: Sequence[str], what: str, *, lock: int) -> None:
    # Nothing of this process's packages may pass for the environment's own.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(  # noqa: S603 - no shell, and no part from outside but a release's name
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=variables,
        pass_fds=(lock,),
    )
    if done.returncode:
        raise SetupError(f"{what}: {last_words(done.stdout) or f'status {done.returncode}'}")


def _pip(
    python: Path, arguments: Sequence[str], what: str, *, release: str | None = None, lock: int
) -> None:
    try:
        _run([str(python), "-m", "pip", *arguments, *PIP_OPTIONS], what, lock=lock)
    except SetupError as error:
        if release is not None and (known := re.search(r"\(from versions: (.*)\)", str(error))):
            if known[1] != "none":
                newest = known[1].rpartition(", ")[2]
                raise SetupError(f"there is no vLLM {release}; the newest is {newest}") from error
            raise SetupError(
                f"{what}: pip finds no vLLM at all; is its package index within reach?"
            ) from error
        raise SetupError(f"{error}; to try again, run the same command") from error


def last_words(output: str) -> str:
    """The line of a failed command's output that says most: its last error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    # Of pip's two lines on a requirement that it cannot meet, the first says more.
    telling = [line for line in errors if not line.startswith("ERROR: No matching distribution")]
    return (telling or errors or lines or [""])[-1].removeprefix("ERROR: ")
