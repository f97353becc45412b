"""Exploring: everything is reached, what is wrong is found, and interrupted work goes on."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from mustfit_checks.cli import main
from mustfit_checks.exercise import watched
from mustfit_checks.explore import FAILED, Explorer, keys_of, scenario_of
from mustfit_checks.invariants import STATE_PROMISES, broken_by_state
from mustfit_checks.moves import STEP, Move, Scope
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.scopes import DEFAULT, LARGE, SCOPES
from mustfit_checks.sides import ImplementationSide, Side, SpecificationSide
from mustfit_checks.walks import walks
from mustfit_impl import Scheduler as Implementation
from mustfit_spec import (
    REVISIONS,
    Config,
    ConfigError,
    NewRequest,
    RequestStatus,
    Scheduler,
    State,
    rules_of,
    run,
)

TINY = Scope(
    name="tiny",
    config=Config(
        num_gpu_blocks=3, block_size=1, max_model_len=2, max_num_seqs=2, max_num_batched_tokens=2
    ),
    kinds=(NewRequest(request_id="k", prompt_token_ids=(0,), sampled_token_ids=(0,)),),
    max_requests=2,
)


def explored(
    scope: Scope,
    *,
    revision: str = "0.33.0",
    scheduler: type[Scheduler] | None = None,
    other: Callable[[Config, str], Side] = ImplementationSide,
) -> Explorer:
    explorer = Explorer(
        scope=scope,
        revision=revision,
        scheduler=scheduler or REVISIONS[revision],
        other=other,
    )
    while explorer.frontier and not explorer.findings:
        explorer.expand()
    return explorer


def explore(*words: str) -> Result:
    return CliRunner().invoke(main, ["explore", *words])


# --- Everything is reached ----------------------------------------------------------------------


def keys_after(scope: Scope, way: tuple[Move, ...]) -> tuple[bytes, bytes]:
    """The keys of the state that a way leads to, made by operations, one after the other."""
    scenario = scenario_of(scope, REVISIONS["0.33.0"](scope.config), way)
    specification = SpecificationSide(REVISIONS["0.33.0"](scope.config))
    implementation = ImplementationSide(scope.config, "0.33.0")
    for operation in scenario.operations:
        given = scenario.request(str(operation.request_id)) if operation.op == "add" else None
        specification.apply(operation, given)
        implementation.apply(operation, given)
    return keys_of(scope, specification.state, implementation)


def test_every_sequence_of_moves_ends_in_a_state_that_was_reached() -> None:
    """Without merging anything: all sequences of up to six moves, one by one."""
    explorer = explored(TINY)
    ways: list[tuple[tuple[Move, ...], int]] = [((), 0)]
    for way, number in ways:
        assert explorer.graph.number_of(*keys_after(TINY, way)) == number
        if len(way) < 6:
            ways += [((*way, t.move), t.target) for t in explorer.graph.transitions[number]]
    assert len(ways) > 400


def test_the_ways_are_the_shortest() -> None:
    explorer = explored(TINY)
    depths = [0] * len(explorer.graph.parents)
    for number, (parent, _) in enumerate(explorer.graph.parents[1:], start=1):
        depths[number] = depths[parent] + 1
        assert len(explorer.graph.way_to(number)) == depths[number]
    assert depths == sorted(depths)
    assert explorer.depth == depths[-1]
    for number, transitions in enumerate(explorer.graph.transitions):
        for _, target, _ in transitions:
            assert target == FAILED or depths[target] <= depths[number] + 1


@pytest.mark.parametrize("revision", ["0.21.0", "0.28.0", "0.33.0"])
def test_the_default_scope_makes_every_rule_matter(revision: str) -> None:
    """As far as a few seconds go; the whole of it is what the command is for."""
    scheduler, seen = watched(REVISIONS[revision])
    for scope in DEFAULT:
        try:
            explorer = Explorer(scope=scope, revision=revision, scheduler=scheduler)
        except ConfigError:
            continue
        while explorer.frontier and len(explorer.graph.transitions) < 400:
            explorer.expand()
        assert not explorer.findings
    assert not rules_of(REVISIONS[revision]).keys() - seen


def test_large_scopes_are_larger() -> None:
    for scope, large in zip(DEFAULT, LARGE, strict=True):
        assert large.config.num_gpu_blocks > scope.config.num_gpu_blocks
        assert large.max_requests > scope.max_requests


@pytest.mark.parametrize("longest", [1, 20, 400])
def test_walks_take_every_transition(longest: int) -> None:
    graph = explored(TINY).graph
    left = {(n, t.move) for n, transitions in enumerate(graph.transitions) for t in transitions}
    for walk in walks(graph, longest=longest):
        number, new = 0, 0
        for move in walk:
            new += (number, move) in left
            left.discard((number, move))
            number = next(t.target for t in graph.transitions[number] if t.move == move)
        assert new, "a walk without anything new"
    assert not left


# --- What is wrong is found ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("admission-preempts", "admissions preempt nobody"),
        ("finished-leak-a-block", "blocks are in one place"),
        ("gate-one-block-spare", "specification and implementation differ"),
    ],
)
def test_a_wrong_scheduler_is_found_by_the_shortest_way(name: str, what: str) -> None:
    wrong = MUTANTS[name].of("0.33.0")
    explorer = explored(DEFAULT[0], scheduler=wrong)
    assert [f for f in explorer.findings if f.what.startswith(what)]
    scenario = explorer.findings[0].scenario
    assert len(scenario.operations) <= 6
    right = REVISIONS["0.33.0"](scenario.config)
    assert run(scenario, right) != run(scenario, wrong(scenario.config))


class WrongImplementation(Implementation):
    """Leaves its victims' blocks to nobody."""

    def _free(self, request: Any) -> None:
        del request.block_ids[:1]
        super()._free(request)


