"""Verdicts, and the command line that gives them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

import mustfit_impl
from mustfit_checks.attribute import mutant_trace
from mustfit_checks.cli import main
from mustfit_checks.generate import scenario, scenarios
from mustfit_checks.judge import Judge, Verdict
from mustfit_checks.measured import UnknownRelease, measurements, newest_release, revision_for
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.protocol import decode_scenario, decode_trace, encode, json_schema
from mustfit_checks.sut import InProcess, Limits, SutError
from mustfit_checks.what import start, what
from mustfit_spec import REVISIONS, Scenario, Trace, TraceError, rules_of, run

REVISION = "0.33.0"
SPEC = REVISIONS[REVISION]


def right(drawn: Scenario) -> Trace:
    return run(drawn, SPEC(drawn.config))


def wrong(name: str, drawn: Scenario) -> Trace:
    return mutant_trace(drawn, MUTANTS[name], REVISION)


class Failing(InProcess):
    """Answers so many scenarios, then fails."""

    def __init__(
        self, answer: Callable[[Scenario], Trace], *, after: int, error: BaseException
    ) -> None:
        super().__init__(answer, name="failing")
        self.after = after
        self.error = error

    def traces(self, scenarios: Iterable[Scenario]) -> Iterator[Trace]:
        for index, drawn in enumerate(scenarios):
            if index == self.after:
                raise self.error
            yield self.ask(drawn)


def judged(sut: InProcess, count: int = 300, *, stop_after: int = 100) -> Verdict:
    judge = Judge(
        sut=sut, against=REVISION, revision=SPEC, profile="identity", stop_after=stop_after
    )
    return judge.judge(scenarios(seed=0, count=count))


def test_the_specification_is_conformant_with_itself() -> None:
    verdict = judged(InProcess(right, name="spec"))
    assert verdict.verdict == "conformant"
    assert verdict.reason is None
    assert verdict.scenarios == 300
    assert verdict.steps > 300
    assert verdict.divergences == ()
    assert set(verdict.rules) == set(rules_of(SPEC))


def test_rules_that_were_not_exercised_are_named() -> None:
    verdict = judged(InProcess(right, name="spec"), count=1)
    assert verdict.never_exercised
    assert all(verdict.rules[rule] == 0 for rule in verdict.never_exercised)


def test_two_faults_are_two_divergences() -> None:
    """A scheduler with one fault under FCFS and another under priority."""

    def two_faults(drawn: Scenario) -> Trace:
        fcfs = drawn.config.policy == "fcfs"
        return wrong("requeued-at-tail" if fcfs else "best-priority-first", drawn)

    verdict = judged(InProcess(two_faults, name="two"), count=600)
    assert {d.rule for d in verdict.divergences} == {"PREEMPT-REQUEUE", "PREEMPT-VICTIM"}
    for divergence in verdict.divergences:
        assert len(divergence.scenario.requests) <= 3
        assert divergence.observed == two_faults(divergence.scenario)


def test_a_fault_like_no_mutant_is_reported_by_what_differs() -> None:
    def off_by_one(drawn: Scenario) -> Trace:
        trace = right(drawn)
        steps = tuple(
            attrs.evolve(s, num_free_blocks=(s.num_free_blocks or 0) + bool(s.running))
            for s in trace.steps
        )
        return attrs.evolve(trace, steps=steps)

    verdict = judged(InProcess(off_by_one, name="odd"))
    assert [d.behaves_like for d in verdict.divergences] == [None]
    assert verdict.divergences[0].rule == "ALLOC-COUNT"
    assert verdict.divergences[0].difference.field == "num_free_blocks"


def test_judging_stops_after_enough_divergences() -> None:
    verdict = judged(InProcess(lambda s: wrong("oldest-first", s), name="m"), stop_after=3)
    assert verdict.diverged == 3
    assert verdict.reason is not None
    assert "3 divergent" in verdict.reason


@pytest.mark.parametrize(
    "error", [SutError("it crashed", kind="exited"), KeyboardInterrupt()], ids=["crash", "ctrl-c"]
)
def test_what_was_found_before_a_failure_is_not_lost(error: BaseException) -> None:
    undecided = judged(Failing(right, after=5, error=error))
    assert undecided.verdict == "undecided"
    assert undecided.scenarios == 5
    assert undecided.reason

    def faulty(drawn: Scenario) -> Trace:
        return wrong("admission-preempts", drawn)

    divergent = judged(Failing(faulty, after=5, error=error))
    assert divergent.verdict == "divergent"
    assert divergent.reason
    assert [d.behaves_like for d in divergent.divergences] == ["admission-preempts"]


def test_no_scenarios_decide_nothing() -> None:
    assert judged(InProcess(right, name="spec"), count=0).verdict == "undecided"


def test_scenarios_without_a_step_decide_nothing() -> None:
    no_steps = [attrs.evolve(s, operations=()) for s in scenarios(seed=0, count=3)]
    judge = Judge(
        sut=InProcess(right, name="spec"), against=REVISION, revision=SPEC, profile="identity"
    )
    verdict = judge.judge(no_steps)
    assert verdict.verdict == "undecided"
    assert "no step" in str(verdict.reason)


def failing_at(step: int, kind: str, message: str) -> Callable[[Scenario], Trace]:
    def answer(drawn: Scenario) -> Trace:
        trace = right(drawn)
        if len(trace.steps) <= step:
            return trace
        error = TraceError(step=step, kind=kind, message=message)
        return attrs.evolve(trace, steps=trace.steps[:step], error=error)

    return answer


def test_a_scheduler_that_fails_by_itself_breaks_no_rule_and_resembles_nobody() -> None:
    verdict = judged(InProcess(failing_at(1, "NameError", "x"), name="broken"), stop_after=20)
    assert [(d.rule, d.behaves_like) for d in verdict.divergences] == [(None, None)]
    assert verdict.divergences[0].difference.field == "error"
    assert verdict.divergences[0].scenario.num_steps == 2


def test_what_a_scheduler_does_not_support_decides_nothing() -> None:
    verdict = judged(InProcess(failing_at(0, "Unsupported", "no watermark here"), name="old"))
    assert verdict.verdict == "undecided"
    assert "no watermark here" in str(verdict.reason)
    assert "--against" in str(verdict.reason)


@pytest.mark.parametrize("any_release", [True, False])
def test_a_scheduler_that_claims_another_release_is_judged_by_it_only_if_told(
    any_release: bool,  # noqa: FBT001
) -> None:
    def claims(drawn: Scenario) -> Trace:
        return attrs.evolve(right(drawn), release="0.22.1")

    verdict = Judge(
        sut=InProcess(claims, name="old"),
        against=REVISION,
        revision=SPEC,
        profile="identity",
        any_release=any_release,
    ).judge(scenarios(seed=0, count=10))
    assert verdict.verdict == ("conformant" if any_release else "undecided")
    assert any_release or "--against 0.22.1" in str(verdict.reason)


def test_an_interrupt_while_cases_are_made_small_loses_none() -> None:
    asked = 0

    class Interrupted(InProcess):
        def ask(self, scenario: Scenario) -> Trace:
            nonlocal asked
            asked += 1
            if asked > 310:
                raise KeyboardInterrupt
            return super().ask(scenario)

        def traces(self, scenarios: Iterable[Scenario]) -> Iterator[Trace]:
            return map(self.ask, scenarios)

    verdict = judged(Interrupted(lambda s: wrong("oldest-first", s), name="m"), stop_after=1000)
    assert verdict.verdict == "divergent"
    assert [d.behaves_like for d in verdict.divergences] == ["oldest-first"]


def test_an_interrupt_while_causes_are_sought_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("mustfit_checks.judge.imitators", interrupted)
    verdict = judged(InProcess(lambda s: wrong("oldest-first", s), name="m"))
    assert verdict.verdict == "divergent"
    assert len(verdict.divergences) == 1


def test_a_scheduler_that_lets_go_while_cases_are_made_small_loses_none() -> None:
    class Gone(InProcess):
        def ask(self, scenario: Scenario) -> Trace:
            raise SutError("it has gone", kind="exited", scenario=scenario)

        def traces(self, scenarios: Iterable[Scenario]) -> Iterator[Trace]:
            return map(self._answer, scenarios)

    verdict = judged(Gone(lambda s: wrong("oldest-first", s), name="m"))
    assert [d.behaves_like for d in verdict.divergences] == ["oldest-first"]


# --- The command line -------------------------------------------------------------------------


def mustfit(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def run_judge(folder: Path, *args: str) -> tuple[int, dict[str, Any]]:
    result = mustfit("judge", "--json", "--cases", str(folder), *args)
    return result.exit_code, json.loads(result.stdout)


def driver(tmp_path: Path, body: str) -> str:
    """A scheduler under test in Python, as a command line."""
    script = tmp_path / "driver.py"
    script.write_text("import json, sys\n" + body, encoding="utf-8")
    return f"cmd:{shlex.join([sys.executable, str(script)])}"


SPEC_DRIVER = """
from mustfit_checks.protocol import decode_scenario, encode
from mustfit_spec import REVISIONS, run
for line in sys.stdin:
    scenario = decode_scenario(line)
    sys.stdout.write(encode(run(scenario, REVISIONS["0.33.0"](scenario.config))).decode() + "\\n")
    sys.stdout.flush()
