"""Scenario generation: seeded, and aimed at the places where schedulers go wrong.

A scenario is a function of ``(seed, index)`` and of what the revision lacks, nothing else, so that
any scenario of any run can be made again by itself.

What is aimed at: pools that are a little too small, prefixes that are shared while active, while
inactive, and when partly evicted, prompts longer than the budget, resumes, self-preemption,
priorities, aborts, cache resets, and the edges of the watermark and of ``max_model_len``.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Literal

from mustfit_spec import Config, NewRequest, Operation, Scenario
from mustfit_spec.kv_cache_manager import cdiv

#: What a scenario is like. ``crowd``: many short requests at once, so that one preempts another and
#: the budget is shared. ``long-and-short``: a long prompt computed in large chunks while short
#: requests take the blocks it will need. ``pile-up``: the same, so that it has to preempt several
#: of them at once. ``leftovers``: a long prompt computed with what shorter requests of a worse
#: priority leave of the budget, until they preempt each other. ``large``: more of everything.
Shape = Literal["mixed", "crowd", "long-and-short", "pile-up", "leftovers", "large"]
SHAPES: dict[Shape, int] = {
    "mixed": 20,
    "crowd": 8,
    "long-and-short": 6,
    "pile-up": 2,
    "leftovers": 2,
    "large": 1,
}

STEP = Operation(op="step")
#: More steps than this say little that fewer don't; a large scenario has its own limit.
MAX_STEPS = 48
MAX_STEPS_LARGE = 150


def scenarios(
    *, seed: int, count: int, lacks: frozenset[str] = frozenset(), start: int = 0
) -> Iterator[Scenario]:
    """``count`` scenarios, from the ``start``-th of this seed on."""
    for index in range(start, start + count):
        yield scenario(seed=seed, index=index, lacks=lacks)


def scenario(*, seed: int, index: int, lacks: frozenset[str] = frozenset()) -> Scenario:
    """The ``index``-th scenario of a seed.

    Args:
        seed: Any whole number.
        index: Counted from 0.
        lacks: Configuration fields that have to keep their defaults (``Scheduler.lacks``).
    """
    return _Generator(Random(f"mustfit/{seed}/{index}"), lacks).scenario(f"{seed}/{index}")  # noqa: S311


class _Generator:
    """Draws one scenario. Probabilities are tuned by ``tests/test_mutants.py``."""

    def __init__(self, random: Random, lacks: frozenset[str]) -> None:
        self.random = random
        self.lacks = lacks
        self.block_size = random.choice((1, 2, 2, 3, 4, 4, 4, 5, 8))
        self.next_token = 100
        self.shape: Shape = random.choices(tuple(SHAPES), tuple(SHAPES.values()))[0]
        if self.shape == "large":
            self.block_size = random.choice((4, 8, 16))

    def maybe(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, max(low, high))

    def scenario(self, scenario_id: str) -> Scenario:
        requests = self.requests()
        config = self.config(requests)
        return Scenario(
            scenario_id=scenario_id,
            config=config,
            requests=requests,
            operations=self.operations(config, requests),
        )

    # --- Requests -----------------------------------------------------------------------------

    def fresh(self, length: int) -> tuple[int, ...]:
        """Tokens that no other request has."""
        tokens = tuple(range(self.next_token, self.next_token + length))
        self.next_token += length
        return tokens

    def length(self, most_blocks: int) -> int:
        """A length in tokens, near a block's end as often as not."""
        blocks = self.between(0, most_blocks)
        edge = self.random.choice((-1, 0, 0, 1, self.between(0, self.block_size)))
        return max(1, blocks * self.block_size + edge)

    def requests(self) -> tuple[NewRequest, ...]:
        numbers = {"mixed": (1, 2, 2, 3, 3, 3, 4, 4, 5, 6), "large": (8, 10, 12, 16)}
        number = self.random.choice(numbers.get(self.shape, (3, 4, 5, 5, 6)))
        stems = [self.fresh(self.length(4)) for _ in range(self.random.choice((1, 1, 2)))]
        sharing = self.random.choice((0.0, 0.4, 0.8))
        arrivals = self.random.choice((1, 3, 20))
        ids = [f"r{i}" for i in range(number)]
        if self.maybe(0.2):
            self.random.shuffle(ids)
        made: list[NewRequest] = []
        for request_id in ids:
            last = len(made) == number - 1
            made.append(self.request(request_id, stems, made, sharing, arrivals, last=last))
        return tuple(made)

    def request(
        self,
        request_id: str,
        stems: list[tuple[int, ...]],
        earlier: list[NewRequest],
        sharing: float,
        arrivals: int,
        *,
        last: bool,
    ) -> NewRequest:
        prompt = self.shaped_prompt(stems, earlier, sharing, last=last)
        sampled = self.sampled(earlier)
        priority = self.between(0, 2)
        if self.shape == "crowd":
            sampled += self.fresh(self.between(1, 2 * self.block_size))
        elif self.shape != "mixed":
            sampled += self.fresh(2 * self.block_size)
        if self.shape == "leftovers" or (self.shape == "crowd" and arrivals > 1):
            # The later, the better: victims then stand in front of those they make room for.
            priority = -len(earlier)
        ends: dict[str, Any] = {}
        if self.maybe(0.2):
            ends["max_tokens"] = self.between(1, len(sampled))
        limit = ends.get("max_tokens", len(sampled))
        if self.maybe(0.15):
            ends["min_tokens"] = self.between(1, limit)
        if self.maybe(0.12):
            ends["eos_token_id"] = self.random.choice(sampled[: limit + 1])
        if self.maybe(0.08):
            ends["stop_token_ids"] = (self.random.choice(sampled[: limit + 1]),)
        return NewRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampled_token_ids=sampled,
            priority=priority,
            arrival_time=self.between(0, arrivals - 1),
            **ends,
        )

    def shaped_prompt(
        self,
        stems: list[tuple[int, ...]],
        earlier: list[NewRequest],
        sharing: float,
        *,
        last: bool,
    ) -> tuple[int, ...]:
        if self.shape in {"mixed", "large"}:
            return self.prompt(stems, earlier, sharing)
        if self.shape in {"long-and-short", "pile-up"} and not earlier:
            return self.fresh(self.length(6) + 3 * self.block_size)
        if last and (self.shape == "leftovers" or (self.shape == "crowd" and self.maybe(0.6))):
            # It takes what the others leave of the budget, for many steps.
            return self.fresh(self.length(3) + 2 * self.block_size)
        if self.shape in {"pile-up", "leftovers"}:
            return self.fresh(self.between(1, self.block_size))
        return self.prompt(stems, earlier, sharing / 2)[: self.length(1)]

    def prompt(
        self, stems: list[tuple[int, ...]], earlier: list[NewRequest], sharing: float
    ) -> tuple[int, ...]:
        if not self.maybe(sharing):
            return self.fresh(self.length(5))
        if earlier and self.maybe(0.5):
            before = self.random.choice(earlier)
            if self.maybe(0.4):
                return before.prompt_token_ids
            if self.maybe(0.15):
                # The same blocks behind another one: not the same content.
                return self.fresh(self.block_size) + before.prompt_token_ids
            # The next turn of a conversation: the earlier prompt, and some of what was sampled.
            turn = before.prompt_token_ids + before.sampled_token_ids
            return turn[: self.between(1, len(turn))] + self.fresh(self.length(2))
        stem = self.random.choice(stems)
        return stem[: self.between(1, len(stem))] + self.fresh(self.between(0, self.length(2)))

    def sampled(self, earlier: list[NewRequest]) -> tuple[int, ...]:
        if earlier and self.maybe(0.3):
            return self.random.choice(earlier).sampled_token_ids
        return self.fresh(self.length(3))

    # --- Configuration ------------------------------------------------------------------------

    def config(self, requests: tuple[NewRequest, ...]) -> Config:
        chunked = self.maybe(0.85)
        max_model_len = self.max_model_len(requests)
        budget = self.budget(requests)
        if self.shape == "crowd" and self.maybe(0.5):
            budget = len(requests) + self.between(0, 2)
        elif self.shape != "mixed":
            budget += 3 * len(requests)
        if not chunked:
            budget = max(budget, max_model_len)
        fewest = {"mixed": 1, "large": 4}.get(self.shape, len(requests))
        max_num_seqs = min(budget, self.between(fewest, len(requests) + 1))
        num_gpu_blocks = self.num_gpu_blocks(requests, max_model_len)
        fields: dict[str, Any] = {
            "num_gpu_blocks": num_gpu_blocks,
            "block_size": self.block_size,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "enable_chunked_prefill": chunked,
            "enable_prefix_caching": self.maybe(0.85),
            "policy": "priority" if self.maybe(0.7 if self.shape == "crowd" else 0.4) else "fcfs",
            "scheduler_reserve_full_isl": self.maybe(
                {"mixed": 0.7, "large": 0.7, "crowd": 0.4}.get(self.shape, 0.25)
            ),
        }
        if self.maybe(0.8 if self.shape == "long-and-short" else 0.3):
            fewest = self.block_size if self.shape == "long-and-short" else 1
            fields["long_prefill_token_threshold"] = min(
                max_model_len, self.between(fewest, 4 * self.block_size)
            )
            fields["long_prefill_token_threshold_adaptive"] = self.maybe(0.4)
        if self.maybe(0.5 if self.shape == "crowd" else 0.15):
            fields["max_num_scheduled_tokens"] = (
                len(requests) - self.between(0, 2)
                if self.shape == "crowd"
                else self.between(1, budget + 2)
            )
        if self.maybe(0.05 if self.shape == "crowd" else 0.15):
            fields["max_num_active_seqs"] = self.between(1, max_num_seqs)
        if self.maybe(0.15 if self.shape == "crowd" else 0.3):
            fields["watermark"] = self.watermark(num_gpu_blocks)
        if self.maybe(0.25):
            fields["num_lookahead_tokens"] = self.between(1, 2 * self.block_size)
        fields |= self.staged(requests)
        return Config(**{k: v for k, v in fields.items() if k not in self.lacks})

    def staged(self, requests: tuple[NewRequest, ...]) -> dict[str, Any]:
        """The settings that two of the shapes need, to come about at all."""
        if self.shape not in {"pile-up", "leftovers"}:
            return {}
        number = len(requests)
        prompts = sum(self.blocks(len(r.prompt_token_ids)) for r in requests)
        totals = [len(r.prompt_token_ids) + r.output_limit for r in requests]
        staged: dict[str, Any] = {
            "max_model_len": max(totals) + 1,
            "max_num_seqs": number,
            "scheduler_reserve_full_isl": False,
            "enable_chunked_prefill": True,
            "num_gpu_blocks": 1 + max(self.blocks(max(totals)), prompts - self.between(0, number)),
            "max_num_scheduled_tokens": None,
            "max_num_active_seqs": None,
            "watermark": 0.0,
            "long_prefill_token_threshold_adaptive": False,
        }
        if self.shape == "pile-up":
            chunk = self.between(2, 4) * self.block_size
            return staged | {
                "long_prefill_token_threshold": min(chunk, staged["max_model_len"]),
                "max_num_batched_tokens": chunk + number * self.block_size,
            }
        return staged | {
            "long_prefill_token_threshold": 0,
            "max_num_batched_tokens": number - 1 + self.between(1, 3),
            "policy": "priority",
        }

    def max_model_len(self, requests: tuple[NewRequest, ...]) -> int:
        totals = [len(r.prompt_token_ids) + r.output_limit for r in requests]
        if self.maybe(0.6 if self.shape == "mixed" else 0.85):
            return max(*totals, 2) + self.between(0, 3)
        one = self.random.choice(requests)
        prompt = len(one.prompt_token_ids)
        edge = self.random.choice(
            (
                prompt + self.between(1, one.output_limit),
                prompt + one.output_limit - 1,
                prompt + 1,
                prompt,
                prompt - 1,
            )
        )
        return max(2, edge)

    def budget(self, requests: tuple[NewRequest, ...]) -> int:
        prompts = [len(r.prompt_token_ids) for r in requests]
        return max(
            1,
            self.random.choice(
                (
                    sum(prompts) + len(prompts),
                    max(prompts) + self.between(-1, 2),
                    self.random.choice(prompts) + self.between(-1, 1),
                    self.block_size * self.between(1, 4) + self.between(-1, 1),
                    self.between(1, 8),
                )
            ),
        )

    def num_gpu_blocks(self, requests: tuple[NewRequest, ...], max_model_len: int) -> int:
        """A pool that some of the requests just fit in, or just don't; the null block on top."""
        whole = [self.blocks(len(r.prompt_token_ids) + r.output_limit) for r in requests]
        prompts = [self.blocks(len(r.prompt_token_ids)) for r in requests]
        some = self.random.sample(whole, self.between(1, len(whole)))
        if self.shape == "large":
            return 1 + max(whole) + self.between(0, sum(whole) // 2)
        if self.shape != "mixed" and self.maybe(0.7):
            return 1 + max(1, *whole, sum(prompts) + self.between(-1, 2))
        size = self.random.choice(
            (
                sum(some) + self.between(-2, 1),
                sum(prompts) + self.between(-1, 1),
                max(whole) + self.between(-1, 3),
                max(whole) + self.between(-1, 3),
                self.blocks(max_model_len) + self.between(0, 2),
                sum(whole) + 2,
            )
        )
        return 1 + max(1, size)

    def blocks(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size)

    def watermark(self, num_gpu_blocks: int) -> float:
        """A share that keeps one, two or three blocks free, by a hair or amply."""
        blocks = self.between(1, 3)
        return min(0.9, round((blocks + self.random.choice((0.0, 0.5))) / num_gpu_blocks, 4))

    # --- Operations ---------------------------------------------------------------------------

    def operations(self, config: Config, requests: tuple[NewRequest, ...]) -> tuple[Operation, ...]:
        gap = self.random.choice((0, 0, 1, 3, 8) if self.shape == "mixed" else (0, 1, 1))
        operations: list[Operation] = []
        for request in requests:
            operations.append(Operation(op="add", request_id=request.request_id))
            operations += [STEP] * self.between(0, gap)
        operations += [STEP] * self.steps(config, requests)
        if self.maybe(0.2):
            for _ in range(self.between(1, 2)):
                self.insert(
                    operations,
                    Operation(op="abort", request_id=self.random.choice(requests).request_id),
                )
        if self.maybe(0.2):
            for _ in range(self.between(1, 2)):
                self.insert(
                    operations,
                    Operation(op="reset_prefix_cache", reset_running_requests=self.maybe(0.5)),
                )
        return _cut(operations, MAX_STEPS_LARGE if self.shape == "large" else MAX_STEPS)

    def steps(self, config: Config, requests: tuple[NewRequest, ...]) -> int:
        """About as many as it takes for all to end, if all goes well; sometimes twice that."""
        outputs = sum(r.output_limit for r in requests)
        chunks = sum(cdiv(len(r.prompt_token_ids), config.max_num_batched_tokens) for r in requests)
        return int((chunks + outputs) * self.random.choice((0.3, 0.6, 1.0))) + 3

    def insert(self, operations: list[Operation], operation: Operation) -> None:
        operations.insert(self.between(0, len(operations) - 1), operation)


def _cut(operations: list[Operation], most: int) -> tuple[Operation, ...]:
    """The operations up to the last step allowed."""
    kept: list[Operation] = []
    steps = 0
    for operation in operations:
        steps += operation.op == "step"
        if steps > most:
            break
        kept.append(operation)
    return tuple(kept)
