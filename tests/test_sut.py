"""Schedulers in other processes, most of them misbehaving."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from mustfit_checks.protocol import ProtocolError
from mustfit_checks.sut import InProcess, Limits, ProcessSut, SutError
from mustfit_spec import Config, NewRequest, Operation, Profile, Scenario, StepTrace, Trace

#: A scheduler that answers well, in pieces that the misbehaving ones put together differently.
PRELUDE = """
import json, os, signal, subprocess, sys, time

ACCOUNTING = ["num_free_blocks", "num_cached_tokens", "num_blocks", "finish_reasons"]

IDENTITY = [*ACCOUNTING, "block_ids", "free_block_ids", "cached_block_ids"]

def step(fields):
    made = {"num_scheduled_tokens": {}, "preempted": [], "finished": [], "running": [],
            "waiting": []}
    for field in fields:
        ids = field in ("free_block_ids", "cached_block_ids")
        made[field] = 0 if field == "num_free_blocks" else [] if ids else {}
    return made

def answer(line, fields=IDENTITY, **changes):
    scenario = json.loads(line)
    steps = sum(operation["op"] == "step" for operation in scenario["operations"])
    trace = {"scenario_id": scenario["scenario_id"], "steps": [step(fields)] * steps}
    return json.dumps(trace | changes)

def say(text):
    print(text, flush=True)
"""

LIMITS = Limits(timeout=5.0, start_timeout=20.0, exit_timeout=0.3, kill_grace=0.3)
HASTY = attrs.evolve(LIMITS, timeout=0.4, start_timeout=1.0)


def scenario(name: str, *, steps: int = 2, padding: int = 1) -> Scenario:
    return Scenario(
        scenario_id=name,
        config=Config(
            num_gpu_blocks=4,
            block_size=2,
            max_model_len=8,
            max_num_seqs=1,
            max_num_batched_tokens=8,
        ),
        requests=(
            NewRequest(
                request_id="a", prompt_token_ids=tuple(range(padding)), sampled_token_ids=(1,)
            ),
        ),
        operations=(Operation(op="add", request_id="a"), *[Operation(op="step")] * steps),
    )


def scenarios(count: int, *, padding: int = 1) -> Iterator[Scenario]:
    for index in range(count):
        yield scenario(f"s{index}", padding=padding)


def sut(script: str, *, limits: Limits = LIMITS, profile: Profile = "identity") -> ProcessSut:
    return ProcessSut(
        [sys.executable, "-S", "-c", PRELUDE + script], profile=profile, name="it", limits=limits
    )


def failure(under_test: ProcessSut, count: int = 3) -> tuple[SutError, list[str]]:
    """How it fails, and whom it answered before."""
    answered: list[Trace] = []
    with under_test, pytest.raises(SutError) as caught:
        # extend() keeps what came before an exception.
        answered.extend(under_test.traces(scenarios(count)))
    assert str(caught.value).isprintable()
    return caught.value, [trace.scenario_id for trace in answered]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test may leave a thread, a file descriptor, or a process that nobody waited for."""
    fds, threads = open_fds(), threading.active_count()
    yield
    assert open_fds() == fds
    assert threading.active_count() == threads
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def open_fds() -> set[int]:
    found = set()
    for fd in range(256):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found.add(fd)
    return found


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process, not a child of this one, is gone or about to be taken away."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.01)
    return False


GOOD = """
for line in sys.stdin:
    say(answer(line))
"""


# --- Those that do their part ---------------------------------------------------------------------


def test_every_scenario_is_answered_in_order() -> None:
    with sut(GOOD) as it:
        assert [t.scenario_id for t in it.traces(scenarios(200))] == [f"s{i}" for i in range(200)]
        # And again, in another process.
        assert [t.scenario_id for t in it.traces(scenarios(2))] == ["s0", "s1"]


def test_no_scenarios() -> None:
    with sut(GOOD) as it:
        assert list(it.traces(())) == []


def test_in_process() -> None:
    def answer(one: Scenario) -> Trace:
        step = StepTrace(num_scheduled_tokens={}, preempted=(), finished=(), running=(), waiting=())
        return Trace(scenario_id=one.scenario_id, steps=(step,) * one.num_steps)

    with InProcess(answer, name="here") as it:
        assert it.name == "here"
        assert [t.scenario_id for t in it.traces(scenarios(2))] == ["s0", "s1"]
        assert it.ask(scenario("x")).scenario_id == "x"


def test_a_string_is_split_without_a_shell() -> None:
    it = ProcessSut("prog 'a b' $HOME ; x", profile="decisions")
    assert it.command == ("prog", "a b", "$HOME", ";", "x")
    assert it.name == "prog 'a b' '$HOME' ';' x"


