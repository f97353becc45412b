"""Times vLLM's own V1 scheduler: work in as one JSON object, what it took out as another.

A script like ``vllm_driver.py``, for the same Python and with the same environment variables::

    PYTHONPATH=<unpacked release> python vllm_bench.py <work.json >result.json

The work::

    {"config": {...as in a scenario...},
     "requests": [{"request_id": "r0", "num_prompt_tokens": 6758, "hash_ids": [0, 1, ...],
                   "hash_block_size": 512, "num_output_tokens": 500}, ...],
     "operations": [["add", "r0"], ["step", 17], ["add", "r1"], ["drain"], ...],
     "repeats": 3}

A request's prompt is given by the blocks that it consists of, as in Mooncake's traces: equal ids
are equal blocks. No two output tokens are equal, and a request ends at ``num_output_tokens``.
``["step", k]`` is ``k`` steps; ``["drain"]`` steps until no request is left.

The result::

    {"release": "0.33.0", "digest": "<hex>", "peak_mib": 1234.5, "baseline_mib": 567.8,
     "runs": [{"seconds": 1.0, "schedule_seconds": 0.6, "update_seconds": 0.4, "steps": 9,
               "scheduled_tokens": 99, "preemptions": 1, "finished": 2}, ...]}

``seconds`` is what ``add_request``, ``schedule`` and ``update_from_output`` took, each call by
itself: the clock is read before and after it. Making requests with their tokens and block hashes,
and standing in for the model, is not in it; hashing the blocks that output tokens fill is, for
vLLM does that in ``update_from_output``. As in ``vllm_driver.py``, Python's garbage collector looks
at nothing that was there before the runs and comes round less often than by default, which is to
vLLM's advantage.

``digest`` is the SHA-256 of a line for each step, ``[scheduled, preempted, finished]`` in JSON
without spaces: ``[request_id, num_tokens]`` pairs, ids and ids, sorted each. It is taken in the
first run, with the clock stopped. ``baseline_mib`` is the peak before the first run; what comes on
top of it includes the tokens of the prompts, which vLLM keeps in two lists a request.

Exit status: 0, or 2 with one line on stderr last: the input is no work, vLLM cannot be imported or
failed, requests can never be served, or two runs did not do the same.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from mustfit_checks import vllm_driver
else:
    # As a script: it lies in the same folder, which leaves the module path before vLLM comes.
    import vllm_driver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

Field = vllm_driver.Field
InputError = vllm_driver.InputError

NS = 1e-9
PROGRESS_NS = 10_000_000_000
#: No work that comes to an end takes so many steps to drain.
DRAIN_LIMIT = 100_000_000

WORK_FIELDS = {
    "config": Field((dict,)),
    "requests": Field((list,)),
    "operations": Field((list,)),
    "repeats": Field((int,), 1),
}
REQUEST_FIELDS = {
    "request_id": Field((str,)),
    "num_prompt_tokens": Field((int,)),
    "hash_ids": Field((list,)),
    "hash_block_size": Field((int,)),
    "num_output_tokens": Field((int,)),
}


class BenchError(Exception):
    """The work cannot be done, or is not done the same way each time."""


@dataclasses.dataclass(frozen=True)
class NewRequest:
    """A request of the work.

    Attributes:
        request_id: Its name.
        num_prompt_tokens: The length of its prompt.
        hash_ids: The blocks of its prompt; the last one may be used in part.
        hash_block_size: Tokens in each of them.
        num_output_tokens: Output tokens after which it ends.
        first_output_token: The first of them; the others count on from it.
    """

    request_id: str
    num_prompt_tokens: int
    hash_ids: tuple[int, ...]
    hash_block_size: int
    num_output_tokens: int
    first_output_token: int

    def prompt_token_ids(self) -> list[int]:
        """The tokens of its prompt: a function of block and offset, so equal blocks are equal."""
        size = self.hash_block_size
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            tokens.extend(range(hash_id * size, (hash_id + 1) * size))
        del tokens[self.num_prompt_tokens :]
        return tokens


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        config: The configuration, whole.
        requests: The requests by id.
        operations: Pairs of what and with what: ``add`` an id, ``step`` a number, ``drain``.
        repeats: How often to do it all.
    """

    config: dict[str, Any]
    requests: dict[str, NewRequest]
    operations: list[tuple[str, Any]]
    repeats: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one run did; what it took depends on the machine, this doesn't."""

    steps: int
    scheduled_tokens: int
    preemptions: int
    finished: int


