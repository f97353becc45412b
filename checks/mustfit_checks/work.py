"""Work for the benchmarks: requests known by their lengths and hashes, and what is done, and when.

Everybody gets the same work and has to do the same with it: what was decided in each step goes into
a digest, and the digests have to be equal. Work is one JSON object, so that a scheduler in another
environment can be given it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from mustfit_checks.mooncake import Arrival, names_of_blocks
from mustfit_checks.replay import Clock, replay
from mustfit_impl import HashedRequest, Run, Scheduler
from mustfit_spec import Config, NewRequest, Operation, Scenario

#: Output tokens are numbers that no prompt token is: from here on, so many for each request.
OUTPUT_TOKENS = 1 << 40
OUTPUT_TOKENS_EACH = 1 << 24


@attrs.frozen(kw_only=True)
class WorkRequest:
    """A request of the work.

    Attributes:
        request_id: Its name.
        num_prompt_tokens: Its prompt, in tokens.
        hash_ids: A name for each ``hash_block_size`` tokens of the prompt; the last may cover less.
        hash_block_size: Tokens that a name stands for.
        num_output_tokens: Tokens after which it ends.
    """

    request_id: str
    num_prompt_tokens: int
    hash_ids: tuple[int, ...]
    hash_block_size: int
    num_output_tokens: int

    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt: tokens that are equal where the names are."""
        size = self.hash_block_size
        tokens = (hash_id * size + offset for hash_id in self.hash_ids for offset in range(size))
        return tuple(token for token, _ in zip(tokens, range(self.num_prompt_tokens), strict=False))

    def hashed(self, block_size: int) -> HashedRequest:
        """The request as the implementation takes it."""
        return HashedRequest(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            hash_ids=names_of_blocks(
                self.hash_ids, self.num_prompt_tokens, self.hash_block_size, block_size
            ),
            max_tokens=self.num_output_tokens,
        )

    def tokens(self, number: int) -> NewRequest:
        """The request as the specification takes it, by its number in the work."""
        first = OUTPUT_TOKENS + number * OUTPUT_TOKENS_EACH
        return NewRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids(),
            sampled_token_ids=tuple(range(first, first + self.num_output_tokens)),
        )


@attrs.frozen(kw_only=True)
class Work:
    """What is done to a scheduler, in order.

    Attributes:
        name: What it is called in results.
        config: The scheduler's configuration.
        requests: Every request that is added.
        operations: ``("add", request_id)`` or ``("step", how often)``.
    """

    name: str
    config: Config
    requests: tuple[WorkRequest, ...]
    operations: tuple[tuple[str, str | int], ...]

    @property
    def num_steps(self) -> int:
        """Steps that are taken."""
        return sum(count for op, count in self.operations if op == "step" and type(count) is int)

    def encode(self, *, repeats: int) -> bytes:
        """The JSON object that a runner is given, with how often it is to run."""
        given = {
            "config": self.config,
            "requests": self.requests,
            "operations": self.operations,
            "repeats": repeats,
        }
        return msgspec.json.encode(given)

    def scenario(self) -> Scenario:
        """The same for the specification, token by token."""
        operations: list[Operation] = []
        for op, what in self.operations:
            if op == "add":
                operations.append(Operation(op="add", request_id=str(what)))
            else:
                operations += [Operation(op="step")] * int(what)
        return Scenario(
            scenario_id=self.name,
            config=self.config,
            requests=tuple(r.tokens(number) for number, r in enumerate(self.requests)),
            operations=tuple(operations),
        )


class _Recording(Scheduler):
    """Notes what is done to it."""

    def __init__(self, *, config: Config) -> None:
        super().__init__(config=config)
        self.operations: list[tuple[str, str | int]] = []

    def add_request(self, request: NewRequest | HashedRequest) -> None:
        super().add_request(request)
        self.operations.append(("add", request.request_id))

    def advance(self, max_steps: int, *, same_blocks: bool = False) -> Run:
        run = super().advance(max_steps, same_blocks=same_blocks)
        steps = run.steps
        if self.operations and self.operations[-1][0] == "step":
            steps += int(self.operations.pop()[1])
        self.operations.append(("step", steps))
        return run


def recorded(
    name: str, arrivals: Sequence[Arrival], config: Config, clock: Clock, *, trace_block_size: int
) -> Work:
    """What a replay of these requests does, and between which steps.

    Raises:
        TraceLineError: A request is too long.
        NeverEnds: A request never fits.
    """
    scheduler = _Recording(config=config)
    replayed = replay(
        iter(arrivals), scheduler=scheduler, clock=clock, trace_block_size=trace_block_size
    )
    if replayed.in_vain:
        raise NeverEnds(replayed.in_vain)
    return Work(
        name=name,
        config=config,
        requests=tuple(
            WorkRequest(
                request_id=arrival.request_id,
                num_prompt_tokens=arrival.num_prompt_tokens,
                hash_ids=arrival.hash_ids,
                hash_block_size=trace_block_size,
                num_output_tokens=arrival.max_tokens,
            )
            for arrival in arrivals
        ),
        operations=tuple(scheduler.operations),
    )


class NeverEnds(ValueError):
    """Some request can never be admitted. Its text is one line that says which."""


class Decisions:
    """A digest of what was decided, step by step."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        finished: Iterable[str],
        *,
        steps: int = 1,
    ) -> None:
        """So many steps in a row that decided this."""
        decided: list[Any] = [sorted(scheduled.items()), sorted(preempted), sorted(finished)]
        line = json.dumps(decided, separators=(",", ":")).encode() + b"\n"
        for _ in range(steps):
            self._digest.update(line)

    def hexdigest(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()