def test_environment_is_added_to_ours() -> None:
    script = """
for line in sys.stdin:
    assert os.environ["PATH"]
    say(answer(line, release=os.environ["EXTRA"]))
"""
    it = ProcessSut(
        [sys.executable, "-c", PRELUDE + script], profile="decisions", env={"EXTRA": "0.33.0"}
    )
    with it:
        assert it.ask(scenario("a")).release == "0.33.0"


@pytest.fixture(params=["large pipes", "small pipes"])
def pipes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pipes are all that some systems have."""
    if request.param == "small pipes":
        monkeypatch.setattr("mustfit_checks.sut._SET_PIPE_SIZE", None)


@pytest.mark.usefixtures("pipes")
def test_large_lines_both_ways_with_everything_blocked() -> None:
    # It writes much more than a pipe holds before it reads any more.
    script = """
for line in sys.stdin:
    sys.stderr.write("x" * 300_000 + "\\n")
    say(answer(line, release="x" * 3_000_000))
"""
    with sut(script) as it:
        traces = list(it.traces(scenarios(6, padding=300_000)))
    assert [len(str(t.release)) for t in traces] == [3_000_000] * 6


def test_a_large_line_and_small_ones_at_once() -> None:
    script = """
import itertools
while lines := list(itertools.islice(sys.stdin, 4)):
    say("\\n".join(answer(line, release="x" * (700_000 - 200_000 * i))
        for i, line in enumerate(lines)))
"""
    with sut(script) as it:
        traces = list(it.traces(scenarios(8)))
    assert [len(str(t.release)) for t in traces] == [700_000, 500_000, 300_000, 100_000] * 2


def test_it_may_answer_before_it_reads() -> None:
    script = """
for name in "s0", "s1", "s2":
    say(answer(json.dumps({"scenario_id": name, "operations": [{"op": "step"}] * 2})))
time.sleep(60)
"""
    with sut(script, limits=attrs.evolve(LIMITS, window_bytes=1 << 30)) as it:
        assert len(list(it.traces(scenarios(3, padding=1_000_000)))) == 3


def test_it_is_fed_while_its_answers_are_here(tmp_path: Path) -> None:
    script = """
say(answer(input()) + "\\n" + answer(input()))
third = input()
open(%r, "w").close()
say(answer(third))
"""
    seen = tmp_path / "seen"
    with sut(script % str(seen), limits=attrs.evolve(LIMITS, window=2)) as it:
        traces = it.traces(scenarios(3))
        next(traces)
        next(traces)
        deadline = time.monotonic() + 5
        while not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen.exists()
        assert len(list(traces)) == 1


def test_it_may_read_many_scenarios_before_it_answers() -> None:
    script = """
import itertools
while lines := list(itertools.islice(sys.stdin, 32)):
    for line in lines:
        say(answer(line))
"""
    with sut(script) as it:
        assert len(list(it.traces(scenarios(64)))) == 64


def test_no_more_than_the_window_is_sent_ahead() -> None:
    taken: list[str] = []

    def watched() -> Iterator[Scenario]:
        for one in scenarios(50):
            taken.append(one.scenario_id)
            yield one

    with sut(GOOD, limits=attrs.evolve(LIMITS, window=4)) as it:
        for index, _ in enumerate(it.traces(watched())):
            assert len(taken) <= index + 4


def test_the_window_counts_bytes_too() -> None:
    taken: list[str] = []

    def watched() -> Iterator[Scenario]:
        for one in scenarios(10, padding=10_000):
            taken.append(one.scenario_id)
            yield one

    with sut(GOOD, limits=attrs.evolve(LIMITS, window_bytes=1)) as it:
        for index, _ in enumerate(it.traces(watched())):
            assert len(taken) == index + 1


def test_it_works_while_its_answers_are_judged() -> None:
    script = """
for line in sys.stdin:
    time.sleep(0.05)
    say(answer(line))
"""
    with sut(script) as it:
        traces = it.traces(scenarios(12))
        next(traces)
        begin = time.monotonic()
        for _ in traces:
            time.sleep(0.05)
        assert time.monotonic() - begin < 11 * 0.05 * 1.7


def test_answers_before_a_bad_scenario_are_given_first() -> None:
    def some() -> Iterator[Scenario]:
        yield from scenarios(3)
        raise ProtocolError("bad line")

    answered: list[Trace] = []
    with sut(GOOD) as it, pytest.raises(ProtocolError, match="bad line"):
        answered.extend(it.traces(some()))
    assert [trace.scenario_id for trace in answered] == ["s0", "s1", "s2"]


def test_ask_keeps_its_process() -> None:
    script = """