class WrongSide(ImplementationSide):
    implementation = WrongImplementation


def test_a_wrong_implementation_is_found() -> None:
    explorer = explored(DEFAULT[0], other=WrongSide)
    assert explorer.findings[0].what == "specification and implementation differ"


def broken_states() -> dict[str, State]:
    """For each promise, a state that breaks it."""
    right = Explorer(scope=DEFAULT[0], revision="0.33.0", scheduler=REVISIONS["0.33.0"])
    while len(right.frontier[0].state.running) < 2:
        right.expand()
    state = right.frontier[0].state
    first = state.request(state.running[0])
    block = state.blocks[first.block_ids[0]]
    return {
        "blocks are in one place": attrs.evolve(
            state, free_block_queue=(*state.free_block_queue, block.block_id)
        ),
        "references are counted": state.with_block(attrs.evolve(block, ref_cnt=block.ref_cnt + 1)),
        "the cache is consistent": attrs.evolve(state, cached_block_ids=state.cached_block_ids[1:]),
        "the queues are a partition": state.with_request(
            attrs.evolve(first, status=RequestStatus.WAITING)
        ),
        "who waits holds nothing": attrs.evolve(state, running=(), waiting=state.running),
        "who runs has room": state.with_request(attrs.evolve(first, num_computed_tokens=5)),
        "seats are kept": attrs.evolve(state, running=(*state.running, state.running[0])),
    }


def test_each_promise_of_a_state_can_be_broken() -> None:
    states = broken_states()
    assert states.keys() == STATE_PROMISES.keys()
    scheduler = REVISIONS["0.33.0"](DEFAULT[0].config)
    for name, state in states.items():
        assert [w for w in broken_by_state(scheduler, state) if w.startswith(name)], name


# --- When two states are one --------------------------------------------------------------------


def test_states_that_differ_in_names_are_one() -> None:
    """The same requests under other ids, on other blocks."""
    scope = DEFAULT[0]
    short, forking, gone = Move("add", 0), Move("add", 1), Move("abort")

    def after(*way: Move) -> tuple[bytes, bytes]:
        return keys_after(scope, way)

    assert after(short) == after(forking, gone, short)
    assert after(short, STEP) == after(forking, gone, short, STEP)
    assert after(short, STEP) != after(forking, STEP)
    assert after(short, forking) != after(forking, short)
    assert after(short, STEP) != after(short)


# --- The command --------------------------------------------------------------------------------


def test_the_command_says_what_it_reached() -> None:
    result = explore("--scope", "threshold", "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    explorer = explored(next(scope for scope in DEFAULT if scope.name == "threshold"))
    assert said["revision"] == "0.33.0"
    assert said["scope"] == ["threshold"]
    assert said["states"] == len(explorer.graph.numbers)
    assert said["transitions"] == explorer.num_transitions
    assert said["depth"] == explorer.depth
    assert said["complete"] is True
    assert said["divergences"] == []
    assert said["transitions_per_second"] > 0
    assert "PREEMPT-REFUND" in said["never_exercised"]


def test_a_depth_may_be_set() -> None:
    said = json.loads(explore("--scope", "threshold", "--max-depth", "3", "--json").stdout)
    assert said["complete"] is False
    assert said["depth"] == 2


def test_a_finding_is_saved_and_the_exit_code_says_so(tmp_path: Path) -> None:
    result = explore(
        *("--scope", "gate-on", "--mutant", "admission-preempts"),
        *("--cases", str(tmp_path / "cases")),
    )
    assert result.exit_code == 1
    assert "admissions preempt nobody" in result.stdout
    case, *_ = (tmp_path / "cases").glob("explore-gate-on-*.jsonl")
    judged = CliRunner().invoke(
        main,
        [
            *("judge", "--sut", "mutant:admission-preempts"),
            *("--case", str(case), "--cases", str(tmp_path / "judged")),
        ],
    )
    assert judged.exit_code == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--scope", "nowhere"), "there is no scope 'nowhere'; there are: default, large, gate-on"),
        (("--against", "0.1.0"), "vLLM 0.1.0 was never measured"),
        (("--against", "0.21.0", "--scope", "watermark"), "watermark does not exist"),
        (("--mutant", "nobody"), "there is no mutant 'nobody'"),
        (("--mutant", "min-tokens-other-way", "--against", "0.33.0"), ""),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], why: str) -> None:
    result = explore("--max-depth", "1", *words)
    if not why:
        assert result.exit_code in {0, 1}
        return
    assert result.exit_code == 2
    assert why in result.stderr


