"""The block pool: reference counts, the free queue, and the prefix cache.

Blocks are numbers, and what is known of them stands in lists. The free queue is an ordered
dictionary, so that a block leaves it from any place in constant time. The prefix cache is a tree:
a node stands for the content of a block and of all blocks before it, so that a lookup compares one
block's content a level, and a content is never compared as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from mustfit_impl.semantics import FreedToHead

#: Stands for "no block"; never handed out, never freed.
NULL_BLOCK: Final = 0


class Node:
    """The content of a block, given all blocks before it.

    It is there while a cached block has this content or one that begins with it.

    Attributes:
        parent: The content that ends with the block before; ``None`` for the root.
        content: The block's own content.
        children: Contents one block longer.
        block_id: Of the cached blocks with this content, the one cached first; 0 if there is none.
        later: The others, in the order in which they were cached.
    """

    __slots__ = ("block_id", "children", "content", "later", "parent")

    def __init__(self, parent: Node | None, content: Hashable) -> None:
        self.parent = parent
        self.content = content
        self.children: dict[Hashable, Node] = {}
        self.block_id = NULL_BLOCK
        self.later: OrderedDict[int, None] | None = None


class BlockPool:
    """The blocks, who is free and who is cached.

    Args:
        num_gpu_blocks: Blocks, the null block counted.
        freed_to_head: Which freed blocks are reused before all others.
        enable_prefix_caching: Whether blocks are ever cached.

    Attributes:
        ref_cnt: For each block, how many requests hold it.
        node: For each block, its content while it is cached.
        free: The free queue, next to be handed out first.
        num_blocks: Blocks that can be handed out.
        root: Of the prefix cache: the content of no block.
        changes: Grows whenever anything changed.
        releases: Grows whenever anything changed that can make a sequence need fewer blocks, or
            leave it more: blocks were freed or got another holder, or the hit that is watched
            changed.
    """

    __slots__ = (
        "_all_freed_to_tail",
        "_watched_content",
        "_watched_end",
        "_watched_hit",
        "changes",
        "free",
        "node",
        "num_blocks",
        "ref_cnt",
        "releases",
        "root",
    )

    def __init__(
        self, *, num_gpu_blocks: int, freed_to_head: FreedToHead, enable_prefix_caching: bool
    ) -> None:
        self.ref_cnt = [0] * num_gpu_blocks
        self.node: list[Node | None] = [None] * num_gpu_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_gpu_blocks))
        self.num_blocks = num_gpu_blocks - 1
        self.root = Node(None, None)
        self.releases = 0
        self.changes = 0
        self._watched_hit: frozenset[Node] = frozenset()
        self._watched_end: Node | None = None
        self._watched_content: Hashable = None
        self._all_freed_to_tail = freed_to_head == "none" or (
            freed_to_head == "uncached if prefixes are cached" and not enable_prefix_caching
        )

    def take(self, count: int) -> list[int]:
        """So many blocks from the head of the free queue; the cache forgets what they held."""
        self.changes += 1
        popitem = self.free.popitem
        taken = [popitem(last=False)[0] for _ in range(count)]
        ref_cnt, node = self.ref_cnt, self.node
        for block_id in taken:
            ref_cnt[block_id] = 1
            if (content := node[block_id]) is not None:
                self._evict(block_id, content)
        return taken

    def touch(self, nodes: Iterable[Node]) -> list[int]:
        """The blocks that a lookup found, one holder more each, out of the free queue."""
        self.changes += 1
        self.releases += 1
        ref_cnt, free = self.ref_cnt, self.free
        block_ids = [node.block_id for node in nodes]
        for block_id in block_ids:
            if not ref_cnt[block_id]:
                del free[block_id]
            ref_cnt[block_id] += 1
        return block_ids

    def put_back(self, block_ids: Sequence[int]) -> None:
        """One holder fewer each; those that nobody holds any more become free, in this order."""
        self.changes += 1
        self.releases += 1
        ref_cnt, free, node = self.ref_cnt, self.free, self.node
        to_head: list[int] = []
        for block_id in block_ids:
            ref_cnt[block_id] -= 1
            if not ref_cnt[block_id]:
                if node[block_id] is None and not self._all_freed_to_tail:
                    to_head.append(block_id)
                else:
                    free[block_id] = None
        for block_id in reversed(to_head):
            free[block_id] = None
            free.move_to_end(block_id, last=False)

    def cache(
        self, block_ids: Sequence[int], parent: Node, contents: Iterable[Hashable]
    ) -> list[Node]:
        """Blocks enter the cache, each behind all others of the same content.

        Args:
            block_ids: The blocks, which follow each other in somebody's sequence.
            parent: The content before the first of them.
            contents: Their contents.

        Returns:
            Where they stand now.
        """
        self.changes += 1
        watched, node_of = self._watched_end, self.node
        nodes: list[Node] = []
        for block_id, content in zip(block_ids, contents, strict=True):
            node = parent.children.get(content)
            if node is None:
                node = parent.children[content] = Node(parent, content)
            if not node.block_id:
                node.block_id = block_id
                if parent is watched and content == self._watched_content:
                    self.releases += 1
            elif node.later is None:
                node.later = OrderedDict({block_id: None})
            else:
                node.later[block_id] = None
            node_of[block_id] = node
            nodes.append(node)
            parent = node
        return nodes

    def watch(self, hit: Sequence[Node], missing: Hashable) -> None:
        """Watches a prefix hit, to count a change of it among the releases.

        Args:
            hit: What was found.
            missing: The content that was looked for behind it, and not found.
        """
        self._watched_hit = frozenset(hit)
        self._watched_end = hit[-1] if hit else self.root
        self._watched_content = missing

    def child(self, parent: Node, content: Hashable) -> Node:
        """The content one block longer."""
        node = parent.children.get(content)
        if node is None:
            node = parent.children[content] = Node(parent, content)
        return node

    def reset(self) -> bool:
        """Empties the cache, if nobody holds a block. Whether it did."""
        if len(self.free) < self.num_blocks:
            return False
        self.changes += 1
        self.releases += 1
        self.root = Node(None, None)
        self.node = [None] * len(self.node)
        return True

    def _evict(self, block_id: int, node: Node) -> None:
        """The cache forgets a block."""
        self.node[block_id] = None
        if node.later and node.block_id != block_id:
            del node.later[block_id]
            return
        if node in self._watched_hit:
            self.releases += 1
        if node.later:
            node.block_id = node.later.popitem(last=False)[0]
            return
        node.block_id = NULL_BLOCK
        # Contents that no cached block has or begins with are forgotten.
        while not node.block_id and not node.children and node.parent is not None:
            del node.parent.children[node.content]
            node = node.parent