def read_work(text: str) -> Work:
    """Decodes the input.

    Raises:
        InputError: It is no work.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from error
    work = vllm_driver.read_object(raw, WORK_FIELDS, "the work")
    if work["repeats"] < 1:
        raise InputError("'repeats' must be at least 1")
    requests = _read_requests(work["requests"])
    return Work(
        config=vllm_driver.read_object(work["config"], vllm_driver.CONFIG_FIELDS, "config"),
        requests=requests,
        operations=_read_operations(work["operations"], requests),
        repeats=work["repeats"],
    )


def _read_requests(items: list[object]) -> dict[str, NewRequest]:
    read = []
    # Small numbers, as real tokens are: hashing larger ones would take vLLM longer.
    output_token = 0
    for index, item in enumerate(items):
        where = f"requests[{index}]"
        request = vllm_driver.read_object(item, REQUEST_FIELDS, where)
        for name in ("num_prompt_tokens", "hash_block_size", "num_output_tokens"):
            if request[name] < 1:
                raise InputError(f"{where}: {name!r} must be at least 1")
        hash_ids = request["hash_ids"]
        if any(type(hash_id) is not int or hash_id < 0 for hash_id in hash_ids):
            raise InputError(
                f"{where}: 'hash_ids' must be a list of integers that are not negative"
            )
        size = request["hash_block_size"]
        if len(hash_ids) * size < request["num_prompt_tokens"]:
            raise InputError(f"{where}: too few 'hash_ids' for its prompt")
        output_token = max([output_token, *((hash_id + 1) * size for hash_id in hash_ids)])
        read.append(request)
    requests: dict[str, NewRequest] = {}
    for index, request in enumerate(read):
        request_id = request["request_id"]
        if request_id in requests:
            raise InputError(f"requests[{index}]: {request_id!r} is there already")
        requests[request_id] = NewRequest(
            request_id=request_id,
            num_prompt_tokens=request["num_prompt_tokens"],
            hash_ids=tuple(request["hash_ids"]),
            hash_block_size=request["hash_block_size"],
            num_output_tokens=request["num_output_tokens"],
            first_output_token=output_token,
        )
        output_token += request["num_output_tokens"]
    return requests


def _read_operations(
    items: list[object], requests: Mapping[str, NewRequest]
) -> list[tuple[str, Any]]:
    operations: list[tuple[str, Any]] = []
    added: set[str] = set()
    for index, item in enumerate(items):
        where = f"operations[{index}]"
        match item:
            case ["add", str(request_id)]:
                if request_id not in requests:
                    raise InputError(f"{where} names a request that is not among the requests")
                if request_id in added:
                    raise InputError(f"{where} adds {request_id!r} again")
                added.add(request_id)
                operations.append(("add", request_id))
            case ["step", int(count)] if type(count) is int and count >= 0:
                operations.append(("step", count))
            case ["drain"]:
                operations.append(("drain", None))
            case _:
                raise InputError(f"{where}: there is no operation {json.dumps(item)[:40]}")
    return operations


class Digest:
    """A fingerprint of what was decided, step by step."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def step(
        self, num_scheduled_tokens: Mapping[str, int], preempted: list[str], finished: list[str]
    ) -> None:
        """Takes a step in."""
        step = [sorted(num_scheduled_tokens.items()), sorted(preempted), sorted(finished)]
        self._hash.update((json.dumps(step, separators=(",", ":")) + "\n").encode())

    def hexdigest(self) -> str:
        """The fingerprint of the steps so far."""
        return self._hash.hexdigest()


