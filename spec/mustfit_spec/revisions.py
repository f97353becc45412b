"""The revisions of the semantics: a subclass for each vLLM release that changed a rule.

Read from top to bottom, this is the changelog of what vLLM's scheduler does in scope. Each class
is named after the first release that behaves so. Sources are of that release, below ``vllm/``.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from mustfit_spec.rules import rule
from mustfit_spec.scheduler import Scheduler, Step
from mustfit_spec.state import Request, RequestStatus, State
from mustfit_spec.trace import FinishReason


class V0_21_0(Scheduler):
    """The gate is part of ``allocate_slots``."""

    lacks: ClassVar[frozenset[str]] = frozenset(
        {"watermark", "max_num_active_seqs", "long_prefill_token_threshold_adaptive"}
    )


class V0_23_0(V0_21_0):
    """An admission takes lookahead slots as well."""

    @rule("WAIT-LOOKAHEAD", "0.23.0 v1/core/sched/scheduler.py:736-739")
    def lookahead_of_waiting(self) -> int:
        """An admission takes lookahead slots, like any allocation.

        So a request that passes the gate can still be refused for want of these.
        """
        return self.config.num_lookahead_tokens


class V0_24_0(V0_23_0):
    """The watermark; and blocks without content are reused before cached ones."""

    lacks: ClassVar[frozenset[str]] = V0_23_0.lacks - {"watermark"}

    @rule(
        "ALLOC-WATERMARK",
        "0.24.0 v1/core/kv_cache_manager.py:163,363-370,385-387,416-420, "
        "v1/core/sched/scheduler.py:885",
    )
    def watermark_blocks(self, request: Request, *, has_scheduled_reqs: bool) -> int:
        """An admission leaves ``int(watermark * num_gpu_blocks)`` blocks free, if anybody runs.

        That goes for the gate and for the chunk. A running request may use them.
        """
        if has_scheduled_reqs and request.status is not RequestStatus.RUNNING:
            return int(self.config.watermark * self.config.num_gpu_blocks)
        return 0

    @rule("ALLOC-FREE-ORDER", "0.24.0 v1/core/block_pool.py:623-635")
    def put_back(self, state: State, block_ids: tuple[int, ...]) -> State:
        """Freed blocks that are cached go to the tail of the free queue, all others to its head.

        In the order given, both; so of one request's blocks the last is reused first.
        """
        return self.put_back_by(state, block_ids, to_head=self.is_uncached(state, block_ids))

    def is_uncached(self, state: State, block_ids: tuple[int, ...]) -> frozenset[int]:
        """Those of the blocks that hold nothing the cache knows."""
        return frozenset(b for b in block_ids if state.blocks[b].block_hash is None)

    def put_back_by(
        self, state: State, block_ids: tuple[int, ...], *, to_head: frozenset[int]
    ) -> State:
        """The free queue with these blocks added, some at its head, the others at its tail."""
        head = tuple(b for b in block_ids if b in to_head)
        tail = tuple(b for b in block_ids if b not in to_head)
        return attrs.evolve(state, free_block_queue=head + state.free_block_queue + tail)


class V0_27_0(V0_24_0):
    """Without prefix caching, freed blocks go to the tail again."""

    @rule("ALLOC-FREE-ORDER", "0.27.0 v1/core/block_pool.py:728-742")
    def put_back(self, state: State, block_ids: tuple[int, ...]) -> State:
        """Freed blocks that are cached, or that can't be, go to the tail, all others to the head.

        In the order given, both; so of one request's blocks the last is reused first.
        """
        to_head = self.is_uncached(state, block_ids)
        if not self.config.enable_prefix_caching:
            to_head = frozenset()
        return self.put_back_by(state, block_ids, to_head=to_head)


class V0_28_0(V0_27_0):
    """Two budgets; no negative chunks; a victim's place counts; freed blocks as in 0.24.0."""

    moot: ClassVar[frozenset[str]] = frozenset({"STEP-ASSERT"})

    @rule(
        "STEP-BUDGET",
        "0.28.0 v1/core/sched/scheduler.py:111-115,496,499,565-567,700-701,927,966",
    )
    def token_budget(self) -> int:
        """A step may schedule ``max_num_scheduled_tokens`` tokens, and no more than are batched."""
        limit = self.config.max_num_scheduled_tokens or self.config.max_num_batched_tokens
        return min(limit, self.config.max_num_batched_tokens)

    @rule("RUN-MODEL-LEN", "0.28.0 v1/core/sched/scheduler.py:474,571-576,604-606")
    def tokens_to_model_end(self, request: Request) -> int:
        """A running request that is at or beyond ``max_model_len - 1`` tokens computes nothing.

        It stays in ``running``, keeps its blocks, and is passed over.
        """
        return max(super().tokens_to_model_end(request), 0)

    @rule("PREEMPT-INDEX", "0.28.0 v1/core/sched/scheduler.py:650-656")
    def req_index_after(self, step: Step, victim: str) -> int:
        """Whoever comes next keeps the turn, wherever the victim stood."""
        stood_before = step.state.running.index(victim) < step.req_index
        return step.req_index - 1 if stood_before else step.req_index

    @rule("ALLOC-FREE-ORDER", "0.28.0 v1/core/block_pool.py:728-743")
    def put_back(self, state: State, block_ids: tuple[int, ...]) -> State:
        """Freed blocks that are cached go to the tail of the free queue, all others to its head.

        In the order given, both; so of one request's blocks the last is reused first.
        """
        return self.put_back_by(state, block_ids, to_head=self.is_uncached(state, block_ids))


