"""Benchmarks: the same work for everybody, in one run, and how many times as fast each was."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mustfit_checks.vllm_setup import Installed
from mustfit_checks.work import Work

RUNNERS = Path(__file__).parent

#: The implementation without one of its tricks, to see what the trick buys.
ABLATIONS = (
    "impl, no strides",
    "impl, no decoders",
    "impl, no refusals kept",
)

Progress = Callable[[str], None]


class BenchError(Exception):
    """Something could not be measured, or did other work than the rest. Its text is one line."""


@attrs.frozen(kw_only=True)
class Row:
    """What one scheduler took for some work.

    Attributes:
        name: The scheduler.
        work: The work's name.
        seconds: The median of the runs.
        fastest: The fastest of them, in seconds.
        steps: Steps it took; ``None`` where it doesn't say.
        peak_mib: Most memory that its process had, in MiB.
        digest: Of its decisions; ``None`` where it doesn't say.
    """

    name: str
    work: str
    seconds: float
    fastest: float
    steps: int | None
    peak_mib: float
    digest: str | None

    @property
    def per_step_us(self) -> float | None:
        """Microseconds a step."""
        return self.seconds / self.steps * 1e6 if self.steps else None


@attrs.frozen(kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        work: For everybody but the specification.
        small: For those that the specification is compared with: the first of the same requests.
        vllm: The real scheduler, if it is measured.
        dynamo: A Python that has ``ai-dynamo-runtime``, if its mocker is measured.
        trace: The file that the mocker replays.
        repeats: Runs of each, of which the median counts.
    """

    work: Work
    small: Work
    vllm: Installed | None
    dynamo: Path | None
    trace: Path
    repeats: int


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    """The rows, one by one.

    Raises:
        BenchError: Something could not be measured, or decided otherwise than the rest.
    """
    kinds = [
        *(("spec", plan.small), ("impl", plan.small), ("run", plan.small)),
        *((kind, plan.work) for kind in ("impl", "run", *ABLATIONS)),
    ]
    decided: dict[str, str | None] = {}

    def agreed(row: Row) -> Row:
        if row.digest is not None and decided.setdefault(row.work, row.digest) != row.digest:
            raise BenchError(f"{row.name} decided otherwise than the rest on {row.work}")
        return row

    for kind, work in kinds:
        progress(f"{kind} on {work.name}")
        yield agreed(_ours(kind, work, repeats=plan.repeats))
    if plan.vllm is not None:
        for work in (plan.small, plan.work):
            progress(f"vLLM {plan.vllm.release} on {work.name}")
            yield agreed(_vllm(plan.vllm, work, repeats=plan.repeats))
    if plan.dynamo is not None:
        progress(f"the Dynamo mocker on {plan.work.name}")
        yield _dynamo(plan.dynamo, plan.trace, plan.work, repeats=plan.repeats)


def ratios(rows: Sequence[Row], work: Work, small: Work) -> dict[str, float | None]:
    """How many times as fast: ``a_vs_b`` is the seconds of b for one of a, on the same work."""
    seconds = {(row.name.partition(":")[0], row.work): row.seconds for row in rows}

    def ratio(fast: str, slow: str, on: Work) -> float | None:
        times = seconds.get((fast, on.name)), seconds.get((slow, on.name))
        return None if times[0] is None or times[1] is None else times[1] / times[0]

    return {
        "impl_vs_vllm": ratio("impl", "vllm", work),
        "run_vs_vllm": ratio("run", "vllm", work),
        "run_vs_dynamo": ratio("run", "dynamo", work),
        "spec_vs_vllm": ratio("spec", "vllm", small),
    }


def _ours(kind: str, work: Work, *, repeats: int) -> Row:
    """The specification or the implementation."""
    command = (sys.executable, "-m", "mustfit_checks.bench_worker", kind)
    return _row(kind, work, _said(command, work.encode(repeats=repeats), {}))


def _vllm(installed: Installed, work: Work, *, repeats: int) -> Row:
    """The real scheduler."""
    command = (str(installed.python), str(RUNNERS / "vllm_bench.py"))
    said = _said(command, work.encode(repeats=repeats), installed.environment())
    return _row(f"vllm:{said['release']}", work, said)


def _dynamo(python: Path, trace: Path, work: Work, *, repeats: int) -> Row:
    """The Dynamo mocker's own replay of the trace."""
    config = work.config
    given = {
        "trace": str(trace.resolve()),
        "num_gpu_blocks": config.num_gpu_blocks,
        "block_size": config.block_size,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "repeats": repeats,
    }
    command = (str(python), str(RUNNERS / "dynamo_bench.py"))
    said = _said(command, json.dumps(given).encode(), {})
    return _row(f"dynamo:{said['version']}", work, said)


def _said(command: Sequence[str], given: bytes, env: Mapping[str, str]) -> Any:
    """What a runner says about the work that it was given.

    Raises:
        BenchError: It failed.
    """
    done = subprocess.run(  # noqa: S603 - the project's own runners
        list(command), input=given, capture_output=True, check=False, env={**os.environ, **env}
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise BenchError(lines[-1] if lines else f"{command[-1]} exited with {done.returncode}")
    return json.loads(done.stdout)


def _row(name: str, work: Work, said: Mapping[str, Any]) -> Row:
    seconds = [run["seconds"] for run in said["runs"]]
    return Row(
        name=name,
        work=work.name,
        seconds=statistics.median(seconds),
        fastest=min(seconds),
        steps=said["runs"][0].get("steps"),
        peak_mib=said["peak_mib"],
        digest=said.get("digest"),
    )