def test_interrupted_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "checkpoint"
    words = ("--scope", "threshold", "--scope", "stop-tokens", "--checkpoint", str(checkpoint))
    calls = itertools.count(1)
    expand = Explorer.expand

    def interrupted(self: Explorer) -> None:
        if next(calls) == 900:
            raise KeyboardInterrupt
        expand(self)

    with monkeypatch.context() as patch:
        patch.setattr(Explorer, "expand", interrupted)
        first = explore(*words, "--json")
    assert first.exit_code == 2
    assert "interrupted with 1 of 2 scopes to go" in first.stderr
    other = explore("--scope", "threshold", "--checkpoint", str(checkpoint))
    assert other.exit_code == 2
    assert "for other options" in other.stderr
    taken = itertools.count(1)

    def counted(self: Explorer) -> None:
        next(taken)
        expand(self)

    monkeypatch.setattr(Explorer, "expand", counted)
    second = json.loads(explore(*words, "--json").stdout)
    whole = json.loads(explore(*words[:4], "--json").stdout)
    assert second["complete"] is True
    for key in ("states", "transitions", "depth", "divergences", "never_exercised"):
        assert second[key] == whole[key]


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal there")
def test_a_real_interrupt_leaves_nothing_half_done(tmp_path: Path) -> None:
    """Ctrl-C again and again, whenever: in the end all is as if it had not been."""
    checkpoint = tmp_path / "checkpoint"
    words = ["explore", "--scope", "gate-on", "--json", "--cases", str(tmp_path / "cases")]
    program = [sys.executable, "-m", "mustfit_checks.cli", *words, "--checkpoint", str(checkpoint)]
    interrupts = 0
    for delay in itertools.chain((1.0, 1.3, 1.7), itertools.repeat(60.0)):
        process = subprocess.Popen(  # noqa: S603 - our own program
            program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            out, _ = process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate()
            interrupts += process.returncode == 2
        if process.returncode == 0:
            break
    assert interrupts
    said, whole = json.loads(out), json.loads(explore(*words[1:]).stdout)
    for key in ("states", "transitions", "depth", "divergences", "never_exercised", "complete"):
        assert said[key] == whole[key]
    assert said["scopes"][0]["liveness"] == whole["scopes"][0]["liveness"]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary")
    result = explore("--scope", "threshold", "--checkpoint", str(file))
    assert result.exit_code == 2
    assert "is no checkpoint; choose another file" in result.stderr
    assert file.read_text() == "dear diary"


# --- Leading others through it ------------------------------------------------------------------


def judge(*words: str) -> Result:
    return CliRunner().invoke(main, ["judge", *words])


def test_others_are_judged_by_every_transition(tmp_path: Path) -> None:
    result = judge("--scope", "short-pool-no-caching", "--json")
    assert result.exit_code == 0
    explorer = explored(SCOPES["short-pool-no-caching"])
    steps = sum(t.move == STEP for moves in explorer.graph.transitions for t in moves)
    assert json.loads(result.stdout)["steps"] >= steps
    wrong = judge(
        *("--sut", "mutant:requeued-at-tail", "--scope", "threshold", "--json"),
        *("--cases", str(tmp_path)),
    )
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["divergences"][0]["rule"] == "PREEMPT-REQUEUE"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--scope", "nowhere"), "there is no scope 'nowhere'"),
        (("--scope", "threshold", "--case", "x.jsonl"), "give one of them"),
        (("--against", "0.21.0", "--scope", "watermark"), "watermark does not exist"),
    ],
)
def test_a_scope_that_makes_no_sense_is_refused(words: tuple[str, ...], why: str) -> None:
    result = judge(*words)
    assert result.exit_code == 2
    assert why in result.stderr


def test_nobody_is_judged_by_a_scope_in_which_we_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImplementationSide, "implementation", WrongImplementation)
    result = judge("--scope", "gate-on")
    assert result.exit_code == 2
    assert "scope 'gate-on' can't be judged by: specification and implementation" in result.stdout
