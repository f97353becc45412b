"""How the cost of the implementation grows: with context, with who runs, who waits, and the trace.

Each size is measured in turn, round by round, so that a machine that is busy for a while is busy
for all of them; the median of the rounds counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from mustfit_impl import HashedRequest, Scheduler
from mustfit_spec import Config

BLOCK_SIZE = 16
#: Steps that are timed at once: enough to pass some block boundaries.
STEPS = 8 * BLOCK_SIZE
ROUNDS = 31
#: Blocks of a context, or of a pool, where something else grows.
SMALL = 64
#: Far more output than is ever asked for.
ENDLESS = 1 << 22


#: Sizes that are measured.
CONTEXTS = (1_000, 10_000, 100_000)
QUEUES = (10, 100, 1_000, 10_000)
SEATS = (1, 4, 16, 64, 256)
TRACES = (1_000, 2_000, 4_000, 8_000)


@attrs.frozen(kw_only=True)
class Growth:
    """What something costs at different sizes.

    Attributes:
        what: What is done, and what a size is.
        unit: What a cost is.
        costs: By size, in microseconds.
    """

    what: str
    unit: str
    costs: Mapping[int, float]

    @property
    def ratio(self) -> float:
        """How many times as much the largest size costs as the smallest."""
        sizes = sorted(self.costs)
        return self.costs[sizes[-1]] / self.costs[sizes[0]]


def request(name: str, num_blocks: int) -> HashedRequest:
    """A request whose prompt has so many full blocks, which nobody shares."""
    return HashedRequest(
        request_id=name,
        num_prompt_tokens=num_blocks * BLOCK_SIZE,
        hash_ids=tuple((name, index) for index in range(num_blocks)),
        max_tokens=ENDLESS,
    )


def scheduler(num_blocks: int, *, max_num_seqs: int = 1024) -> Scheduler:
    """A scheduler with so many blocks to hand out, that computes any prompt in one step."""
    tokens = max(num_blocks * BLOCK_SIZE, max_num_seqs)
    return Scheduler(
        config=Config(
            num_gpu_blocks=num_blocks + 1,
            block_size=BLOCK_SIZE,
            max_model_len=2 * ENDLESS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
        )
    )


def room_for_rounds(num_running: int = 1) -> int:
    """Blocks that the decode steps of all rounds take."""
    return num_running * (ROUNDS * STEPS // BLOCK_SIZE + 2)


def with_context(num_blocks: int) -> Scheduler:
    """One request that decodes, with that many blocks of context."""
    made = scheduler(num_blocks + room_for_rounds())
    made.add_request(request("r", num_blocks))
    made.step()
    return made


def with_running(num_running: int) -> Scheduler:
    """That many requests that decode, each at another place in its block."""
    made = scheduler(num_running * (2 + room_for_rounds()), max_num_seqs=max(num_running, 1))
    for number in range(num_running):
        made.add_request(
            HashedRequest(
                request_id=f"r{number}",
                num_prompt_tokens=BLOCK_SIZE + number % BLOCK_SIZE,
                hash_ids=((number,),),
                max_tokens=ENDLESS,
            )
        )
    made.step()
    return made


def with_waiting(num_waiting: int, head_blocks: int = SMALL) -> Scheduler:
    """One request that decodes, and that many who wait behind a head that doesn't fit."""
    room = room_for_rounds()
    made = scheduler(SMALL + room)
    made.add_request(request("r", SMALL))
    made.step()
    made.add_request(request("head", room + head_blocks))
    for number in range(num_waiting - 1):
        made.add_request(request(f"w{number}", 1))
    return made


def with_head(num_blocks: int) -> Scheduler:
    """One request that decodes, and a head that doesn't fit, with that many blocks of prompt."""
    return with_waiting(1, head_blocks=num_blocks)


def per_step(make: Callable[[int], Scheduler], sizes: Sequence[int]) -> dict[int, float]:
    """Microseconds a decode step, by size."""
    made = {size: make(size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size, one in made.items():
            step = one.step
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds[size].append(time.perf_counter() - started)
    return {size: statistics.median(all_of) / STEPS * 1e6 for size, all_of in seconds.items()}


def per_request(sizes: Sequence[int], *, rounds: int = 3) -> dict[int, float]:
    """Microseconds a request, in strides, by the number of requests that are worked off."""
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            made = scheduler(16 * SMALL, max_num_seqs=64)
            requests = [
                HashedRequest(
                    request_id=f"r{number}",
                    num_prompt_tokens=SMALL * BLOCK_SIZE,
                    hash_ids=tuple((number, index) for index in range(SMALL)),
                    max_tokens=1 + number % (4 * BLOCK_SIZE),
                )
                for number in range(size)
            ]
            started = time.perf_counter()
            for one in requests:
                made.add_request(one)
            while made.num_running or made.num_waiting:
                made.advance(ENDLESS)
            seconds[size].append(time.perf_counter() - started)
    return {size: statistics.median(all_of) / size * 1e6 for size, all_of in seconds.items()}


def growth() -> Iterator[Growth]:
    """Everything that is measured, one by one."""
    by_step: tuple[tuple[str, Callable[[int], Scheduler], Sequence[int]], ...] = (
        ("a decode step, by blocks of context", with_context, CONTEXTS),
        ("a decode step, by requests that wait, the first blocked", with_waiting, QUEUES),
        ("a decode step, by blocks of a blocked head's prompt", with_head, QUEUES),
        ("a decode step, by requests that run", with_running, SEATS),
    )
    for what, make, sizes in by_step:
        yield Growth(what=what, unit="µs a step", costs=per_step(make, sizes))
    yield Growth(
        what="a trace in strides, by its requests", unit="µs a request", costs=per_request(TRACES)
    )