class V0_29_0(V0_28_0):
    """``min_tokens`` no longer keeps a request from ending."""

    @rule("STEP-STOP", "0.29.0 v1/core/sched/utils.py:100-115")
    def finish_reason(self, request: Request) -> FinishReason | None:
        """A stop token or a limit on length ends a request, whatever its ``min_tokens``.

        ``min_tokens`` is left to the sampler, which gives no stop token before it.
        """
        return self.finish_reason_past_minimum(request)


class V0_31_0(V0_29_0):
    """The threshold spares a request that is alone; it may adapt; and fewer seats for admission."""

    lacks: ClassVar[frozenset[str]] = frozenset()

    @rule("STEP-THRESHOLD", "0.31.0 v1/core/sched/scheduler.py:614-626,679-680,1110-1111")
    def long_prefill_token_threshold(self, state: State) -> int:
        """With two requests or more, none gets more than ``long_prefill_token_threshold`` tokens.

        Adaptive, the threshold is at least an equal share of ``max_num_batched_tokens``. Waiting
        requests count; the number is that at the start of the step.
        """
        num_eligible_reqs = len(state.running) + len(state.waiting)
        threshold = self.config.long_prefill_token_threshold
        if threshold == 0 or num_eligible_reqs <= 1:
            return 0
        if self.config.long_prefill_token_threshold_adaptive:
            return max(threshold, self.config.max_num_batched_tokens // num_eligible_reqs)
        return threshold

    @rule("WAIT-SEATS", "0.31.0 v1/core/sched/scheduler.py:127-131,892-894")
    def has_free_seat(self, state: State) -> bool:
        """Admission goes on while fewer than ``max_num_active_seqs`` requests are running.

        Where that isn't set, ``max_num_seqs``.
        """
        seats = self.config.max_num_active_seqs or self.config.max_num_seqs
        return len(state.running) < seats


class V0_33_0(V0_31_0):
    """By priority, self-preemption doesn't end the running loop."""

    @rule("PREEMPT-SELF", "0.33.0 v1/core/sched/scheduler.py:982-994")
    def self_preemption_ends_loop(self) -> bool:
        """A request that has to preempt itself ends the running loop, but not by priority.

        There those behind it, who have a better priority, get their turn.
        """
        return self.config.policy == "fcfs"


#: Every revision, oldest first, by the first release that behaves so.
REVISIONS: dict[str, type[Scheduler]] = {
    "0.21.0": V0_21_0,
    "0.23.0": V0_23_0,
    "0.24.0": V0_24_0,
    "0.27.0": V0_27_0,
    "0.28.0": V0_28_0,
    "0.29.0": V0_29_0,
    "0.31.0": V0_31_0,
    "0.33.0": V0_33_0,
}
