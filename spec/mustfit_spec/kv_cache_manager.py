"""Allocation: how many blocks a request needs, whether they are there, and taking them.

Sources are those of vLLM 0.22.1, below ``vllm/``.
"""

from __future__ import annotations

import attrs

from mustfit_spec.block_pool import BlockPool
from mustfit_spec.rules import rule
from mustfit_spec.state import Request, State


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


@attrs.frozen
class KVCacheManager(BlockPool):
    """Rules about admission and allocation. ``allocate_slots`` puts them together."""

    @rule(
        "CACHE-LOOKUP",
        "0.22.1 v1/core/kv_cache_manager.py:210-211, "
        "v1/core/single_type_kv_cache_manager.py:507-518",
    )
    def get_computed_blocks(self, state: State, request: Request) -> tuple[int, ...]:
        """A prefix hit is the longest run of full blocks, from the start, that are all cached.

        Whether anybody holds them doesn't matter. Without prefix caching there is none.
        """
        if not self.config.enable_prefix_caching:
            return ()
        hit: list[int] = []
        for index in range(self.max_cache_hit_length(request) // self.config.block_size):
            block_id = self.get_cached_block(state, self.block_hash(request, index))
            if block_id is None:
                break
            hit.append(block_id)
        return tuple(hit)

    @rule("CACHE-LAST-TOKEN", "0.22.1 v1/core/kv_cache_manager.py:219-224")
    def max_cache_hit_length(self, request: Request) -> int:
        """The last known token is always computed anew, to have something to sample from.

        So where everything is cached and ends with a block, that whole block is computed anew.
        """
        return request.num_tokens - 1

    @rule("ALLOC-COUNT", "0.22.1 v1/core/single_type_kv_cache_manager.py:120,134-155,165-168")
    def get_num_blocks_to_allocate(
        self, state: State, request: Request, num_tokens: int, new_computed_blocks: tuple[int, ...]
    ) -> int:
        """Blocks taken from the free queue so that a request has slots for ``num_tokens`` tokens.

        These are the blocks for so many tokens, less those it holds, less those it hits; plus
        the inactive ones among those it hits.
        """
        num_required_blocks = cdiv(num_tokens, self.config.block_size)
        num_local_computed_blocks = len(request.block_ids) + len(new_computed_blocks)
        num_new_blocks = max(num_required_blocks - num_local_computed_blocks, 0)
        return num_new_blocks + self.get_num_evictable_blocks(state, new_computed_blocks)

    @rule("ALLOC-INACTIVE-HIT", "0.22.1 v1/core/single_type_kv_cache_manager.py:87,165-168")
    def get_num_evictable_blocks(self, state: State, new_computed_blocks: tuple[int, ...]) -> int:
        """A hit on an inactive cached block costs a free block; a hit on an active one doesn't.

        An inactive one is in the free queue, is counted as free, and leaves the queue when hit.
        """
        return sum(state.blocks[block_id].ref_cnt == 0 for block_id in new_computed_blocks)

    @rule("ALLOC-GATE", "0.22.1 v1/core/kv_cache_manager.py:346-360")
    def full_sequence_fits(
        self,
        state: State,
        request: Request,
        new_computed_blocks: tuple[int, ...],
        watermark_blocks: int,
    ) -> bool:
        """The gate: blocks for the whole known sequence are free at this instant.

        Nothing is reserved: blocks that others have been promised but not yet taken count as free.
        """
        num_blocks = self.get_num_blocks_to_allocate(
            state, request, self.full_num_tokens(request), new_computed_blocks
        )
        return num_blocks + watermark_blocks <= state.num_free_blocks

    @rule("ALLOC-GATE-LENGTH", "0.22.1 v1/core/kv_cache_manager.py:348")
    def full_num_tokens(self, request: Request) -> int:
        """The gate counts ``min(num_tokens, max_model_len)`` tokens: prompt and output so far.

        It doesn't count the output still to come.
        """
        return min(request.num_tokens, self.config.max_model_len)

    @rule("ALLOC-SLOTS", "0.22.1 v1/core/kv_cache_manager.py:338-344,362-365")
    def num_tokens_need_slot(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int,
        num_lookahead_tokens: int,
    ) -> int:
        """Slots are for computed, hit, new and lookahead tokens: at most ``max_model_len``."""
        total_computed_tokens = self.total_computed_tokens(request, num_new_computed_tokens)
        return min(
            total_computed_tokens + num_new_tokens + num_lookahead_tokens,
            self.config.max_model_len,
        )

    def total_computed_tokens(self, request: Request, num_new_computed_tokens: int) -> int:
        """Tokens that need no computing: computed before, or just hit; at most a whole model's."""
        return min(request.num_computed_tokens + num_new_computed_tokens, self.config.max_model_len)

    @rule("ALLOC-CHUNK", "0.22.1 v1/core/kv_cache_manager.py:377-389")
    def chunk_fits(
        self,
        state: State,
        request: Request,
        num_tokens_need_slot: int,
        new_computed_blocks: tuple[int, ...],
        watermark_blocks: int,
    ) -> bool:
        """Whoever asks, the blocks for the tokens of this step have to be free."""
        num_blocks = self.get_num_blocks_to_allocate(
            state, request, num_tokens_need_slot, new_computed_blocks
        )
        return num_blocks + watermark_blocks <= state.num_free_blocks

    @rule("ALLOC-WATERMARK", "0.22.1 has none")
    def watermark_blocks(self, request: Request, *, has_scheduled_reqs: bool) -> int:  # noqa: ARG002
        """No blocks are kept free beyond those asked for."""
        return 0

    @rule("ALLOC-REFUSE", "0.22.1 v1/core/kv_cache_manager.py:346-360,377-425")
    def allocate_slots(
        self,
        state: State,
        request: Request,
        num_new_tokens: int,
        *,
        new_computed_blocks: tuple[int, ...] = (),
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = True,
    ) -> State | None:
        """An allocation is made whole or not at all: refused, it leaves every bit as it was.

        Args:
            state: The state before.
            request: Who asks.
            num_new_tokens: Tokens to compute in this step.
            new_computed_blocks: The prefix hit, for a request that is being admitted.
            num_lookahead_tokens: Slots wanted beyond these tokens.
            full_sequence_must_fit: Whether the gate applies.
            has_scheduled_reqs: Whether anybody is running.

        Returns:
            The state with the blocks taken and the filled ones cached, or ``None`` if refused.
        """
        watermark_blocks = self.watermark_blocks(request, has_scheduled_reqs=has_scheduled_reqs)
        if full_sequence_must_fit and not self.full_sequence_fits(
            state, request, new_computed_blocks, watermark_blocks
        ):
            return None
        num_hit_tokens = len(new_computed_blocks) * self.config.block_size
        num_slots = self.num_tokens_need_slot(
            request, num_new_tokens, num_hit_tokens, num_lookahead_tokens
        )
        if not self.chunk_fits(state, request, num_slots, new_computed_blocks, watermark_blocks):
            return None
        state = self.take_blocks(state, request, num_slots, new_computed_blocks)
        total_computed_tokens = self.total_computed_tokens(request, num_hit_tokens)
        return self.cache_at_allocation(
            state, state.request(request.request_id), total_computed_tokens + num_new_tokens
        )

    @rule("ALLOC-TAKE", "0.22.1 v1/core/kv_cache_manager.py:391-409")
    def take_blocks(
        self, state: State, request: Request, num_slots: int, new_computed_blocks: tuple[int, ...]
    ) -> State:
        """Hit blocks are taken first, so that taking the new ones can't evict them."""
        state = self.touch(state, new_computed_blocks)
        held = request.block_ids + new_computed_blocks
        num_new_blocks = max(cdiv(num_slots, self.config.block_size) - len(held), 0)
        state, new_blocks = self.get_new_blocks(state, num_new_blocks)
        return state.with_request(
            attrs.evolve(
                request,
                block_ids=held + new_blocks,
                num_cached_blocks=request.num_cached_blocks + len(new_computed_blocks),
            )
        )

    @rule("CACHE-AT-ALLOCATION", "0.22.1 v1/core/kv_cache_manager.py:421-425")
    def cache_at_allocation(self, state: State, request: Request, num_tokens: int) -> State:
        """Blocks that this step is going to fill are cached now, before they are computed.

        So a request that is considered later in the same step can hit them. Lookahead slots hold
        no known tokens and are never cached.
        """
        return self.cache_full_blocks(state, request, min(num_tokens, request.num_tokens))
