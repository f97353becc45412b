"""Benchmarks: everybody gets the same work, and it is the work that it is said to be."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from mustfit_checks import bench, bench_worker, growth
from mustfit_checks.bench import BenchError, Plan, Row
from mustfit_checks.cli import main
from mustfit_checks.measured import newest_release
from mustfit_checks.mooncake import Arrival, read
from mustfit_checks.replay import Clock
from mustfit_checks.synthetic import write_trace
from mustfit_checks.vllm_setup import Installed
from mustfit_checks.work import Work, recorded
from mustfit_impl import NEWEST, Config, Scheduler
from mustfit_spec import REVISIONS, run

BLOCK = 16
CLOCK = Clock(step_us=10_000, token_us=50)
CONFIG = Config(
    num_gpu_blocks=40,
    block_size=BLOCK,
    max_model_len=1024,
    max_num_seqs=16,
    max_num_batched_tokens=128,
)


def work(count: int = 24, config: Config = CONFIG) -> Work:
    """Requests that are short of blocks, some with a common beginning."""
    arrivals = [
        Arrival(
            number,
            number * 5_000,
            40 + 9 * (number % 17),
            1 + 7 * (number % 9),
            tuple(
                i if i < number % 4 else number * 100 + i
                for i in range(-(-(40 + 9 * (number % 17)) // BLOCK))
            ),
        )
        for number in range(1, count + 1)
    ]
    return recorded("some", arrivals, config, CLOCK, trace_block_size=BLOCK)


# --- The work ---------------------------------------------------------------------------------


def test_everybody_decides_the_same() -> None:
    given = work()
    results = {
        kind: bench_worker.measure(kind, given, repeats=1)
        for kind in ("spec", "impl", "run", *bench.ABLATIONS)
    }
    assert len({result["digest"] for result in results.values()}) == 1
    counts = [{**result["runs"][0], "seconds": 0} for result in results.values()]
    assert all(count == counts[0] for count in counts)
    assert counts[0]["steps"] == given.num_steps > 100
    assert counts[0]["finished"] == 24
    assert counts[0]["preemptions"] > 0


def test_the_digest_is_of_every_decision() -> None:
    """Against the trace of the same scenario, digested here."""
    given = work()
    trace = run(given.scenario(), REVISIONS[NEWEST](given.config))
    digest = hashlib.sha256()
    for step in trace.steps:
        decided = [
            sorted([list(pair) for pair in step.num_scheduled_tokens.items()]),
            sorted(step.preempted),
            sorted(step.finished),
        ]
        digest.update(json.dumps(decided, separators=(",", ":")).encode() + b"\n")
    assert bench_worker.measure("run", given, repeats=1)["digest"] == digest.hexdigest()


@pytest.mark.vllm
def test_vllm_decides_the_same(vllm_release: str, install: Callable[[str], Installed]) -> None:
    given = work()
    if vllm_release != newest_release():
        pytest.skip("the implementation is measured as of the newest revision")
    row = bench._vllm(install(vllm_release), given, repeats=2)
    ours = bench_worker.measure("impl", given, repeats=1)
    assert row.name == f"vllm:{vllm_release}"
    assert row.digest == ours["digest"]
    assert row.steps == ours["runs"][0]["steps"]
    assert row.seconds >= row.fastest > 0
    assert row.peak_mib > 50


@pytest.mark.vllm
@pytest.mark.parametrize(
    "given", [b"", b"{}", b'{"config": {}, "requests": [], "operations": [], "repeats": 1}']
)
def test_bad_work_is_a_line(
    given: bytes, vllm_release: str, install: Callable[[str], Installed]
) -> None:
    installed = install(vllm_release)
    done = subprocess.run(  # noqa: S603 - our own
        [str(installed.python), str(bench.RUNNERS / "vllm_bench.py")],
        input=given,
        capture_output=True,
        check=False,
        env={**os.environ, **installed.environment()},
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().splitlines()[-1].startswith("vllm_bench: ")


@pytest.mark.skipif(
    "MUSTFIT_TEST_DYNAMO" not in os.environ,
    reason="MUSTFIT_TEST_DYNAMO names no Python with ai-dynamo-runtime",
)
def test_the_dynamo_mocker_replays_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, requests=20, block_size=512)
    config = attrs.evolve(CONFIG, num_gpu_blocks=300, block_size=512, max_model_len=131_072)
    row = bench._dynamo(
        Path(os.environ["MUSTFIT_TEST_DYNAMO"]), trace, work(config=config), repeats=1
    )
    assert row.name.startswith("dynamo:")
    assert row.seconds > 0


# --- The ablations ----------------------------------------------------------------------------


def test_an_ablation_takes_something_away() -> None:
    """A method that is renamed must not make an ablation the same as the whole."""
    for kind in (
        bench_worker.WithoutStrides,
        bench_worker.WithoutDecoders,
        bench_worker.WithoutRefusals,
    ):
        own = [name for name, value in vars(kind).items() if callable(value)]
        assert own
        for name in own:
            assert callable(getattr(Scheduler, name))


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        (bench_worker.WithoutStrides, "_step"),
        (bench_worker.WithoutDecoders, "_schedule_running"),
        (bench_worker.WithoutRefusals, "_lookup"),
    ],
)
def test_an_ablation_works_more(
    kind: type[Scheduler], counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"whole": 0, "ablation": 0}

    def count(who: str) -> None:
        whole = getattr(Scheduler, counted)

        def counting(self: Scheduler, *args: Any) -> Any:
            calls[who] += 1
            return whole(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, counted, counting)
            made = Scheduler if who == "whole" else kind
            bench_worker.on_impl(work(), None, stride=1, kind=made)

    count("whole")
    count("ablation")
    assert calls["ablation"] > 1.5 * calls["whole"]


# --- Measuring --------------------------------------------------------------------------------


def plan(tmp_path: Path) -> Plan:
    small = attrs.evolve(work(6), name="few")
    return Plan(
        work=work(), small=small, vllm=None, dynamo=None, trace=tmp_path / "trace", repeats=1
    )


def test_rows_and_ratios(tmp_path: Path) -> None:
    given = plan(tmp_path)
    rows = list(bench.measure(given, lambda _: None))
    assert [(row.name, row.work) for row in rows] == [
        ("spec", "few"),
        ("impl", "few"),
        ("run", "few"),
        ("impl", "some"),
        ("run", "some"),
        *((name, "some") for name in bench.ABLATIONS),
    ]
    assert all(row.per_step_us and row.peak_mib > 5 for row in rows)
    none = bench.ratios(rows, given.work, given.small)
    assert set(none) == {"impl_vs_vllm", "run_vs_vllm", "run_vs_dynamo", "spec_vs_vllm"}
    assert set(none.values()) == {None}
    slow = attrs.evolve(rows[3], name="vllm:0.33.0", seconds=rows[3].seconds * 8)
    few = attrs.evolve(rows[0], name="vllm:0.33.0", seconds=rows[0].seconds / 2)
    dynamo = attrs.evolve(rows[3], name="dynamo:1.3.1", seconds=rows[4].seconds * 3, steps=None)
    some = bench.ratios([*rows, slow, few, dynamo], given.work, given.small)
    assert some["impl_vs_vllm"] == pytest.approx(8)
    assert some["spec_vs_vllm"] == pytest.approx(0.5)
    assert some["run_vs_dynamo"] == pytest.approx(3)
    assert dynamo.per_step_us is None


def test_who_decides_otherwise_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = bench._ours

    def wrong(kind: str, given: Work, *, repeats: int) -> Row:
        row = ours("run", given, repeats=repeats)
        return attrs.evolve(row, name=kind, digest="other" if kind == "run" else row.digest)

    monkeypatch.setattr(bench, "_ours", wrong)
    with pytest.raises(BenchError, match="run decided otherwise than the rest on few"):
        list(bench.measure(plan(tmp_path), lambda _: None))


def test_a_runner_that_fails_is_a_line() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; print('why\\nthis', file=sys.stderr); sys.exit(3)",
    ]
    with pytest.raises(BenchError, match=r"^this$"):
        bench._said(command, b"", {})


def test_the_made_up_trace_is_the_same_everywhere(tmp_path: Path) -> None:
    """If it is meant to change, put the digest here that this prints."""
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, requests=200, block_size=512)
    assert len(list(read(trace))) == 200
    digest = hashlib.sha256(trace.read_bytes()).hexdigest()
    assert digest == "604cfbbe449958218cc93003383f556c3cc12bdf90002b6a722a4f8a7a2a9bfb"


# --- The command ------------------------------------------------------------------------------


def mustfit(*args: str) -> Result:
    return CliRunner().invoke(main, ("bench", "--vllm", "none", "--repeats", "1", *args))


def test_the_keys_that_others_rely_on() -> None:
    result = mustfit("--no-growth", "--limit", "30", "--spec-requests", "2", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told.keys() >= {"work", "rows", "ratios"}
    assert [work["requests"] for work in told["work"]] == [30, 2]
    for row in told["rows"]:
        assert row.keys() >= {"name", "seconds", "per_step_us", "peak_mib"}
    assert set(told["ratios"]) == {"impl_vs_vllm", "run_vs_vllm", "run_vs_dynamo", "spec_vs_vllm"}


def test_for_people() -> None:
    result = mustfit("--no-growth", "--limit", "10", "--spec-requests", "1")
    assert result.exit_code == 0
    assert "no strides" in result.stdout
    assert "10 requests" in result.stdout


def test_what_was_measured_before_a_failure_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = bench._ours

    def failing(kind: str, given: Work, *, repeats: int) -> Row:
        if kind in bench.ABLATIONS:
            raise BenchError("out of luck")
        return ours(kind, given, repeats=repeats)

    monkeypatch.setattr(bench, "_ours", failing)
    result = mustfit("--no-growth", "--limit", "10", "--spec-requests", "1", "--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert [row["name"] for row in told["rows"]] == ["spec", "impl", "run", "impl", "run"]
    assert told["reason"] == "out of luck"
    assert result.stderr.splitlines()[-1] == "mustfit: out of luck"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("/no/such/file",), "/no/such/file"),
        (("BAD",), ":1: "),
        (("--max-model-len", "10"), "input_length"),
        (("--max-num-batched-tokens", "3"), "max_num_batched_tokens"),
        (("--num-gpu-blocks", "3"), "never fits"),
        (("--step-ms", "inf"), "--step-ms"),
        (("--vllm", "0.0.1", "--limit", "2", "--no-growth"), "0.0.1"),
    ],
)
def test_bad_input_exits_2_with_a_line(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("nonsense\n", encoding="utf-8")
    result = mustfit(*(str(bad) if arg == "BAD" else arg for arg in args))
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


# --- How costs grow ---------------------------------------------------------------------------


def test_what_is_measured_is_what_it_is_said_to_be() -> None:
    context = growth.with_context(1000)
    assert context.num_running == 1
    (blocks,) = [len(r.block_ids) for r in context._running]
    assert blocks == 1000
    waiting = growth.with_waiting(50)
    assert (waiting.num_running, waiting.num_waiting) == (1, 50)
    running = growth.with_running(16)
    assert (running.num_running, running.num_waiting) == (16, 0)
    for made in (context, waiting, running, growth.with_head(77)):
        num_waiting, free = made.num_waiting, made.num_free_blocks
        for _ in range(growth.ROUNDS * growth.STEPS):
            outcome = made.step()
            assert set(outcome.num_scheduled_tokens.values()) == {1}
            assert not outcome.finished
            assert not outcome.preempted
        assert made.num_waiting == num_waiting
        assert free - made.num_free_blocks >= growth.ROUNDS * growth.STEPS // growth.BLOCK_SIZE


def test_a_cost_that_grows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "ROUNDS", 3)
    flat = growth.per_step(growth.with_context, (100, 10_000))
    assert max(flat.values()) < 3 * min(flat.values())

    class Slow(Scheduler):
        """Goes through all the blocks that anybody holds, in each step."""

        def step(self) -> Any:
            for request in self._running:
                for _ in request.block_ids:
                    pass
            return super().step()

    monkeypatch.setattr(growth, "Scheduler", Slow)
    slow = growth.per_step(growth.with_context, (100, 10_000))
    assert slow[10_000] > 5 * slow[100]
