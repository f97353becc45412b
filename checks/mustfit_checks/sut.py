"""Schedulers under test: something that answers scenarios with traces.

A scheduler in another process reads scenarios on stdin and writes traces on stdout, a line of JSON
each. It is not trusted to do so: it may crash, hang, flood, or answer nonsense, and each of these
ends in a ``SutError`` that says which, never in a hang or a full memory here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Literal, Protocol, Self

import attrs

from mustfit_checks.protocol import ProtocolError, ProtocolErrorKind, decode_trace, encode
from mustfit_spec import PROFILE_FIELDS, Profile, Scenario, Trace, fields_of

SutErrorKind = Literal[
    "not-found",
    "exited",
    "hung",
    "half-a-line",
    "not-json",
    "not-utf8",
    "wrong-id",
    "too-many-lines",
    "too-long",
    "bad-trace",
    "wrong-number-of-steps",
    "incomplete-profile",
]

_KIND_OF_PROTOCOL_ERROR: Mapping[ProtocolErrorKind, SutErrorKind] = {
    "not-utf8": "not-utf8",
    "not-json": "not-json",
    "invalid": "bad-trace",
}

_MEBIBYTE = 1 << 20
#: Bytes that one read takes at most.
_READ_SIZE = 1 << 18
#: Bytes of stderr that are kept.
_STDERR_KEPT = 1 << 16
#: Characters of stderr's last line that a message repeats.
_STDERR_SHOWN = 200
#: Seconds between two looks at whether the process still runs.
_POLL_INTERVAL = 0.05
#: Seconds that a process has to exit once it has closed its output, to learn its exit status.
_EXIT_STATUS_WAIT = 1.0
#: Linux's F_SETPIPE_SZ: more answers fit in the pipe while nobody reads.
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", None)


class SutError(Exception):
    """The scheduler under test did not do its part. Its text is one line.

    Attributes:
        kind: What it did.
        scenario: The scenario whose answer was due, if one was.
        stderr: The end of what it wrote to stderr.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: SutErrorKind,
        scenario: Scenario | None = None,
        stderr: str = "",
    ) -> None:
        self.kind = kind
        self.scenario = scenario
        self.stderr = stderr
        super().__init__(message)


class Sut(Protocol):
    """Something that answers scenarios with traces.

    Attributes:
        name: What to call it in results.
    """

    name: str

    def traces(self, scenarios: Iterable[Scenario]) -> Iterator[Trace]:
        """One trace for each scenario, in order.

        Raises:
            SutError: It failed. What it answered before has been given by then.
        """
        ...

    def ask(self, scenario: Scenario) -> Trace:
        """The trace of one scenario, for callers whose next question depends on the answer.

        Raises:
            SutError: It failed.
        """
        ...

    def close(self) -> None:
        """Ends whatever was started. The object can be used again."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class InProcess(Sut):
    """A scheduler that is a function of this process; its exceptions are not caught.

    Args:
        answer: Gives the trace of a scenario.
        name: What to call it in results.
    """

    def __init__(self, answer: Callable[[Scenario], Trace], *, name: str) -> None:
        self.name = name
        self._answer = answer

    def traces(self, scenarios: Iterable[Scenario]) -> Iterator[Trace]:
        """One trace for each scenario, in order; each is made when it is asked for."""
        return map(self._answer, scenarios)

    def ask(self, scenario: Scenario) -> Trace:
        """The trace of one scenario."""
        return self._answer(scenario)

    def close(self) -> None:
        """Does nothing."""


@attrs.frozen(kw_only=True)
class Limits:
    """What a scheduler in another process may take.

    Attributes:
        timeout: Seconds for each answer, from when it is waited for to the end of its line.
        start_timeout: The same for the first answer of a process, which has to start.
        exit_timeout: Seconds to exit after stdin has been closed, until it is made to.
        kill_grace: Seconds between SIGTERM and SIGKILL.
        line_bytes: Longest line of an answer, in bytes.
        window: Most scenarios that are sent ahead of their answers.
        window_bytes: Most bytes that are sent ahead, though one scenario always is.
    """

    timeout: float = 60.0
    start_timeout: float = 300.0
    exit_timeout: float = 10.0
    kill_grace: float = 2.0
    line_bytes: int = 64 * _MEBIBYTE
    window: int = 32
    window_bytes: int = _MEBIBYTE


class ProcessSut(Sut):
    """A scheduler in a process of its own: scenarios on its stdin, traces on its stdout.

    ``traces`` runs a process for itself, and checks at the end that there is nothing more to read.
    ``ask`` keeps its process for the next question. Scenarios are sent ahead, so that the process
    works while its answers are judged. Nothing is left running by ``close``: a process gets a group
    of its own, and the whole group is ended.

    Args:
        command: The program and its arguments; a string is split as a shell would, but no shell
            runs it.
        profile: What every trace has to report.
        name: What to call it in results; by default, the command.
        env: Environment variables to set on top of this process's own.
        limits: What it may take.

    Raises:
        SutError: The command is empty, or a quotation in it doesn't end (``not-found``).
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        profile: Profile,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.command = _split(command)
        self.name = shlex.join(self.command) if name is None else name
        self.profile: Profile = profile
        self.env = dict(env or {})
        self.limits = limits or Limits()
        self._open: set[_Conversation] = set()
        self._kept: _Conversation | None = None

    def traces(self, scenarios: Iterable[Scenario]) -> Iterator[Trace]:
        """One trace for each scenario, in order.

        The process is started when the first trace is asked for. Scenarios are taken from the
        iterable ahead of the answers; what it raises is raised after the answers to those before.

        Raises:
            SutError: It failed. What it answered before has been given by then.
        """
        conversation = self._start()
        try:
            yield from conversation.run(scenarios)
        finally:
            self._stop(conversation)

    def ask(self, scenario: Scenario) -> Trace:
        """The trace of one scenario, from a process that is kept for the next.

        Raises:
            SutError: It failed. The next question starts another process.
        """
        if self._kept is None:
            self._kept = self._start()
        conversation = self._kept
        try:
            conversation.send(scenario)
            return conversation.receive()
        except BaseException:
            self._stop(conversation)
            raise

    def close(self) -> None:
        """Ends every process that was started, and all in their groups."""
        for conversation in tuple(self._open):
            self._stop(conversation)

    def _start(self) -> _Conversation:
        conversation = _Conversation(self)
        self._open.add(conversation)
        return conversation

    def _stop(self, conversation: _Conversation) -> None:
        self._open.discard(conversation)
        if self._kept is conversation:
            self._kept = None
        conversation.stop()


