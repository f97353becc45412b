"""Does work on the specification or the implementation, in a process of its own, and times it.

    python -m mustfit_checks.bench_worker KIND <work.json >result.json

A process of its own, so that nobody's memory, warm caches or garbage count for another. Requests
are made before the clock runs, as they are for the real scheduler.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from mustfit_checks.work import Decisions, Work
from mustfit_impl import NEWEST, Run, Scheduler
from mustfit_impl.request import Request
from mustfit_spec import REVISIONS, initial_state

#: ``ru_maxrss`` is in KiB on Linux and in bytes on macOS.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_MEBIBYTE = 1 << 20

#: What is done with each step: scheduled, preempted, finished, and how many such steps.
Note = Callable[[Any, Any, Any, int], None]


class WithoutStrides(Scheduler):
    """Every step is taken by itself."""

    def advance(self, max_steps: int, *, same_blocks: bool = False) -> Run:  # noqa: ARG002, D102
        return Run(self._step(), 1)


class WithoutDecoders(WithoutStrides):
    """And everybody who runs is looked at in every step."""

    def _decode(self, request: Request) -> None:
        self._others.append(request)

    def _schedule_others(self, threshold: int) -> None:  # noqa: ARG002
        return None


class WithoutRefusals(Scheduler):
    """Who was refused is looked up and counted anew in each step."""

    def _is_known_to_be_refused(self, request: Request, budget: int) -> bool:  # noqa: ARG002
        return False


def on_impl(
    work: Work, note: Note | None, *, stride: int | None, kind: type[Scheduler] = Scheduler
) -> float:
    """Does the work on the implementation, at most so many steps in a stride. Seconds it took."""
    scheduler = kind(config=work.config)
    requests = {r.request_id: r.hashed(work.config.block_size) for r in work.requests}
    advance = scheduler.advance
    started = time.perf_counter()
    for op, what in work.operations:
        if op == "add":
            scheduler.add_request(requests.pop(str(what)))
            continue
        left = int(what)
        while left:
            outcome, steps = advance(stride or left)
            left -= steps
            if note is not None:
                note(outcome.num_scheduled_tokens, outcome.preempted, outcome.finished, steps)
    return time.perf_counter() - started


def on_spec(work: Work, note: Note | None) -> float:
    """Does the work on the specification. Seconds it took."""
    scheduler = REVISIONS[NEWEST](work.config)
    state = initial_state(work.config)
    requests = {r.request_id: r.tokens(number) for number, r in enumerate(work.requests)}
    started = time.perf_counter()
    for op, what in work.operations:
        if op == "add":
            state = scheduler.add_request(state, requests.pop(str(what)))
            continue
        for _ in range(int(what)):
            state, outcome = scheduler.step(state)
            if note is not None:
                finished = [request_id for request_id, _ in outcome.finished]
                note(dict(outcome.num_scheduled_tokens), outcome.preempted, finished, 1)
    return time.perf_counter() - started


DOES: dict[str, Callable[[Work, Note | None], float]] = {
    "spec": on_spec,
    "impl": lambda work, note: on_impl(work, note, stride=1),
    "run": lambda work, note: on_impl(work, note, stride=None),
    **{
        f"impl, {name}": partial(on_impl, stride=1, kind=kind)
        for name, kind in {
            "no strides": WithoutStrides,
            "no decoders": WithoutDecoders,
            "no refusals kept": WithoutRefusals,
        }.items()
    },
}


def peak_mib() -> float:
    """Most memory that this process has had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / _MEBIBYTE


def measure(kind: str, work: Work, *, repeats: int) -> dict[str, Any]:
    """Does the work some times for the clock, and once for the digest."""
    does = DOES[kind]
    baseline = peak_mib()
    runs = [{"seconds": does(work, None)} for _ in range(repeats)]
    peak = peak_mib()
    decisions = Decisions()
    counts = {"steps": 0, "scheduled_tokens": 0, "preemptions": 0, "finished": 0}

    def note(scheduled: Any, preempted: Any, finished: Any, steps: int) -> None:
        decisions.add(scheduled, preempted, finished, steps=steps)
        counts["steps"] += steps
        counts["scheduled_tokens"] += sum(scheduled.values()) * steps
        counts["preemptions"] += len(preempted) * steps
        counts["finished"] += len(finished) * steps

    does(work, note)
    return {
        "runs": [{**run, **counts} for run in runs],
        "digest": decisions.hexdigest(),
        "peak_mib": peak,
        "baseline_mib": baseline,
    }


def main() -> None:
    """Reads work from stdin and writes the result to stdout."""
    # As for the real scheduler, in vllm_driver.py.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    given = msgspec.json.decode(sys.stdin.buffer.read())
    repeats = given.pop("repeats")
    result = measure(sys.argv[1], msgspec.convert({"name": "work", **given}, Work), repeats=repeats)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
