"""Replays: by strides and by single steps, against counts made naively, and the command."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import pytest
from click.testing import CliRunner, Result

from mustfit_checks import replay_cli
from mustfit_checks.cli import main
from mustfit_checks.mooncake import Arrival, TraceLineError, names_of_blocks, read
from mustfit_checks.replay import ENDLESS, Clock, Replay, Replayed, Sample, Timeline
from mustfit_impl import Config, HashedRequest, NewRequest, Run, Scheduler, StepOutcome

TRACE_BLOCK = 4


def config(rng: random.Random) -> Config:
    return Config(
        num_gpu_blocks=rng.randint(8, 14),
        block_size=rng.choice([2, 3, 4, 6]),
        max_model_len=64,
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.randint(6, 20),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.8,
    )


def arrivals(rng: random.Random, count: int) -> list[Arrival]:
    """Short requests, some with a common beginning, now in a burst, now far apart."""
    made: list[Arrival] = []
    at = 0
    for number in range(1, count + 1):
        at += rng.choice([0, 0, 3, 1000, 12_345, 90_001])
        length = rng.randint(1, 14)
        blocks = -(-length // TRACE_BLOCK)
        common = rng.randint(0, blocks)
        names = tuple(index if index < common else number * 100 + index for index in range(blocks))
        made.append(Arrival(number, at, length, rng.randint(1, 12), names))
    return made


@attrs.define
class Recorder:
    """Notes what a scheduler did, step by step, and what was added before which step."""

    steps: list[StepOutcome] = attrs.field(factory=list)
    added: list[tuple[int, str]] = attrs.field(factory=list)


def recording(recorder: Recorder) -> type[Scheduler]:
    class Recording(Scheduler):
        def add_request(self, request: NewRequest | HashedRequest) -> None:
            super().add_request(request)
            recorder.added.append((len(recorder.steps), request.request_id))

        def advance(self, max_steps: int, *, same_blocks: bool = False) -> Run:
            run = super().advance(max_steps, same_blocks=same_blocks)
            assert run.steps <= max_steps
            recorder.steps += [run.outcome] * run.steps
            return run

    return Recording


def replayed(
    requests: list[Arrival], config: Config, clock: Clock, *, stride: int
) -> tuple[Replayed, Recorder]:
    recorder = Recorder()
    scheduler = recording(recorder)(config=config)
    replay = Replay(scheduler=scheduler, clock=clock, trace_block_size=TRACE_BLOCK, stride=stride)
    return replay.run(iter(requests)), recorder


def told(result: Replayed) -> dict[str, Any]:
    return attrs.asdict(result, filter=attrs.filters.exclude("seconds", "timeline"))


@pytest.mark.parametrize("seed", range(120))
def test_strides_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    given, requests = config(rng), arrivals(rng, 20)
    clock = Clock(step_us=rng.choice([1, 500, 9_999]), token_us=rng.choice([0, 7]))
    at_once, strides = replayed(requests, given, clock, stride=ENDLESS)
    singly, steps = replayed(requests, given, clock, stride=1)
    assert told(at_once) == told(singly)
    assert strides == steps
    assert at_once.requests == at_once.finished + at_once.left == 20


@pytest.mark.parametrize("seed", range(40))
def test_what_is_counted_is_what_happened(seed: int) -> None:
    """Against the same counted the long way, from single steps."""
    rng = random.Random(1000 + seed)
    given, requests = config(rng), arrivals(rng, 20)
    clock = Clock(step_us=900, token_us=3)
    result, recorder = replayed(requests, given, clock, stride=ENDLESS)

    now = 0
    waiting_for = {arrival.request_id: arrival.at for arrival in requests}
    expected_added: list[tuple[int, str]] = []
    live: set[str] = set()
    computed: dict[str, int] = {}
    reached: dict[str, int] = {}
    again = 0
    for number, outcome in enumerate(recorder.steps):
        if not live and waiting_for:
            now = max(now, min(waiting_for.values()))
        for request_id in [r for r, at in waiting_for.items() if at <= now]:
            del waiting_for[request_id]
            expected_added.append((number, request_id))
            live.add(request_id)
        for request_id in outcome.preempted:
            reached[request_id] = max(reached.get(request_id, 0), computed[request_id])
        computed |= outcome.num_cached_tokens
        for request_id, tokens in outcome.num_scheduled_tokens.items():
            first = computed.get(request_id, 0)
            again += max(min(first + tokens, reached.get(request_id, 0)) - first, 0)
            computed[request_id] = first + tokens
        live -= set(outcome.finished)
        now += clock.duration(outcome)
    assert recorder.added == expected_added
    assert result.recomputed_tokens == again
    assert result.simulated_us == now
    assert result.steps == len(recorder.steps)
    assert result.preemptions == sum(len(step.preempted) for step in recorder.steps)
    assert result.scheduled_tokens == sum(
        sum(step.num_scheduled_tokens.values()) for step in recorder.steps
    )


def test_such_replays_preempt_and_compute_again() -> None:
    """Or the tests above would say nothing about it."""
    results = []
    for seed in range(40):
        rng = random.Random(1000 + seed)
        given, requests = config(rng), arrivals(rng, 20)
        results.append(replayed(requests, given, Clock(step_us=900, token_us=3), stride=ENDLESS)[0])
    assert sum(result.preemptions > 2 for result in results) > 10
    assert sum(result.recomputed_tokens > 0 for result in results) > 10
    assert sum(result.longest_head_wait_steps > 3 for result in results) > 10


@pytest.mark.parametrize("seed", range(30))
def test_recomputed_tokens_are_right_at_any_time(seed: int) -> None:
    rng = random.Random(5000 + seed)
    scheduler = Scheduler(config=config(rng))
    computed: dict[str, int] = {}
    reached: dict[str, int] = {}
    again = 0
    coming = arrivals(rng, 15)
    for number in range(150):
        if coming and rng.random() < 0.3:
            arrival = coming.pop()
            scheduler.add_request(
                HashedRequest(
                    request_id=arrival.request_id,
                    num_prompt_tokens=arrival.num_prompt_tokens,
                    hash_ids=(number,) * 20,
                    max_tokens=arrival.max_tokens,
                )
            )
        if rng.random() < 0.05 and scheduler.running:
            scheduler.abort(rng.choice(scheduler.running))
        outcome = scheduler.step()
        for request_id in outcome.preempted:
            reached[request_id] = max(reached.get(request_id, 0), computed[request_id])
        computed |= outcome.num_cached_tokens
        for request_id, tokens in outcome.num_scheduled_tokens.items():
            first = computed.get(request_id, 0)
            again += max(min(first + tokens, reached.get(request_id, 0)) - first, 0)
            computed[request_id] = first + tokens
        assert scheduler.num_recomputed_tokens == again


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_wait_at_the_head(seed: int) -> None:
    rng = random.Random(seed)
    given, requests = config(rng), arrivals(rng, 20)
    heads: list[tuple[str | None, bool]] = []

    class Watching(Scheduler):
        def advance(self, max_steps: int, *, same_blocks: bool = False) -> Run:
            head = self.head()
            run = super().advance(max_steps, same_blocks=same_blocks)
            heads.append((head, head in run.outcome.num_cached_tokens))
            return run

    replay = Replay(
        scheduler=Watching(config=given),
        clock=Clock(step_us=5, token_us=0),
        trace_block_size=TRACE_BLOCK,
        stride=1,
    )
    result = replay.run(iter(requests))
    longest = current = 0
    last: str | None = None
    for head, admitted in heads:
        current = 0 if head != last else current
        last = head
        if head is not None and not admitted:
            current += 1
            longest = max(longest, current)
    assert result.longest_head_wait_steps == longest


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 8, 12])
def test_names_are_equal_where_tokens_are(block_size: int) -> None:
    rng = random.Random(block_size)
    for _ in range(200):
        pair = []
        for _ in range(2):
            length = rng.randint(1, 30)
            names = tuple(rng.choice([i, 100 + i]) for i in range(-(-length // TRACE_BLOCK)))
            tokens = [(names[t // TRACE_BLOCK], t) for t in range(length)]
            pair.append((names_of_blocks(names, length, TRACE_BLOCK, block_size), tokens))
        (left, left_tokens), (right, right_tokens) = pair
        for index in range(min(len(left), len(right))):
            end = (index + 1) * block_size
            same = left[: index + 1] == right[: index + 1]
            assert same == (left_tokens[:end] == right_tokens[:end])
        assert len(left) == len(left_tokens) // block_size


def test_a_timeline_stays_small_and_loses_no_peak() -> None:
    timeline = Timeline(most=16)
    for number in range(1001):
        peak = 999 if number == 777 else 1
        timeline.add(Sample(number, peak, peak, peak, number))
    timeline.finish()
    samples = timeline.samples
    assert 4 < len(samples) <= 16
    assert max(sample.used_blocks for sample in samples) == 999
    assert max(sample.running for sample in samples) == 999
    assert max(sample.waiting for sample in samples) == 999
    assert samples[-1].preemptions == samples[-1].at == 1000
    assert [s.at for s in samples] == sorted(s.at for s in samples)


def test_memory_does_not_grow_with_the_trace() -> None:
    given = Config(
        num_gpu_blocks=64,
        block_size=16,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )

    def peak(count: int) -> int:
        def short() -> Iterator[Arrival]:
            for number in range(1, count + 1):
                yield Arrival(number, number * 50_000, 20, 3, (number, -number))

        replay = Replay(
            scheduler=Scheduler(config=given),
            clock=Clock(step_us=10_000, token_us=50),
            trace_block_size=16,
            timeline=Timeline(most=64),
        )
        tracemalloc.start()
        try:
            assert replay.run(short()).finished == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(20_000) < 1.2 * peak(2_000)


# --- Lines ------------------------------------------------------------------------------------

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":2: Input data was truncated"),
        (b"\xff{}", ":2: "),
        ("[]", ":2: Expected `object`, got `array`"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}', "hash_ids"),
        ('{"input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp"),
        (GOOD.replace("600", "0"), ":2: input_length: Expected `int` >= 1"),
        (GOOD.replace("600", "-3"), ":2: input_length: Expected `int` >= 1"),
        (GOOD.replace("600", '"x"'), ":2: input_length: Expected `int`, got `str`"),
        (GOOD.replace("600", "NaN"), ":2: "),
        (GOOD.replace(": 3", ": 0"), ":2: output_length: Expected `int` >= 1"),
        (GOOD.replace(": 0", ": -1"), ":2: timestamp: Expected `float` >= 0"),
        (GOOD.replace("[1, 2]", "[1]"), ":2: hash_ids: 1 for the 2 blocks of 512 tokens"),
        (GOOD.replace("[1, 2]", "[1, 2, 3]"), ":2: hash_ids: 3 for the 2 blocks"),
        (GOOD.replace("[1, 2]", '[1, "b"]'), ":2: hash_ids[1]: Expected `int`, got `str`"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_field(
    line: str | bytes, said: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    raw = line if isinstance(line, bytes) else line.encode()
    trace.write_bytes(GOOD.encode() + b"\n" + raw + b"\n")
    lines = read(trace)
    assert next(lines).num_prompt_tokens == 600
    with pytest.raises(TraceLineError) as caught:
        next(lines)
    assert f"{trace}{said}" in str(caught.value) or (said in str(caught.value) and said[0] != ":")
    assert "\n" not in str(caught.value)


def test_time_does_not_go_back(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    trace.write_text(GOOD.replace(": 0", ": 7.5") + "\n\n" + GOOD + "\n", encoding="utf-8")
    lines = read(trace)
    assert next(lines).at == 7500
    with pytest.raises(TraceLineError, match=r"t:3: timestamp: 0 comes after 7\.5"):
        next(lines)


def test_further_fields_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    trace.write_text("\n" + GOOD.replace("{", '{"session_id": "s", ') + "\n\n", encoding="utf-8")
    assert list(read(trace)) == [Arrival(2, 0, 600, 3, (1, 2))]


# --- The command ------------------------------------------------------------------------------


def mustfit(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ("replay", *args), input=stdin)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests of some blocks each, two at a time."""
    lines = [
        {
            "timestamp": 20 * (number // 2),
            "input_length": 1000 + 37 * number,
            "output_length": 200,
            "hash_ids": [
                0,
                *(100 * number + i for i in range(-(-(1000 + 37 * number) // 512) - 1)),
            ],
        }
        for number in range(40)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


KEYS = {
    "steps",
    "preemptions",
    "recomputed_tokens",
    "longest_head_wait_steps",
    "seconds",
    "finished",
}


def test_the_keys_that_others_rely_on(trace: str) -> None:
    result = mustfit(trace, "--num-gpu-blocks", "32", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told.keys() >= KEYS
    assert told["finished"] == told["requests"] == 40
    assert told["gate"] == "on"
    assert told["reason"] is None


def test_the_gate_on_and_off(trace: str) -> None:
    pool = ("--num-gpu-blocks", "24", "--max-num-batched-tokens", "512", "--json")
    both = json.loads(mustfit(trace, *pool, "--gate", "both").stdout)
    off = json.loads(mustfit(trace, *pool, "--gate", "off").stdout)
    assert set(both["gates"]) == {"on", "off"}
    assert both["gates"]["off"]["preemptions"] == off["preemptions"]
    assert off["gate"] == "off"
    assert off["preemptions"] > both["preemptions"] == both["gates"]["on"]["preemptions"]


def test_for_people(trace: str) -> None:
    result = mustfit(trace, "--gate", "both")
    assert result.exit_code == 0
    for word in ("gate on", "gate off", "preemptions", "longest wait at the head", "steps"):
        assert word in result.stdout


def test_limit_and_all_at_once(trace: str) -> None:
    few = json.loads(mustfit(trace, "--limit", "5", "--json").stdout)
    assert few["requests"] == 5
    at_once = json.loads(mustfit(trace, "--limit", "5", "--all-at-once", "--json").stdout)
    assert at_once["requests"] == 5
    assert at_once["simulated_seconds"] < few["simulated_seconds"]


def test_stdin(trace: str) -> None:
    text = Path(trace).read_text(encoding="utf-8")
    told = json.loads(mustfit("-", "--json", stdin=text).stdout)
    assert told["finished"] == 40
    twice = mustfit("-", "--gate", "both", stdin=text)
    assert twice.exit_code == 2
    assert "stdin" in twice.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", ":41: "),
        (
            GOOD.replace(": 0", ": 9000").replace("600", "3000").replace("[1, 2]", "[1,2,3,4,5,6]"),
            ":41: input_length: ",
        ),
    ],
)
def test_what_came_before_a_bad_line_is_not_lost(line: str, said: str, trace: str) -> None:
    with Path(trace).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    result = mustfit(trace, "--max-model-len", "2700", "--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["requests"] == 40
    assert told["steps"] > 0
    assert f"{trace}{said}" in told["reason"]
    assert result.stderr.splitlines()[-1] == f"mustfit: {told['reason']}"


def test_who_never_fits_ends_the_replay(trace: str) -> None:
    result = mustfit(trace, "--num-gpu-blocks", "4", "--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["left"] == 40 - told["finished"] > 0
    assert told["starved"] is not None
    assert f"{told['starved']} never fits" in told["reason"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("/no/such/file",), "/no/such/file"),
        (("/",), "is a directory"),
        (("TRACE", "--max-num-batched-tokens", "5"), "max_num_batched_tokens"),
        (("TRACE", "--step-ms", "0"), "--step-ms"),
        (("TRACE", "--step-ms", "nan"), "nan is not a finite number"),
        (("TRACE", "--watermark", "nan"), "nan is not a finite number"),
        (("TRACE", "--plot", "picture.gif"), ".png"),
        (("EMPTY",), "holds no request"),
    ],
)
def test_bad_input_exits_2_with_a_line(
    args: tuple[str, ...], said: str, trace: str, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    places = {"TRACE": trace, "EMPTY": str(empty)}
    result = mustfit(*(places.get(arg, arg) for arg in args))
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_an_interrupt_loses_nothing(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **given: Any) -> Iterator[Arrival]:
        for arrival in read(*args, **given):
            if arrival.number == 20:
                raise KeyboardInterrupt
            yield arrival

    monkeypatch.setattr(replay_cli, "read", interrupted)
    result = mustfit(trace, "--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["reason"] == "interrupted"
    assert told["requests"] == 19


# --- The plot ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_plot_is_drawn(suffix: str, trace: str, tmp_path: Path) -> None:
    file = tmp_path / f"plot{suffix}"
    result = mustfit(trace, "--num-gpu-blocks", "32", "--plot", str(file))
    assert result.exit_code == 0, result.output
    assert "gate off" in result.stdout
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert file.read_bytes().startswith(begins)


def test_the_same_replay_gives_the_same_drawing(trace: str, tmp_path: Path) -> None:
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        mustfit(trace, "--num-gpu-blocks", "32", "--plot", str(file))
    assert files[0].read_bytes() == files[1].read_bytes()
    ET.parse(files[0])  # noqa: S314 - our own


def test_a_plot_that_cannot_be_written_loses_nothing(trace: str) -> None:
    result = mustfit(trace, "--json", "--plot", "/no/such/folder/plot.png")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["finished"] == 40
    assert "/no/such/folder/plot.png" in told["reason"]


def test_without_matplotlib_a_line_says_what_to_do(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "mustfit_checks.plot", raising=False)
    monkeypatch.delattr("mustfit_checks.plot", raising=False)
    result = mustfit(trace, "--plot", "plot.png")
    assert result.exit_code == 2
    assert "pip install 'mustfit[plot]'" in result.stderr
