"""vLLM's start-up check, and whether a pool that it accepts holds one whole sequence."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mustfit_checks.measured import order
from mustfit_checks.sut import Sut
from mustfit_checks.vllm_driver import MODEL
from mustfit_checks.vllm_setup import Installed
from mustfit_spec import REVISIONS, Config, NewRequest, Operation, Scenario, Trace, run

SCRIPT = Path(__file__).with_name("startup_check.py")

BLOCK_SIZE = 16
MAX_MODEL_LEN = 64
#: Blocks that a sequence of ``max_model_len`` tokens fills.
WHOLE_SEQUENCE = MAX_MODEL_LEN // BLOCK_SIZE

STEP = Operation(op="step")


def ask_startup(installed: Installed, folder: Path, cases: tuple[str, ...]) -> list[str]:
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    done = subprocess.run(  # noqa: S603 - no shell, and nothing from outside
        [
            *(str(installed.python), str(SCRIPT)),
            *(str(folder), str(BLOCK_SIZE), str(MAX_MODEL_LEN)),
            *cases,
        ],
        check=False,
        capture_output=True,
        text=True,
        env=installed.environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = done.stdout.splitlines()
    assert len(answers) == len(cases)
    return answers


def smallest_accepted(release: str) -> int:
    """The fewest blocks, the null block counted, that the release starts with."""
    return WHOLE_SEQUENCE if order(release) < order("0.29.0") else WHOLE_SEQUENCE + 1


def longest_prompt(num_gpu_blocks: int, *, gate: bool, caching: bool) -> Scenario:
    """The longest prompt that vLLM's front end lets through, and a short one behind it."""
    return Scenario(
        scenario_id="longest-prompt",
        config=Config(
            num_gpu_blocks=num_gpu_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=2,
            max_num_batched_tokens=2 * BLOCK_SIZE,
            scheduler_reserve_full_isl=gate,
            enable_prefix_caching=caching,
        ),
        requests=tuple(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=tuple(range(first, first + prompt)),
                sampled_token_ids=(7,),
            )
            for request_id, first, prompt in (("long", 100, MAX_MODEL_LEN - 1), ("short", 900, 1))
        ),
        operations=(
            Operation(op="add", request_id="long"),
            Operation(op="add", request_id="short"),
            *[STEP] * 20,
        ),
    )


def assert_waits_for_ever(trace: Trace) -> None:
    assert trace.error is None
    assert len(trace.steps) == 20
    for step in trace.steps:
        assert step.num_scheduled_tokens == {}
        assert step.waiting == ("long", "short")
        assert step.num_free_blocks == WHOLE_SEQUENCE - 1


def assert_never_gets_its_last_block(trace: Trace, *, caching: bool) -> None:
    """With the gate off it is admitted by its first chunk and then preempts itself."""
    assert trace.error is None
    assert len(trace.steps) == 20
    assert trace.steps[0].num_scheduled_tokens == {"long": 2 * BLOCK_SIZE}
    assert trace.steps[1].preempted == ("long",)
    if caching:
        # It hits what it computed, so the rest is one chunk, for which it waits for ever.
        for step in trace.steps[2:]:
            assert step.num_scheduled_tokens == {}
            assert step.waiting == ("long", "short")
    else:
        # It computes the same chunk again, for ever.
        assert all(step.num_scheduled_tokens == {"long": 32} for step in trace.steps[::2])
        assert all(step.preempted == ("long",) for step in trace.steps[1::2])
    assert not any(step.finished for step in trace.steps)


def assert_ends(trace: Trace) -> None:
    assert trace.error is None
    assert trace.steps[0].num_scheduled_tokens == {"long": 2 * BLOCK_SIZE}
    assert trace.steps[1].num_scheduled_tokens == {"long": 2 * BLOCK_SIZE - 1}
    assert trace.steps[1].finished == ("long",)
    assert trace.steps[2].finished == ("short",)


@pytest.mark.vllm
def test_what_vllm_starts_with(
    install: Callable[[str], Installed], vllm_release: str, tmp_path: Path
) -> None:
    fewest = smallest_accepted(vllm_release)
    plenty = fewest + 1
    few = fewest - 1
    cases = {
        f"{few}": None,
        f"{fewest}": fewest,
        f"{plenty}": plenty,
        # The number given by hand takes the place of the memory, in the check as well.
        f"{plenty}/{few}": None,
        f"{plenty}/{fewest}": fewest,
        f"{few}/{fewest}": fewest,
        f"{few}/{plenty}": plenty,
    }
    answers = ask_startup(install(vllm_release), tmp_path, tuple(cases))
    for (case, expected), answer in zip(cases.items(), answers, strict=True):
        if expected is None:
            assert answer.startswith("refused: To serve at least one request with the model"), case
        else:
            assert answer == str(expected), case


def assert_of_pool(
    num_gpu_blocks: int, ask: Callable[[Scenario], Trace], *, gate: bool, caching: bool
) -> None:
    """What becomes of the longest prompt in a pool that holds it, or lacks one block."""
    trace = ask(longest_prompt(num_gpu_blocks, gate=gate, caching=caching))
    if num_gpu_blocks > WHOLE_SEQUENCE:
        assert_ends(trace)
    elif gate:
        assert_waits_for_ever(trace)
    else:
        assert_never_gets_its_last_block(trace, caching=caching)


GATE = pytest.mark.parametrize("gate", [True, False], ids=["gate-on", "gate-off"])
CACHING = pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])


@GATE
@CACHING
@pytest.mark.vllm
def test_longest_prompt_in_the_smallest_pool(
    vllm: Callable[[str], Sut], vllm_release: str, *, gate: bool, caching: bool
) -> None:
    """Up to 0.28.0 vLLM starts with a pool that the longest prompt never fits in."""
    fewest = smallest_accepted(vllm_release)
    assert_of_pool(fewest, vllm(vllm_release).ask, gate=gate, caching=caching)


@GATE
@CACHING
@pytest.mark.parametrize("revision", REVISIONS)
def test_null_block_decides(revision: str, *, gate: bool, caching: bool) -> None:
    def ask(scenario: Scenario) -> Trace:
        return run(scenario, REVISIONS[revision](scenario.config))

    for num_gpu_blocks in (WHOLE_SEQUENCE, WHOLE_SEQUENCE + 1):
        assert_of_pool(num_gpu_blocks, ask, gate=gate, caching=caching)