for line in sys.stdin:
    say(answer(line, release=str(os.getpid())))
"""
    with sut(script) as it:
        first = it.ask(scenario("a"))
        assert it.ask(scenario("b")).release == first.release


def test_ask_starts_again_after_a_failure() -> None:
    script = """
for line in sys.stdin:
    if "boom" in line:
        sys.exit(3)
    say(answer(line))
"""
    with sut(script) as it:
        it.ask(scenario("a"))
        with pytest.raises(SutError) as caught:
            it.ask(scenario("boom"))
        assert caught.value.kind == "exited"
        assert caught.value.scenario == scenario("boom")
        assert it.ask(scenario("c")).scenario_id == "c"


def test_an_exit_status_after_all_answers_is_no_error() -> None:
    with sut(GOOD + "sys.exit(3)") as it:
        assert len(list(it.traces(scenarios(3)))) == 3


def test_not_exiting_after_all_answers_is_no_error() -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GOOD + "time.sleep(60)"
    begin = time.monotonic()
    with sut(script) as it:
        assert len(list(it.traces(scenarios(3)))) == 3
    assert time.monotonic() - begin < 5


def test_an_error_of_the_scheduler_is_an_answer() -> None:
    script = """
for line in sys.stdin:
    say(answer(line, steps=[], error={"step": 0, "kind": "AssertionError", "message": "x"}))
"""
    with sut(script) as it:
        error = it.ask(scenario("a")).error
    assert error is not None
    assert error.kind == "AssertionError"


# --- Those that don't -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["no-such-program-anywhere x", ["/"], "", [], "a 'b", ["a\0b"], [__file__]]
)
def test_not_found(command: str | list[str]) -> None:
    with pytest.raises(SutError) as caught:
        list(ProcessSut(command, profile="decisions").traces(scenarios(1)))
    assert caught.value.kind == "not-found"
    assert caught.value.scenario is None


def test_not_started_before_it_is_asked() -> None:
    ProcessSut("no-such-program-anywhere", profile="decisions").traces(scenarios(1))


def test_exits_at_once_with_a_traceback() -> None:
    error, answered = failure(sut("import no_such_module"))
    assert (error.kind, answered) == ("exited", [])
    assert error.scenario == scenario("s0")
    assert "exited with status 1, without an answer" in str(error)
    assert "scenario 's0'" in str(error)
    assert "stderr: ModuleNotFoundError: No module named 'no_such_module'" in str(error)
    assert error.scenario is not None
    assert "Traceback" in error.stderr


def test_exits_midway() -> None:
    error, answered = failure(sut("say(answer(input())); say(answer(input())); sys.exit(0)"), 9)
    assert (error.kind, answered) == ("exited", ["s0", "s1"])
    assert error.scenario == scenario("s2")
    assert "exited with status 0" in str(error)


def test_is_killed() -> None:
    error, answered = failure(sut("say(answer(input())); os.kill(os.getpid(), signal.SIGKILL)"))
    assert (error.kind, answered) == ("exited", ["s0"])
    assert "was ended by SIGKILL" in str(error)


def test_exits_without_an_answer_to_nothing() -> None:
    with sut("sys.exit(2)") as it, pytest.raises(SutError) as caught:
        list(it.traces(()))
    assert caught.value.kind == "exited"


def test_closes_stdout_and_stays() -> None:
    error, answered = failure(sut("say(answer(input())); os.close(1); time.sleep(60)"))
    assert (error.kind, answered) == ("exited", ["s0"])
    assert "closed its output" in str(error)


def test_closes_stdin_and_answers_what_it_read() -> None:
    script = "a, b = input(), input(); os.close(0); say(answer(a)); say(answer(b))"
    error, answered = failure(sut(script), 2000)
    assert (error.kind, answered) == ("exited", ["s0", "s1"])


def test_a_child_keeps_the_pipe_open_when_it_exits() -> None:
    script = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
say(answer(input(), release=str(child.pid)))
os._exit(0)
"""
    answered: list[Trace] = []
    begin = time.monotonic()
    with sut(script) as it, pytest.raises(SutError) as caught:
        answered.extend(it.traces(scenarios(3)))
    assert caught.value.kind == "exited"
    assert len(answered) == 1
    assert gone(int(str(answered[0].release)))
    assert time.monotonic() - begin < 4


def test_a_child_keeps_the_pipe_open_after_all_answers() -> None:
    script = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