def _split(command: str | Sequence[str]) -> tuple[str, ...]:
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise SutError(
            f"the command {command!r} cannot be split into words: {error}", kind="not-found"
        ) from None
    if not words or not words[0]:
        raise SutError("the command is empty: name a program", kind="not-found")
    return tuple(words)


# --- One process ----------------------------------------------------------------------------------


class _Conversation:
    """One process, and what has been said so far.

    All reading and writing is done here, in the thread that waits for an answer, whenever it waits:
    with whatever pipe is ready, so that neither side can block the other for good. While nobody
    waits, the pipes themselves hold what is sent ahead and what comes back.
    """

    def __init__(self, sut: ProcessSut) -> None:
        self.sut = sut
        self.limits = sut.limits
        self.due: deque[tuple[Scenario, int]] = deque()
        self.due_bytes = 0
        self.answers = 0
        self.answered: Scenario | None = None
        self.to_send = bytearray()
        self.received = bytearray()
        #: Bytes at the front of ``received`` that are known to hold no line's end.
        self.searched = 0
        self.stderr = bytearray()
        self.group_ended = False
        self.process = self._spawn()
        self.selector = selectors.DefaultSelector()
        self.stdin = _pipe(self.process.stdin)
        self.stdout = _pipe(self.process.stdout)
        for pipe in (self.process.stdout, self.process.stderr):
            self.selector.register(_pipe(pipe), selectors.EVENT_READ)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = self.sut.command
        try:
            return subprocess.Popen(  # noqa: S603 - the user's own command
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, **self.sut.env},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SutError(
                f"{self.sut.name}: cannot start {command[0]!r}: {reason}", kind="not-found"
            ) from None

    # --- Questions and answers ----------------------------------------------------------------

    def run(self, scenarios: Iterable[Scenario]) -> Iterator[Trace]:
        """The answers to all the scenarios, and the end."""
        more = iter(scenarios)
        failure: Exception | None = None
        finished = False
        while True:
            try:
                while not finished and self._has_room():
                    self.send(next(more))
            except StopIteration:
                finished = True
            except Exception as error:  # noqa: BLE001 - raised below, after the answers before it
                failure, finished = error, True
            if not self.due:
                break
            yield self.receive()
        if failure is not None:
            raise failure
        self._end()

    def _has_room(self) -> bool:
        if not self.due:
            return True
        return len(self.due) < self.limits.window and self.due_bytes < self.limits.window_bytes

    def send(self, scenario: Scenario) -> None:
        """Puts a scenario in line to be sent."""
        line = encode(scenario) + b"\n"
        self.due.append((scenario, len(line)))
        self.due_bytes += len(line)
        self.to_send += line

    def receive(self) -> Trace:
        """The answer to the first scenario that has none."""
        line = self._line()
        scenario = self.due[0][0]
        trace = self._read(line, scenario)
        self._check(trace, scenario)
        self.due_bytes -= self.due.popleft()[1]
        self.answered = scenario
        self.answers += 1
        return trace

    def _read(self, line: bytes, scenario: Scenario) -> Trace:
        try:
            return decode_trace(line)
        except ProtocolError as error:
            kind = _KIND_OF_PROTOCOL_ERROR[error.kind]
            raise self._failed(kind, f"its answer is no trace: {error}", scenario) from None

    def _check(self, trace: Trace, scenario: Scenario) -> None:
        """What makes a trace the answer to this scenario."""
        if trace.scenario_id != scenario.scenario_id:
            what = f"answered {_shown(trace.scenario_id)} instead"
            raise self._failed("wrong-id", what, scenario)
        steps = len(trace.steps)
        if trace.error is None:
            if steps != scenario.num_steps:
                what = f"gave {steps} of {scenario.num_steps} steps, and no error"
                raise self._failed("wrong-number-of-steps", what, scenario)
        elif steps != trace.error.step or trace.error.step >= scenario.num_steps:
            what = (
                f"gave {steps} steps and an error in step {trace.error.step} (counted from 0) "
                f"of {scenario.num_steps}; the steps before the error are wanted"
            )
            raise self._failed("wrong-number-of-steps", what, scenario)
        self._check_profile(trace, scenario)

    def _check_profile(self, trace: Trace, scenario: Scenario) -> None:
        profile = self.sut.profile
        if all(step.has(profile) for step in trace.steps):
            return
        missing = next(
            field
            for field in fields_of(profile)
            if any(getattr(step, field) is None for step in trace.steps)
        )
        reported = [p for p in PROFILE_FIELDS if all(step.has(p) for step in trace.steps)][-1]
        what = (
            f"reports no {missing}, which the profile {profile} compares; "
            f"what it does report is enough for --profile {reported}"
        )
        raise self._failed("incomplete-profile", what, scenario)

    # --- Reading and writing ------------------------------------------------------------------

    def _line(self) -> bytes:
        """The next line of stdout, without its end."""
        limits = self.limits
        seconds = limits.timeout if self.answers else limits.start_timeout
        deadline = time.monotonic() + seconds
        # Even if the line is here already: what is ready to be sent may go out.
        self._exchange(0.0)
        while (end := self.received.find(b"\n", self.searched)) < 0:
            self.searched = len(self.received)
            if self.searched > limits.line_bytes:
                break
            if self._output_ended():
                raise self._ended()
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._hung(seconds)
            self._exchange(min(left, _POLL_INTERVAL))
        if not 0 <= end <= limits.line_bytes:
            what = f"its answer has more than {limits.line_bytes} bytes without the line's end"
            raise self._failed("too-long", what, self.due[0][0])
        line = bytes(self.received[:end])
        del self.received[: end + 1]
        self.searched = 0
        return line

    def _exchange(self, seconds: float) -> bool:
        """Waits for any pipe to be ready, for so long at most; whether stdout or stderr had more.

        Nothing is read from stdout while more than enough is here.
        """
        self._watch(self.stdin, bool(self.to_send), selectors.EVENT_WRITE)
        had_more = False
        for key, _ in self.selector.select(seconds):
            if key.fd == self.stdin:
                self._write()
            elif key.fd == self.stdout:
                if len(self.received) <= self.limits.line_bytes:
                    had_more |= self._read_into(self.received, self.stdout)
            else:
                had_more |= self._read_into(self.stderr, key.fd)
                del self.stderr[:-_STDERR_KEPT]
        return had_more

    def _watch(self, pipe: int, wanted: bool, event: int) -> None:  # noqa: FBT001
        if wanted and pipe not in self.selector.get_map():
            self.selector.register(pipe, event)
        elif not wanted and pipe in self.selector.get_map():
            self.selector.unregister(pipe)

    def _write(self) -> None:
        try:
            del self.to_send[: os.write(self.stdin, self.to_send[:_READ_SIZE])]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            # Nobody reads any more. There may be answers to what was read before.
            self.to_send.clear()

    def _read_into(self, buffer: bytearray, pipe: int) -> bool:
        try:
            chunk = os.read(pipe, _READ_SIZE)
        except BlockingIOError:
            return False
        if not chunk:
            self.selector.unregister(pipe)
        buffer += chunk
        return bool(chunk)

    def _output_ended(self) -> bool:
        """Whether no more can come: stdout is closed, or the process is gone and all is read.

        A child of the process may hold stdout open after it; that doesn't count.
        """
        if self.stdout not in self.selector.get_map():
            return True
        if self.process.poll() is None:
            return False
        before = len(self.received)
        self._exchange(0.0)
        return len(self.received) == before

    def _end(self) -> None:
        """Closes stdin after the last answer, and sees that no more comes."""
        self.to_send.clear()
        self._watch(self.stdin, wanted=False, event=selectors.EVENT_WRITE)
        _close(self.process.stdin)
        deadline = time.monotonic() + self.limits.exit_timeout
        while not self.received and time.monotonic() < deadline and not self._exited():
            self._exchange(_POLL_INTERVAL)
        if self.received:
            first = _shown(self.received[:_STDERR_SHOWN].decode(errors="replace").split("\n")[0])
            what = f"wrote more after the last answer: {first}"
            raise self._failed("too-many-lines", what, self.answered)
        if not self.answers and self.process.returncode:
            raise self._failed("exited", f"{self._status()}, without any answer", None)

    def _exited(self) -> bool:
        """Whether the process is gone, and what it wrote to stdout is read."""
        return self.process.poll() is not None and self._output_ended()

    # --- Failing ------------------------------------------------------------------------------

    def _ended(self) -> SutError:
        deadline = time.monotonic() + _EXIT_STATUS_WAIT
        while self.process.poll() is None and time.monotonic() < deadline:
            self._exchange(_POLL_INTERVAL)
        scenario = self.due[0][0]
        if self.received:
            what = f"{self._status()} in the middle of a line, after {len(self.received)} bytes"
            return self._failed("half-a-line", what, scenario)
        return self._failed("exited", f"{self._status()}, without an answer", scenario)

    def _hung(self, seconds: float) -> SutError:
        what = f"gave no answer within {seconds:g} s"
        if self.received:
            what += f", only {len(self.received)} bytes of a line without its end"
        what += (
            "; it has to flush each answer, and may not wait for more than "
            f"{len(self.due)} scenarios before it"
        )
        return self._failed("hung", what, self.due[0][0])

    def _status(self) -> str:
        code = self.process.poll()
        if code is None:
            return "closed its output"
        if code >= 0:
            return f"exited with status {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def _failed(self, kind: SutErrorKind, what: str, scenario: Scenario | None) -> SutError:
        """The error, with the end of stderr and how to repeat it."""
        # What is in the pipe already, but no more than that: it may be a flood.
        for _ in range(_STDERR_KEPT * 16 // _READ_SIZE):
            if not self._exchange(0.0):
                break
        stderr = self.stderr.decode(errors="replace")
        said = _last_line(stderr)
        parts = [
            f"{self.sut.name}: {what}",
            f" (scenario {_shown(scenario.scenario_id)}, after {self.answers} answers)"
            if scenario
            else "",
            f"; the end of its stderr: {said}" if said else "",
            "" if scenario else f"; to repeat: run {shlex.join(self.sut.command)}",
        ]
        return SutError(_printable("".join(parts)), kind=kind, scenario=scenario, stderr=stderr)

    # --- Ending -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the process and all in its group, and closes the pipes. May be called again."""
        try:
            self._end_group()
        finally:
            self.selector.close()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                _close(pipe)

    def _end_group(self) -> None:
        if self.group_ended:
            return
        try:
            if self._group_runs():
                self._signal(signal.SIGTERM)
                deadline = time.monotonic() + self.limits.kill_grace
                while self._group_runs() and time.monotonic() < deadline:
                    time.sleep(0.01)
        finally:
            # Also when the grace is cut short by a KeyboardInterrupt.
            if self._group_runs():
                self._signal(signal.SIGKILL)
            self.process.wait()
            self.group_ended = True

    def _group_runs(self) -> bool:
        """Whether the process, or another of its group, is there. As long, its id is not reused."""
        return self.process.poll() is None or self._signal(0)

    def _signal(self, number: int) -> bool:
        """Signals the group; whether there is one. macOS refuses for a group of zombies only."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _pipe(file: IO[bytes] | None) -> int:
    """A pipe's number, set up for reading and writing without waiting."""
    if file is None:  # pragma: no cover - Popen was asked for all three
        raise RuntimeError("not a pipe")
    number = file.fileno()
    os.set_blocking(number, False)
    if _SET_PIPE_SIZE is not None:
        # A larger one is a matter of speed only, and the system may refuse.
        with contextlib.suppress(OSError):
            fcntl.fcntl(number, _SET_PIPE_SIZE, _MEBIBYTE)
    return number


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        file.close()


_ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")


def _last_line(text: str) -> str:
    """The last line that says anything, cut to what fits in a message."""
    for line in reversed(_ESCAPE_SEQUENCE.sub("", text).splitlines()):
        if shown := _printable(line, other="").strip():
            return shown if len(shown) <= _STDERR_SHOWN else f"{shown[:_STDERR_SHOWN]}…"
    return ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= _STDERR_SHOWN else f"{text[:_STDERR_SHOWN]}…")


def _printable(text: str, *, other: str = "\ufffd") -> str:
    """The text without line breaks and other characters that act on a terminal."""
    return "".join(c if c.isprintable() else other for c in text)
