"""The block pool: reference counts and the free queue.

Blocks are numbers, and what is known of them stands in lists. The free queue is an ordered
dictionary, so that a block leaves it from any place in constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mustfit_impl.prefix_cache import PrefixCache
from mustfit_impl.semantics import FreedToHead


class BlockPool:
    """The blocks, and who is free.

    Args:
        num_gpu_blocks: Blocks, the null block counted.
        freed_to_head: Which freed blocks are reused before all others.
        enable_prefix_caching: Whether blocks are ever cached.

    Attributes:
        ref_cnt: For each block, how many requests hold it.
        free: The free queue, next to be handed out first.
        cache: The prefix cache.
        num_blocks: Blocks that can be handed out.
        releases: Grows whenever blocks come back.
    """

    __slots__ = (
        "_all_freed_to_tail",
        "cache",
        "free",
        "num_blocks",
        "ref_cnt",
        "releases",
    )

    def __init__(
        self, *, num_gpu_blocks: int, freed_to_head: FreedToHead, enable_prefix_caching: bool
    ) -> None:
        self.ref_cnt = [0] * num_gpu_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_gpu_blocks))
        self.cache = PrefixCache(num_gpu_blocks)
        self.num_blocks = num_gpu_blocks - 1
        self.releases = 0
        self._all_freed_to_tail = freed_to_head == "none" or (
            freed_to_head == "uncached if prefixes are cached" and not enable_prefix_caching
        )

    def take(self, count: int) -> list[int]:
        """So many blocks from the head of the free queue; the cache forgets what they held."""
        popitem, ref_cnt = self.free.popitem, self.ref_cnt
        # By name, the argument would take half as long again.
        taken = [popitem(False)[0] for _ in range(count)]  # noqa: FBT003
        for block_id in taken:
            ref_cnt[block_id] = 1
        self.cache.forget(taken)
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Blocks that a lookup found get one holder more each, and leave the free queue."""
        ref_cnt, free = self.ref_cnt, self.free
        for block_id in block_ids:
            if not ref_cnt[block_id]:
                del free[block_id]
            ref_cnt[block_id] += 1

    def put_back(self, block_ids: Sequence[int]) -> None:
        """One holder fewer each; those that nobody holds any more become free, in this order."""
        self.releases += 1
        ref_cnt, free, branch_of = self.ref_cnt, self.free, self.cache.branch_of
        to_head: list[int] = []
        for block_id in block_ids:
            ref_cnt[block_id] = count = ref_cnt[block_id] - 1
            if not count:
                if branch_of[block_id] is None and not self._all_freed_to_tail:
                    to_head.append(block_id)
                else:
                    free[block_id] = None
        for block_id in reversed(to_head):
            free[block_id] = None
            free.move_to_end(block_id, last=False)

    def reset(self) -> bool:
        """Empties the cache, if nobody holds a block. Whether it did."""
        if len(self.free) < self.num_blocks:
            return False
        self.cache.clear(len(self.ref_cnt))
        return True
