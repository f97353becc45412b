"""Times NVIDIA Dynamo's mocker, a simulator of vLLM in Rust, on a trace in Mooncake's format.

A script for a Python that has ``ai-dynamo-runtime`` (1.3.1 was tried; Python 3.10 or later) and
nothing of mustfit's::

    python dynamo_bench.py <job.json >result.json

The job::

    {"trace": "/path/to/trace.jsonl", "num_gpu_blocks": 300, "block_size": 512,
     "max_num_batched_tokens": 8192, "max_num_seqs": 256, "repeats": 3}

``num_gpu_blocks`` is vLLM's, which counts the null block. Dynamo's pool has none, so it gets one
block less, and both can hand out as many. The trace's own blocks are ``trace_block_size`` tokens,
512 if it isn't given, as in Mooncake's traces.

One worker, prefix caching and chunked prefill on. The replay is offline: it keeps a virtual clock,
moved on by the mocker's model of how long a step takes. By that clock requests arrive as the
trace's timestamps say, unless ``"arrivals"`` is ``false``: then all are there from the start.

The result::

    {"version": "1.3.1", "runs": [{"seconds": 0.3}, ...], "report": {...}, "peak_mib": 123.4}

``seconds`` is the wall time of the whole call: reading the trace, the work of the scheduler, the
virtual clock and the statistics. The report is the mocker's, of the first run, its numbers only; it
says nothing of steps and preemptions. What it says of time is virtual, but for ``wall_time_ms``,
which is the call without reading the trace.

Exit status: 0, or 2 with one line on stderr last: the input is no job, the mocker cannot be
imported, failed, or did not complete every request (it leaves out those that can never fit), or two
runs did not do the same.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from mustfit_checks import vllm_bench, vllm_driver
else:
    # As a script: they lie in the same folder, and need nothing but Python until they start vLLM.
    import vllm_bench
    import vllm_driver

Field = vllm_driver.Field
InputError = vllm_driver.InputError

PACKAGE = "ai-dynamo-runtime"
MOONCAKE_BLOCK_SIZE = 512

JOB_FIELDS = {
    "trace": Field((str,)),
    "num_gpu_blocks": Field((int,)),
    "block_size": Field((int,)),
    "max_num_batched_tokens": Field((int,)),
    "max_num_seqs": Field((int,)),
    "repeats": Field((int,), 1),
    "trace_block_size": Field((int,), MOONCAKE_BLOCK_SIZE),
    "arrivals": Field((bool,), default=True),
}
#: Of the report, what every run on the same work says alike.
COUNTS = (
    "num_requests",
    "completed_requests",
    "total_input_tokens",
    "total_output_tokens",
    "prefix_cache_reused_ratio",
)


class BenchError(Exception):
    """The mocker did not do the work, or not the same way each time."""


def read_job(text: str) -> dict[str, Any]:
    """Decodes the input.

    Raises:
        InputError: It is no job.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from error
    job = vllm_driver.read_object(raw, JOB_FIELDS, "the job")
    for name, value in job.items():
        least = 2 if name == "num_gpu_blocks" else 1
        if type(value) is int and value < least:
            raise InputError(f"{name!r} must be at least {least}")
    if not Path(job["trace"]).is_file():
        raise InputError(f"there is no trace {job['trace']}")
    return job


def engine_arguments(job: Mapping[str, Any]) -> dict[str, Any]:
    """What the mocker's ``MockEngineArgs`` takes. The others keep their defaults."""
    return {
        "engine_type": "vllm",
        "num_gpu_blocks": job["num_gpu_blocks"] - 1,  # the null block, which Dynamo doesn't have
        "block_size": job["block_size"],
        "max_num_seqs": job["max_num_seqs"],
        "max_num_batched_tokens": job["max_num_batched_tokens"],
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        # The last one admitted goes first, as in vLLM under FCFS.
        "preemption_mode": "lifo",
    }


def replay_arguments(job: Mapping[str, Any], num_requests: int) -> dict[str, Any]:
    """What ``run_mocker_trace_replay`` takes besides the trace and the engine's arguments."""
    return {
        "num_workers": 1,
        "replay_mode": "offline",
        "router_mode": "round_robin",
        "trace_format": "mooncake",
        "trace_block_size": job["trace_block_size"],
        # With so many at a time its timestamps are ignored, and nobody waits to arrive.
        "replay_concurrency": None if job["arrivals"] else num_requests,
    }


def clean_report(report: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a report, those that JSON has."""
    return {
        name: value
        for name, value in report.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def check_report(report: Mapping[str, Any], num_requests: int, first: Mapping[str, Any]) -> None:
    """Makes sure that a run did all of the work, and what the first one did.

    Raises:
        BenchError: It didn't.
    """
    completed = report.get("completed_requests")
    if completed != num_requests:
        raise BenchError(f"the mocker completed {completed} of the trace's {num_requests} requests")
    for name in COUNTS:
        if report.get(name) != first.get(name):
            raise BenchError(
                f"{name} was {first.get(name)} in the first run, {report.get(name)} in another"
            )


def bench(job: Mapping[str, Any]) -> dict[str, Any]:
    """Replays the trace as often as the job says; returns the output.

    Raises:
        BenchError: A run didn't do the work.
        Exception: Whatever Dynamo raises.
    """
    core = import_module("dynamo._core")
    release = metadata.version(PACKAGE)
    if not hasattr(core, "MockEngineArgs"):
        raise BenchError(f"{PACKAGE} {release} has no MockEngineArgs; 1.3.1 has")
    trace = Path(job["trace"])
    with trace.open("rb") as lines:
        num_requests = sum(not line.isspace() for line in lines)
    arguments = core.MockEngineArgs(**engine_arguments(job))
    options = replay_arguments(job, num_requests)
    results = []
    first: dict[str, Any] | None = None
    for _ in range(job["repeats"]):
        begin = time.perf_counter()
        report = core.run_mocker_trace_replay([trace], extra_engine_args=arguments, **options)
        seconds = time.perf_counter() - begin
        if first is None:
            first = report
        check_report(report, num_requests, first)
        results.append({"seconds": seconds})
    return {
        "version": release,
        "runs": results,
        "report": clean_report(first or {}),
        "peak_mib": vllm_bench.peak_mib(),
    }


def main() -> None:
    """Reads the job from stdin and writes the result to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    vllm_driver.leave_own_folder()
    stdin, stdout = vllm_driver.take_streams()
    # Its log says what it does as it does it, which costs time.
    os.environ["DYN_LOG"] = "error"
    try:
        result = bench(read_job(stdin.read()))
    except (InputError, BenchError, UnicodeDecodeError) as error:
        vllm_driver.fail(str(error))
    except ImportError as error:
        vllm_driver.fail(f"this Python has no {PACKAGE}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever Dynamo raises
        vllm_driver.fail(f"{type(error).__name__}: {error}")
    stdout.write(json.dumps(result, allow_nan=False) + "\n")
    stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