class Run:
    """The work once, on a new scheduler."""

    def __init__(
        self, factory: vllm_driver.Factory, work: Work, *, number: int, digest: Digest | None
    ) -> None:
        self._factory = factory
        self._work = work
        self._number = number
        self._digest = digest
        self._scheduler = factory.scheduler(work.config)
        self._add_ns = 0
        self._schedule_ns = 0
        self._update_ns = 0
        self._steps = 0
        self._scheduled_tokens = 0
        self._preemptions = 0
        self._finished = 0
        self._next_progress = time.perf_counter_ns() + PROGRESS_NS

    def run(self) -> None:
        """Does the work.

        Raises:
            BenchError: Some request can never be served.
            Exception: Whatever vLLM raises.
        """
        for what, argument in self._work.operations:
            if what == "add":
                self._add(self._work.requests[argument])
            elif what == "step":
                for _ in range(argument):
                    self._step()
            else:
                self._drain()

    @property
    def counts(self) -> Counts:
        """What it did so far."""
        return Counts(
            steps=self._steps,
            scheduled_tokens=self._scheduled_tokens,
            preemptions=self._preemptions,
            finished=self._finished,
        )

    def result(self) -> dict[str, Any]:
        """What it took and did, for the output."""
        return {
            "seconds": (self._add_ns + self._schedule_ns + self._update_ns) * NS,
            "schedule_seconds": self._schedule_ns * NS,
            "update_seconds": self._update_ns * NS,
            **dataclasses.asdict(self.counts),
        }

    def _add(self, new: NewRequest) -> None:
        request = self._factory.request(
            {
                "request_id": new.request_id,
                "prompt_token_ids": new.prompt_token_ids(),
                "sampled_token_ids": (),
                "max_tokens": new.num_output_tokens,
                "min_tokens": 0,
                "eos_token_id": None,
                "stop_token_ids": (),
                "priority": 0,
                "arrival_time": 0,
            },
            self._work.config,
        )
        begin = time.perf_counter_ns()
        self._scheduler.add_request(request)
        self._add_ns += time.perf_counter_ns() - begin

    def _drain(self) -> None:
        for _ in range(DRAIN_LIMIT):
            if not self._scheduler.requests:
                return
            if not self._step():
                # Nothing changed, so nothing ever will.
                request_id = next(iter(self._scheduler.requests))
                raise BenchError(f"{request_id!r} is left, and nothing can be scheduled any more")
        raise BenchError(f"requests are left after {DRAIN_LIMIT} steps")

    def _step(self) -> bool:
        """Takes a step; returns whether it did anything."""
        clock = time.perf_counter_ns
        begin = clock()
        output = self._scheduler.schedule()
        self._schedule_ns += clock() - begin
        sampled = self._sample(output)
        begin = clock()
        outputs = self._scheduler.update_from_output(output, sampled)
        end = clock()
        self._update_ns += end - begin

        finished = [
            one.request_id
            for client in outputs.values()
            for one in client.outputs
            if one.finish_reason is not None
        ]
        preempted = list(output.preempted_req_ids or ())
        self._steps += 1
        self._scheduled_tokens += output.total_num_scheduled_tokens
        self._preemptions += len(preempted)
        self._finished += len(finished)
        if self._digest is not None:
            self._digest.step(output.num_scheduled_tokens, preempted, finished)
        if end >= self._next_progress:
            self._next_progress = end + PROGRESS_NS
            sys.stderr.write(
                f"run {self._number}: {self._steps} steps, {self._finished} finished\n"
            )
            sys.stderr.flush()
        return bool(output.total_num_scheduled_tokens or preempted)

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What the model would return: a token for each request whose tokens are all computed."""
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self._scheduler.requests[request_id]
            if request.num_computed_tokens >= request.num_tokens:
                first = self._work.requests[request_id].first_output_token
                sampled.append([first + request.num_output_tokens])
            else:
                sampled.append([])
        return self._factory.model_runner_output(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def peak_mib() -> float:
    """Most memory that this program had so far, in MiB."""
    kib = 1 / 1024
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * kib
    except OSError:
        pass
    # On Linux this also counts what the process was before it became this program, which may well
    # be the larger one; so it is only for want of the above.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * kib * (kib if sys.platform == "darwin" else 1)


def bench(factory: vllm_driver.Factory, work: Work) -> dict[str, Any]:
    """Does the work as often as it says; returns the output.

    Raises:
        BenchError: Some request can never be served, or two runs did not do the same.
        Exception: Whatever vLLM raises.
    """
    digest = Digest()
    baseline = peak_mib()
    results = []
    first: Counts | None = None
    for number in range(work.repeats):
        run = Run(factory, work, number=number, digest=None if number else digest)
        run.run()
        if first is None:
            first = run.counts
        elif run.counts != first:
            raise BenchError(f"the first run was {first}, run {number} was {run.counts}")
        results.append(run.result())
        # A scheduler refers to itself; this one must not burden the next run.
        del run
        gc.collect()
    return {
        "release": factory.release,
        "runs": results,
        "digest": digest.hexdigest(),
        "peak_mib": peak_mib(),
        "baseline_mib": baseline,
    }


def main() -> None:
    """Reads the work from stdin and writes the result to stdout."""
    stdin, stdout = vllm_driver.prepare()
    try:
        work = read_work(stdin.read())
    except (InputError, UnicodeDecodeError) as error:
        vllm_driver.fail(str(error))
    factory = vllm_driver.start_vllm()
    try:
        result = bench(factory, work)
    except (BenchError, vllm_driver.UnsupportedError) as error:
        vllm_driver.fail(str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the scheduler did
        vllm_driver.fail(f"{type(error).__name__}: {vllm_driver.describe(error)}")
    stdout.write(json.dumps(result) + "\n")
    stdout.flush()
    # Not sys.exit: threads that vLLM started must not delay the end.
    os._exit(0)


if __name__ == "__main__":
    main()
