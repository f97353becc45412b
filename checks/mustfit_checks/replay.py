"""Replaying a trace of requests on the implementation, by a simple clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs

from mustfit_checks.mooncake import Arrival, TraceLineError, names_of_blocks
from mustfit_impl import HashedRequest, Scheduler, StepOutcome

#: More steps than are ever taken.
ENDLESS = 1 << 62


@attrs.frozen(kw_only=True)
class Clock:
    """How long a step takes: a part that every step takes, and a part for each token it computes.

    Whole microseconds, so that many steps take exactly as long at once as one by one.

    Attributes:
        step_us: The first, in microseconds, at least 1.
        token_us: The second, in microseconds.
    """

    step_us: int
    token_us: int

    def duration(self, outcome: StepOutcome) -> int:
        """Microseconds that a step takes which did that."""
        return self.step_us + self.token_us * sum(outcome.num_scheduled_tokens.values())


@attrs.frozen
class Sample:
    """What there was to see at some time.

    Attributes:
        at: When, in simulated microseconds.
        used_blocks: Blocks that somebody held.
        running: Requests in ``running``.
        waiting: Requests that waited.
        preemptions: Preemptions so far.
    """

    at: int
    used_blocks: int
    running: int
    waiting: int
    preemptions: int


class Timeline:
    """Samples over time, in bounded memory.

    When there are too many, every other one goes, and from then on only one of twice as many is
    kept. Of those in between, the most blocks and requests are kept, so that no peak is lost.

    Args:
        most: How many samples are kept at most.
    """

    def __init__(self, *, most: int = 4096) -> None:
        self.samples: list[Sample] = []
        self._most = most
        self._merged = 1
        self._pending: Sample | None = None
        self._num_pending = 0

    def add(self, sample: Sample) -> None:
        """Notes a sample."""
        self._pending = sample if self._pending is None else _merge(self._pending, sample)
        self._num_pending += 1
        if self._num_pending == self._merged:
            self.finish()
            if len(self.samples) == self._most:
                pairs = zip(self.samples[::2], self.samples[1::2], strict=True)
                self.samples = [_merge(first, second) for first, second in pairs]
                self._merged *= 2

    def finish(self) -> None:
        """Nothing more comes."""
        if self._pending is not None:
            self.samples.append(self._pending)
            self._pending, self._num_pending = None, 0


def _merge(first: Sample, second: Sample) -> Sample:
    """One sample for two, when the second was taken."""
    return Sample(
        second.at,
        max(first.used_blocks, second.used_blocks),
        max(first.running, second.running),
        max(first.waiting, second.waiting),
        second.preemptions,
    )


@attrs.define(kw_only=True)
class Replayed:
    """What came of a replay, so far.

    Attributes:
        requests: Requests that arrived.
        steps: Steps taken.
        scheduled_tokens: Tokens computed, all in all.
        preemptions: Preemptions.
        recomputed_tokens: Tokens computed again that had been computed before a preemption.
        longest_head_wait_steps: Most steps in a row for which one request was the first in line
            when the step began and was not admitted.
        longest_head_wait: Whose that was.
        finished: Requests that ended.
        left: Requests that had not when the replay stopped.
        starved: Who could never be admitted, which stopped the replay.
        simulated_us: Time that the steps took and that passed between them, in microseconds.
        seconds: Time that the replay took.
        timeline: Samples over simulated time, if asked for.
    """

    requests: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    longest_head_wait_steps: int = 0
    longest_head_wait: str | None = None
    finished: int = 0
    left: int = 0
    starved: str | None = None
    simulated_us: int = 0
    seconds: float = 0.0
    timeline: Timeline | None = None

    @property
    def in_vain(self) -> str | None:
        """Who can never be admitted, and how many wait for that, in one line."""
        if self.starved is None:
            return None
        return f"{self.starved} never fits, and {self.left} requests wait for ever"


class Replay:
    """A replay under way: what came of it can be looked at whenever it stops.

    A request is added before the first step that begins at its arrival or later. While nobody is
    there, time passes until the next arrival.

    Args:
        scheduler: Who is given the requests; nobody else may be using it.
        clock: How long a step takes.
        trace_block_size: Tokens that a hash id of the trace stands for.
        stride: Most steps taken at once; the result doesn't depend on it.
        timeline: Where to note samples.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        clock: Clock,
        trace_block_size: int,
        stride: int = ENDLESS,
        timeline: Timeline | None = None,
    ) -> None:
        self.result = Replayed(timeline=timeline)
        self._scheduler = scheduler
        self._clock = clock
        self._trace_block_size = trace_block_size
        self._stride = stride
        self._now = 0
        self._head: str | None = None
        self._head_wait = 0

    def run(self, arrivals: Iterator[Arrival]) -> Replayed:
        """Replays the requests, up to the end of the last, or until somebody starves.

        Raises:
            TraceLineError: A line is no request, or one that is too long; those before were
                replayed up to then.
        """
        started = time.perf_counter()
        try:
            self._run(arrivals)
        finally:
            result, scheduler = self.result, self._scheduler
            result.left = scheduler.num_running + scheduler.num_waiting
            result.recomputed_tokens = scheduler.num_recomputed_tokens
            result.simulated_us = self._now
            result.seconds = time.perf_counter() - started
            if result.timeline is not None:
                result.timeline.finish()
        return result

    def _run(self, arrivals: Iterator[Arrival]) -> None:
        scheduler = self._scheduler
        coming = next(arrivals, None)
        while True:
            while coming is not None and coming.at <= self._now:
                self._add(coming)
                coming = next(arrivals, None)
            if not scheduler.num_running and not scheduler.num_waiting:
                if coming is None:
                    return
                self._now = coming.at
                continue
            outcome = self._advance(None if coming is None else coming.at)
            if not outcome.num_scheduled_tokens and coming is None and not scheduler.num_running:
                self.result.starved = scheduler.head()
                return

    def _add(self, arrival: Arrival) -> None:
        scheduler = self._scheduler
        longest = scheduler.config.max_model_len
        if arrival.num_prompt_tokens >= longest:
            raise TraceLineError(
                f"{arrival.where}: input_length: {arrival.num_prompt_tokens} tokens leave none to "
                f"sample; max_model_len is {longest}"
            )
        scheduler.add_request(
            HashedRequest(
                request_id=arrival.request_id,
                num_prompt_tokens=arrival.num_prompt_tokens,
                hash_ids=names_of_blocks(
                    arrival.hash_ids,
                    arrival.num_prompt_tokens,
                    self._trace_block_size,
                    scheduler.config.block_size,
                ),
                max_tokens=arrival.max_tokens,
            )
        )
        self.result.requests += 1

    def _advance(self, until: int | None) -> StepOutcome:
        """The next steps that do the same, up to the first that begins at that time or later."""
        scheduler, clock, result = self._scheduler, self._clock, self.result
        limit = self._stride
        if until is not None:
            # Where more than one step is taken, each computes a token of whoever runs.
            each = clock.step_us + clock.token_us * scheduler.num_running
            limit = min(limit, -(-(until - self._now) // each))
        elif not scheduler.num_running:
            limit = 1
        head = scheduler.head()
        outcome, steps = scheduler.advance(limit)
        tokens = sum(outcome.num_scheduled_tokens.values())
        self._now += steps * (clock.step_us + clock.token_us * tokens)
        result.steps += steps
        result.scheduled_tokens += steps * tokens
        result.preemptions += len(outcome.preempted)
        result.finished += len(outcome.finished)
        self._note_head(head, steps, is_admitted=head in outcome.num_cached_tokens)
        if result.timeline is not None:
            result.timeline.add(
                Sample(
                    self._now,
                    scheduler.config.num_gpu_blocks - 1 - scheduler.num_free_blocks,
                    scheduler.num_running,
                    scheduler.num_waiting,
                    result.preemptions,
                )
            )
        return outcome

    def _note_head(self, head: str | None, steps: int, *, is_admitted: bool) -> None:
        if head != self._head:
            self._head, self._head_wait = head, 0
        if head is None or is_admitted:
            return
        self._head_wait += steps
        if self._head_wait > self.result.longest_head_wait_steps:
            self.result.longest_head_wait_steps = self._head_wait
            self.result.longest_head_wait = head


def replay(
    arrivals: Iterator[Arrival],
    *,
    scheduler: Scheduler,
    clock: Clock,
    trace_block_size: int,
) -> Replayed:
    """Replays a trace to its end.

    Raises:
        TraceLineError: A line is no request, or one that is too long.
    """
    return Replay(scheduler=scheduler, clock=clock, trace_block_size=trace_block_size).run(arrivals)