"""


def test_conformant_exits_0(tmp_path: Path) -> None:
    code, verdict = run_judge(tmp_path, "--sut", "spec", "--scenarios", "50", "--seed", "3")
    assert code == 0
    assert verdict["verdict"] == "conformant"
    assert (verdict["sut"], verdict["seed"], verdict["scenarios"]) == ("spec", 3, 50)
    assert verdict["profile"] == "identity"
    assert verdict["against"] == newest_release()
    assert verdict["divergences"] == []


def test_without_a_name_the_implementation_is_judged(tmp_path: Path) -> None:
    code, verdict = run_judge(tmp_path, "--scenarios", "50")
    assert (code, verdict["sut"], verdict["verdict"]) == (0, "impl", "conformant")


@pytest.mark.parametrize("sut", ["impl", "impl:strides"])
def test_another_scheduler_may_say_what_is_right(sut: str) -> None:
    asked = what(sut, None, None)
    judge = Judge(
        sut=start(asked, profile="identity", source=None, limits=Limits(), progress=print),
        against="somebody",
        revision=SPEC,
        profile="identity",
        reference=InProcess(lambda s: wrong("oldest-first", s), name="m"),
    )
    verdict = judge.judge(scenarios(seed=0, count=100))
    assert verdict.verdict == "divergent"
    assert verdict.against == "somebody"
    case = verdict.divergences[0]
    assert case.expected == wrong("oldest-first", case.scenario)
    assert case.observed == mustfit_impl.run(case.scenario)


@pytest.mark.parametrize("sut", ["impl", "impl:strides"])
def test_a_fault_of_the_implementation_is_found(
    sut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mustfit_impl.Scheduler, "_victim", lambda _: 0)
    code, verdict = run_judge(tmp_path, "--sut", sut, "--scenarios", "100")
    assert code == 1
    assert "PREEMPT-VICTIM" in {found["rule"] for found in verdict["divergences"]}


def test_divergent_exits_1_and_saves_a_case_that_repeats_it(tmp_path: Path) -> None:
    sut = ("--sut", "mutant:oldest-first")
    code, verdict = run_judge(tmp_path, *sut, "--scenarios", "100")
    assert code == 1
    (divergence,) = verdict["divergences"]
    assert divergence["rule"] == "PREEMPT-VICTIM"
    assert divergence["behaves_like"] == "oldest-first"
    case = Path(divergence["case"])
    shown = decode_scenario(case.read_bytes().strip())
    assert decode_trace(case.with_suffix(".expected.json").read_bytes().strip()) == right(shown)
    observed = decode_trace(case.with_suffix(".observed.json").read_bytes().strip())
    assert observed == wrong("oldest-first", shown)

    again, repeated = run_judge(tmp_path, *sut, "--case", str(case))
    assert again == 1
    assert repeated["scenarios"] == 1
    assert repeated["divergences"][0]["case"] == str(case)
    fine, _ = run_judge(tmp_path, "--sut", "spec", "--case", str(case))
    assert fine == 0


def test_a_command_is_judged_at_decisions_unless_told(tmp_path: Path) -> None:
    sut = driver(tmp_path, SPEC_DRIVER)
    code, verdict = run_judge(tmp_path, "--sut", sut, "--scenarios", "30")
    assert (code, verdict["profile"]) == (0, "decisions")
    code, verdict = run_judge(tmp_path, "--sut", sut, "--scenarios", "30", "--profile", "identity")
    assert (code, verdict["profile"]) == (0, "identity")


def test_a_command_that_crashes_exits_2_with_one_line(tmp_path: Path) -> None:
    sut = driver(tmp_path, "sys.exit('out of luck')")
    code, verdict = run_judge(tmp_path, "--sut", sut, "--scenarios", "30")
    assert code == 2
    assert verdict["verdict"] == "undecided"
    assert "out of luck" in str(verdict["reason"])
    assert "\n" not in str(verdict["reason"])
    (saved,) = tmp_path.glob("undecided-*.jsonl")
    assert decode_scenario(saved.read_bytes().strip()) == scenario(seed=0, index=0)


def test_a_bad_line_after_a_divergence_does_not_lose_it(tmp_path: Path) -> None:
    _, verdict = run_judge(tmp_path, "--sut", "mutant:oldest-first", "--scenarios", "100")
    both = tmp_path / "both.jsonl"
    both.write_bytes(Path(verdict["divergences"][0]["case"]).read_bytes() + b"garbage\n")
    code, again = run_judge(tmp_path, "--sut", "mutant:oldest-first", "--case", str(both))
    assert code == 1
    assert len(again["divergences"]) == 1
    assert "both.jsonl:2" in again["reason"]


def test_a_folder_that_cannot_be_written_does_not_lose_a_divergence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, verdict = run_judge(file / "x", "--sut", "mutant:oldest-first", "--scenarios", "100")
    assert code == 1
    assert verdict["divergences"][0]["case"] is None
    assert verdict["divergences"][0]["rule"] == "PREEMPT-VICTIM"


def test_bad_input_is_json_too_if_asked(tmp_path: Path) -> None:
    code, verdict = run_judge(tmp_path, "--sut", "mutant:nobody")
    assert code == 2
    assert verdict["verdict"] == "undecided"
    assert "nobody" in verdict["reason"]


COMMAND = [sys.executable, "-m", "mustfit_checks.cli", "judge"]


def test_a_signal_to_end_ends_the_scheduler_too_and_keeps_what_was_found(tmp_path: Path) -> None:
    started = tmp_path / "started"
    body = f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    sut = driver(tmp_path, body)
    judge = subprocess.Popen(  # noqa: S603
        [*COMMAND, "--sut", sut, "--json", "--cases", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    while not (started.exists() and started.read_text()):
        time.sleep(0.05)
    judge.terminate()
    stdout, _ = judge.communicate(timeout=60)
    assert judge.returncode == 2
    assert "interrupted" in json.loads(stdout)["reason"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_reader_that_leaves_is_no_divergence() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run(  # noqa: S603
            [*COMMAND, "--sut", "spec", "--scenarios", "5"],
            stdout=nobody,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--sut", "vllm"), "nothing is called"),
        (("--sut", "vllm:"), "nothing is called"),
        (("--sut", "spec:x"), "nothing is called"),
        (("--sut", "mutant:nobody"), "mustfit mutants"),
        (("--sut", "spec", "--against", "0.20.2"), "nearest measured: 0.21.0"),
        (("--sut", "vllm:0.99.0"), "never measured"),
        (("--sut", "spec", "--against", "vllm:0.99.0"), "never measured"),
        (("--sut", "cmd:/no/such/program"), "cannot start"),
        (("--sut", "cmd:"), "nothing is called"),
        (("--sut", "cmd:'open"), "cannot be split"),
        (("--sut", "spec", "--vllm-source", "/"), "--vllm-source"),
        (("--sut", "spec", "--case", "/no/such/file"), "/no/such/file"),
        (("--sut", "impl:quickly"), "impl:strides"),
        (("--sut", "spec", "--timeout", "nan"), "--timeout"),
        (("--sut", "./my-scheduler"), "cmd:./my-scheduler"),
        (("--sut", "mutant:admission-preempt"), "admission-preempts"),
    ],
)
def test_bad_input_exits_2_with_one_line(args: tuple[str, ...], message: str) -> None:
    result = mustfit("judge", "--scenarios", "5", *args)
    assert result.exit_code == 2
    text = result.stderr + result.stdout
    assert message in text
    assert "Traceback" not in text


def test_a_case_that_the_release_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    lacks = REVISIONS["0.29.0"].lacks
    drawn = next(s for s in scenarios(seed=0, count=100, lacks=lacks) if s.config.watermark)
    case = tmp_path / "case.jsonl"
    case.write_bytes(encode(drawn) + b"\n")
    result = mustfit("judge", "--sut", "spec", "--against", "0.22.1", "--case", str(case))
    assert result.exit_code == 2
    assert "watermark" in result.stdout


def test_a_verdict_for_people_says_how_to_repeat_it(tmp_path: Path) -> None:
    result = mustfit(
        "judge", "--sut", "mutant:blocked-to-tail", "--scenarios", "20", "--cases", str(tmp_path)
    )
    assert result.exit_code == 1
    assert "WAIT-BLOCKED" in result.stdout
    assert "behaves like blocked-to-tail" in result.stdout
    assert "repeat with: mustfit judge --sut mutant:blocked-to-tail" in result.stdout


# --- Tables -----------------------------------------------------------------------------------


def test_revisions_lists_what_was_measured() -> None:
    result = mustfit("revisions")
    assert result.exit_code == 0
    for release in measurements():
        assert release in result.stdout
    table = json.loads(mustfit("revisions", "--json").stdout)["revisions"]
    assert [row["revision"] for row in table] == list(REVISIONS)
    assert {r for row in table for r in row["releases"]} == set(measurements())


def test_every_revision_was_measured() -> None:
    assert {m.revision for m in measurements().values()} == set(REVISIONS)
    for release, row in measurements().items():
        assert row.profile == "identity"
        assert row.scenarios >= 20_000, release
        assert revision_for(release) is REVISIONS[row.revision]


def test_an_unmeasured_release_names_its_neighbours() -> None:
    with pytest.raises(UnknownRelease, match=r"nearest measured: 0\.22\.1 and 0\.23\.0"):
        revision_for("0.22.2")


@pytest.mark.parametrize("command", ["rules", "mutants", "revisions"])
def test_tables_give_one_a_line_the_name_first(command: str) -> None:
    result = mustfit(command)
    table = json.loads(mustfit(command, "--json").stdout)[command]
    names = [next(iter(row.values())) for row in table]
    firsts = [line.split()[0] for line in result.stdout.splitlines() if line[0] != " "]
    assert firsts == names


def test_the_rules_table_names_the_mutants() -> None:
    for line in mustfit("rules").stdout.splitlines():
        assert "broken by " in line


def test_schema_is_the_schema() -> None:
    assert json.loads(mustfit("schema").stdout) == json.loads(json.dumps(json_schema()))


def test_every_generated_scenario_fits_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    validator = jsonschema.Draft202012Validator({**schema, "$ref": "#/$defs/Scenario"})
    for index in range(100):
        validator.validate(json.loads(encode(scenario(seed=0, index=index))))