for line in sys.stdin:
    say(answer(line, release=str(child.pid)))
"""
    with sut(script, limits=attrs.evolve(LIMITS, exit_timeout=30.0)) as it:
        begin = time.monotonic()
        pids = {int(str(t.release)) for t in it.traces(scenarios(3))}
        assert time.monotonic() - begin < 5
    assert all(gone(pid) for pid in pids)


def test_children_are_killed_even_if_they_ignore_sigterm() -> None:
    script = """
ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); print('.', flush=True); "
child = subprocess.Popen([sys.executable, "-S", "-c", ignore + "time.sleep(60)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(answer(input(), release=str(child.pid)))
time.sleep(60)
"""
    with sut(script) as it:
        pid = int(str(it.ask(scenario("a")).release))
    assert gone(pid)


def test_children_are_asked_to_end_before_they_are_killed(tmp_path: Path) -> None:
    script = """
code = "import signal, sys, time; " \\
    "signal.signal(15, lambda *_: (open(%r, 'w').close(), sys.exit())); " \\
    "print('.', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
say(answer(input()))
time.sleep(60)
"""
    ended = tmp_path / "ended"
    with sut(script % str(ended), limits=attrs.evolve(LIMITS, kill_grace=5.0)) as it:
        it.ask(scenario("a"))
    assert ended.exists()


def test_hangs() -> None:
    begin = time.monotonic()
    error, answered = failure(sut("say(answer(input())); time.sleep(60)", limits=HASTY))
    assert (error.kind, answered) == ("hung", ["s0"])
    assert "no answer within 0.4 s" in str(error)
    assert time.monotonic() - begin < 3


def test_the_first_answer_has_time_to_start() -> None:
    with sut("time.sleep(0.8)\n" + GOOD, limits=attrs.evolve(HASTY, start_timeout=20.0)) as it:
        assert len(list(it.traces(scenarios(2)))) == 2
    error, answered = failure(sut("time.sleep(60)", limits=HASTY))
    assert (error.kind, answered) == ("hung", [])
    assert "within 1 s" in str(error)


@pytest.mark.usefixtures("pipes")
def test_never_reads_stdin() -> None:
    with sut("time.sleep(60)", limits=HASTY) as it, pytest.raises(SutError) as caught:
        list(it.traces(scenarios(3, padding=2_000_000)))
    assert caught.value.kind == "hung"


def test_drips() -> None:
    script = """
line = answer(input())
for c in line:
    sys.stdout.write(c); sys.stdout.flush(); time.sleep(0.05)
"""
    begin = time.monotonic()
    error, _ = failure(sut(script, limits=HASTY))
    assert error.kind == "hung"
    assert "bytes of a line without its end" in str(error)
    assert time.monotonic() - begin < 3


def test_floods_stderr_and_hangs() -> None:
    script = "while True: sys.stderr.write('flood ' * 1000 + '\\n')"
    error, _ = failure(sut(script, limits=HASTY))
    assert error.kind == "hung"
    assert len(error.stderr) <= 1 << 16
    assert "stderr: flood" in str(error)
    assert len(str(error)) < 10_000


def test_stderr_cannot_act_on_a_terminal() -> None:
    script = (
        "sys.stderr.write('\\r\\x1b[31m \\x07\\x1b]0;title\\x07' + 'x' * 500 + '\\n \\x1b[0m \\n')"
    )
    error, _ = failure(sut(script))
    said = str(error).partition("; the end of its stderr: ")[2].partition("; to repeat")[0]
    assert said == "x" * 200 + "…"


def test_a_gigabyte_without_a_line_end() -> None:
    script = """
chunk = b"x" * (1 << 20)
for _ in range(1024):
    os.write(1, chunk)
"""
    begin = time.monotonic()
    limits = attrs.evolve(LIMITS, line_bytes=8 << 20)
    error, _ = failure(sut(script, limits=limits))
    assert error.kind == "too-long"
    assert "8388608 bytes" in str(error)
    assert time.monotonic() - begin < 3


def test_a_line_that_is_a_byte_too_long() -> None:
    script = """
for line in sys.stdin:
    say("{:<2000}".format(answer(line)) + ("x" if "s1" in line else ""))
"""
    error, answered = failure(sut(script, limits=attrs.evolve(LIMITS, line_bytes=2000)))
    assert (error.kind, answered) == ("too-long", ["s0"])


def test_half_a_line() -> None:
    script = "say(answer(input())); sys.stdout.write(answer(input()))"
    error, answered = failure(sut(script))
    assert (error.kind, answered) == ("half-a-line", ["s0"])
    assert "exited with status 0 in the middle of a line" in str(error)


def test_all_of_stderr_is_read_before_its_last_line_is_told() -> None:
    script = """
say(answer(input()))
sys.stderr.write("x" * 900_000 + "\\nlast words\\n")
sys.stderr.flush()
say("nonsense")
time.sleep(60)
"""
    with sut(script) as it:
        traces = it.traces(scenarios(2))
        next(traces)
        time.sleep(0.3)
        with pytest.raises(SutError, match=r"end of its stderr: last words$") as caught:
            next(traces)
    assert caught.value.kind == "not-json"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('b"INFO: ready"', "not-json", "not JSON"),
        ('b""', "not-json", "not JSON"),
        ('b"{\\"scenario_id\\": NaN}"', "bad-trace", "NaN"),
        ('b"\\xff\\xfe"', "not-utf8", "0xff"),
        ('b"[]"', "bad-trace", "expected an object"),
        ('b"[" * 100000', "bad-trace", "too deeply"),
        ('answer(line, scenario_id="other").encode()', "wrong-id", "answered 'other' instead"),
        (
            "answer(line, scenario_id=7).encode()",
            "bad-trace",
            r"\$\.scenario_id: expected a string",
        ),
        ("answer(line, step=7).encode()", "bad-trace", r'\$\.step: unknown field "step"'),
        ("answer(line, steps=[]).encode()", "wrong-number-of-steps", "gave 0 of 2 steps"),
        (
            'answer(line, error={"step": 1}).encode()',
            "wrong-number-of-steps",
            "2 steps and an error in step 1",
        ),
        (
            'answer(line, error={"step": 2}).encode()',
            "wrong-number-of-steps",
            "2 steps and an error in step 2",
        ),
        (
            "answer(line, steps=[step(ACCOUNTING), step(IDENTITY)]).encode()",
            "incomplete-profile",
            "reports no block_ids.*enough for --profile accounting",
        ),
        (
            'answer(line, ["num_free_blocks"]).encode()',
            "incomplete-profile",
            "no num_cached_tokens, which the profile identity.*for --profile decisions",
        ),
        (
            'answer(line, [*ACCOUNTING, "free_block_ids"]).encode()',
            "incomplete-profile",
            "reports no block_ids.*enough for --profile accounting",
        ),
    ],
)
def test_nonsense_after_a_valid_answer(text: str, kind: str, says: str) -> None:
    script = f"""
say(answer(input()))
line = input()
os.write(1, {text} + b"\\n")
say(answer(input()))
time.sleep(60)
"""
    error, answered = failure(sut(script))
    assert (error.kind, answered) == (kind, ["s0"])
    assert error.scenario == scenario("s1")
    assert re.search(says, str(error))


def test_a_weaker_profile_is_enough_if_it_is_asked_for() -> None:
    script = "for line in sys.stdin: say(answer(line, []))"
    with sut(script, profile="decisions") as it:
        assert len(list(it.traces(scenarios(2)))) == 2
    error, _ = failure(sut(script, profile="accounting"))
    assert error.kind == "incomplete-profile"


@pytest.mark.parametrize(
    "more", ["say(answer(line))", "say('')", "say('bye')", "os.write(1, b'x')"]
)
def test_too_many_lines(more: str) -> None:
    error, answered = failure(sut(GOOD + more + "\ntime.sleep(60)"))
    assert (error.kind, answered) == ("too-many-lines", ["s0", "s1", "s2"])


def test_two_answers_to_one_question() -> None:
    error, answered = failure(sut("for line in sys.stdin: say(answer(line)); say(answer(line))"))
    assert (error.kind, answered) == ("wrong-id", ["s0"])


def test_answers_before_it_reads_and_floods() -> None:
    script = """
line = input()
while True:
    say(answer(line))
"""
    error, answered = failure(sut(script))
    assert (error.kind, answered) == ("wrong-id", ["s0"])


# --- Interruption ---------------------------------------------------------------------------------


def test_close_in_the_middle() -> None:
    it = sut(GOOD)
    traces = it.traces(scenarios(100))
    next(traces)
    it.close()
    it.close()
    del traces


def test_an_iterator_that_is_dropped_ends_its_process() -> None:
    it = sut(GOOD)
    traces = it.traces(scenarios(100))
    next(traces)
    del traces
    # nothing_left looks


def test_keyboard_interrupt() -> None:
    it = sut("time.sleep(60)")
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with it, pytest.raises(KeyboardInterrupt):
        list(it.traces(scenarios(3)))
    timer.join()
    assert time.monotonic() - begin < 3
