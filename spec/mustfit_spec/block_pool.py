"""The block pool: the free queue, reference counts, and the prefix cache.

Sources are those of vLLM 0.22.1, below ``vllm/``.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from mustfit_spec.config import Config
from mustfit_spec.rules import rule
from mustfit_spec.state import BlockHash, Request, State


@attrs.frozen
class BlockPool:
    """Rules about blocks. Every method takes a state and returns what it asks for or a new one."""

    config: Config

    @rule("CACHE-HASH", "0.22.1 v1/core/kv_cache_utils.py:562-568,661-684")
    def block_hash(self, request: Request, index: int) -> BlockHash:
        """A block's content is every token from the sequence's start through the block's end.

        Prompt and output count alike.
        """
        return request.all_token_ids[: (index + 1) * self.config.block_size]

    @rule("CACHE-FIRST", "0.22.1 v1/core/block_pool.py:66-71")
    def get_cached_block(self, state: State, block_hash: BlockHash) -> int | None:
        """Of several cached blocks with equal content, a lookup finds the one cached first."""
        for block_id in state.cached_block_ids:
            if state.blocks[block_id].block_hash == block_hash:
                return block_id
        return None

    @rule(
        "CACHE-FULL",
        "0.22.1 v1/core/kv_cache_manager.py:413-414, "
        "v1/core/single_type_kv_cache_manager.py:298-302,311-321",
    )
    def cache_full_blocks(self, state: State, request: Request, num_tokens: int) -> State:
        """Of a request's blocks, those filled by its first ``num_tokens`` tokens enter the cache.

        A partly filled block never does. Nothing happens when prefix caching is off.
        """
        num_full_blocks = num_tokens // self.config.block_size
        if not self.config.enable_prefix_caching or num_full_blocks <= request.num_cached_blocks:
            return state
        for index in range(request.num_cached_blocks, min(num_full_blocks, len(request.block_ids))):
            state = self.cache_block(
                state, request.block_ids[index], self.block_hash(request, index)
            )
        return state.with_request(attrs.evolve(request, num_cached_blocks=num_full_blocks))

    @rule("CACHE-DUPLICATE", "0.22.1 v1/core/block_pool.py:79-89")
    def cache_block(self, state: State, block_id: int, block_hash: BlockHash) -> State:
        """A block enters the cache behind all others, also where its content is there already.

        Neither block replaces the other.
        """
        block = attrs.evolve(state.blocks[block_id], block_hash=block_hash)
        return attrs.evolve(
            state.with_block(block), cached_block_ids=(*state.cached_block_ids, block_id)
        )

    @rule("CACHE-EVICT", "0.22.1 v1/core/block_pool.py:350-352,380-390")
    def evict(self, state: State, block_id: int) -> State:
        """A cached block that is handed out for other content leaves the cache."""
        if state.blocks[block_id].block_hash is None:
            return state
        return attrs.evolve(
            state.with_block(attrs.evolve(state.blocks[block_id], block_hash=None)),
            cached_block_ids=tuple(b for b in state.cached_block_ids if b != block_id),
        )

    @rule("ALLOC-HEAD", "0.22.1 v1/core/block_pool.py:347")
    def get_new_blocks(self, state: State, num_blocks: int) -> tuple[State, tuple[int, ...]]:
        """New blocks come from the head of the free queue."""
        taken = state.free_block_queue[:num_blocks]
        state = attrs.evolve(state, free_block_queue=state.free_block_queue[num_blocks:])
        for block_id in taken:
            state = self.evict(state, block_id)
            state = self.take_reference(state, block_id)
        return state, taken

    @rule("CACHE-TOUCH", "0.22.1 v1/core/block_pool.py:410-415")
    def touch(self, state: State, block_ids: Iterable[int]) -> State:
        """A hit block gets one more holder; an inactive one leaves the free queue, from any place.

        It stays in the cache.
        """
        for block_id in block_ids:
            state = self.take_reference(state, block_id)
            state = attrs.evolve(
                state,
                free_block_queue=tuple(b for b in state.free_block_queue if b != block_id),
            )
        return state

    @rule("ALLOC-FREE", "0.22.1 v1/core/single_type_kv_cache_manager.py:346-353")
    def free(self, state: State, request: Request) -> State:
        """A request gives up all its blocks, the last one first.

        A block that somebody else holds too stays where it is; one that nobody holds any more
        goes to the free queue, and stays in the cache if it was there.
        """
        released: list[int] = []
        for block_id in reversed(request.block_ids):
            state = self.drop_reference(state, block_id)
            if state.blocks[block_id].ref_cnt == 0:
                released.append(block_id)
        state = state.with_request(attrs.evolve(request, block_ids=(), num_cached_blocks=0))
        return self.put_back(state, tuple(released))

    @rule("ALLOC-FREE-ORDER", "0.22.1 v1/core/block_pool.py:428-433")
    def put_back(self, state: State, block_ids: tuple[int, ...]) -> State:
        """Blocks that nobody holds any more go to the tail of the free queue, in the order given.

        So of one request's blocks the last is reused first.
        """
        return attrs.evolve(state, free_block_queue=state.free_block_queue + block_ids)

    @rule("CACHE-RESET", "0.22.1 v1/core/block_pool.py:463-477")
    def reset(self, state: State) -> State:
        """A reset empties the cache if no block is held, and otherwise does nothing.

        The free queue keeps its order.
        """
        if any(block.ref_cnt for block in state.blocks):
            return state
        for block_id in state.cached_block_ids:
            state = self.evict(state, block_id)
        return state

    def take_reference(self, state: State, block_id: int) -> State:
        """One more request holds the block."""
        block = state.blocks[block_id]
        return state.with_block(attrs.evolve(block, ref_cnt=block.ref_cnt + 1))

    def drop_reference(self, state: State, block_id: int) -> State:
        """One request fewer holds the block."""
        block = state.blocks[block_id]
        return state.with_block(attrs.evolve(block, ref_cnt=block.ref_cnt - 1))
