"""The state of a scheduler: immutable, hashable, nothing derived, nothing shared."""

from __future__ import annotations

from enum import Enum

import attrs

from mustfit_spec.config import Config
from mustfit_spec.scenario import NewRequest

#: What makes two blocks equal: all tokens from the start of the sequence through the block's end.
#: vLLM chains a digest over the same tokens (0.22.1 v1/core/kv_cache_utils.py:661-684).
BlockHash = tuple[int, ...]

#: Stands in tables for "no block"; never handed out, never freed.
NULL_BLOCK = 0


class RequestStatus(Enum):
    """Where a request is. One that has finished is no longer part of the state."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"


@attrs.frozen(kw_only=True)
class KVCacheBlock:
    """One block of the pool.

    Attributes:
        block_id: Its place in the pool.
        ref_cnt: How many requests hold it. At 0 it is in the free queue.
        block_hash: Its content, while it is in the prefix cache.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHash | None = None


@attrs.frozen(kw_only=True)
class Request:
    """A request that has been added and has not ended.

    Attributes:
        given: What it was when it was added.
        status: Waiting, running, or preempted and waiting again.
        num_output_tokens: Tokens sampled so far. Preemption doesn't take them away.
        num_computed_tokens: Tokens whose keys and values are in its blocks.
        block_ids: Its block table: the blocks it holds, in order of position.
        num_cached_blocks: How many of these, from the start, count as cached.
    """

    given: NewRequest
    status: RequestStatus = RequestStatus.WAITING
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    num_cached_blocks: int = 0

    @property
    def request_id(self) -> str:
        """Its name."""
        return self.given.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and all output so far."""
        return len(self.given.prompt_token_ids) + self.num_output_tokens

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        """The tokens known, in order."""
        return self.given.prompt_token_ids + self.given.sampled_token_ids[: self.num_output_tokens]


@attrs.frozen(kw_only=True)
class State:
    """All that a scheduler remembers between two operations.

    Attributes:
        requests: Everybody who has been added and has not ended, in order of addition.
        waiting: Ids of those not running, the one that is served next first.
        running: Ids of those running, in order of admission.
        blocks: The pool, by block id.
        free_block_queue: Ids of the blocks that nobody holds, next to be handed out first. A block
            here may still be in the prefix cache: an inactive cached block.
        cached_block_ids: Ids of the blocks in the prefix cache, in the order they entered it.
    """

    requests: tuple[Request, ...] = ()
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    blocks: tuple[KVCacheBlock, ...]
    free_block_queue: tuple[int, ...]
    cached_block_ids: tuple[int, ...] = ()

    def request(self, request_id: str) -> Request:
        """The request of that name."""
        return next(r for r in self.requests if r.request_id == request_id)

    def has(self, request_id: str) -> bool:
        """Whether that request has been added and has not ended."""
        return any(r.request_id == request_id for r in self.requests)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, inactive cached ones among them."""
        return len(self.free_block_queue)

    def with_request(self, request: Request) -> State:
        """The same, with one request changed."""
        return attrs.evolve(
            self,
            requests=tuple(
                request if r.request_id == request.request_id else r for r in self.requests
            ),
        )

    def with_block(self, block: KVCacheBlock) -> State:
        """The same, with one block changed."""
        before, after = self.blocks[: block.block_id], self.blocks[block.block_id + 1 :]
        return attrs.evolve(self, blocks=(*before, block, *after))


def initial_state(config: Config) -> State:
    """Nobody there, every block free but the null block, in order of id.

    Source: vLLM 0.22.1, ``v1/core/block_pool.py:164-182``.
    """
    return State(
        blocks=tuple(KVCacheBlock(block_id=i) for i in range(config.num_gpu_blocks)),
        free_block_queue=tuple(i for i in range(config.num_gpu_blocks) if i != NULL_BLOCK),
    )
