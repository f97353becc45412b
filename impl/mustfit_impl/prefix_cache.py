"""The prefix cache: which blocks hold what, so that a prefix is found.

A tree of contents. Most sequences go their own way after some block, and nobody follows them. So
what follows one another without a fork stands in one list, a branch, and entering a chunk's blocks
or walking along a prompt goes through lists. Another branch begins where a sequence leaves a list.
A block's content is compared only with those in the same place behind the same contents, so it is
never hashed or compared together with what comes before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

#: Stands for "no block"; never handed out, never freed.
NULL_BLOCK: Final = 0


class Branch:
    """Contents that follow one another.

    Attributes:
        parent: The branch that it leaves; ``None`` for the root, which has no contents.
        fork: The place in the parent behind which it does.
        first: The first content, by which the parent knows it.
        contents: The contents, at least one, of which the last is cached or has a fork behind it.
        block_ids: For each, of the cached blocks with this content the one cached first; 0 if there
            is none.
        later: The others, by place, in the order in which they were cached.
        forks: The branches that leave behind a place, by their first content.
    """

    __slots__ = ("block_ids", "contents", "first", "fork", "forks", "later", "parent")

    def __init__(self, parent: Branch | None, fork: int, first: Hashable) -> None:
        self.parent = parent
        self.fork = fork
        self.first = first
        self.contents: list[Hashable] = []
        self.block_ids: list[int] = []
        self.later: dict[int, OrderedDict[int, None]] = {}
        self.forks: dict[int, dict[Hashable, Branch]] = {}


#: A place in the tree: some content, and all before it. The branch, and the place in it; -1 for the
#: root. A plain tuple, because making a named one takes several times as long.
Position = tuple[Branch, int]


#: What was found of a prefix: the blocks in order, the content of the last of them, and the content
#: that was sought behind it, if one was.
Hit = tuple[list[int], Position, Hashable]


class PrefixCache:
    """The contents of cached blocks.

    Args:
        num_gpu_blocks: Blocks, the null block counted.

    Attributes:
        root: The content of no block.
        branch_of: For each block, where its content stands, while it is cached.
        place_of: For each block, in which place.
        changes: Grows whenever the hit that is watched may have changed.
    """

    __slots__ = (
        "_watched_end",
        "_watched_hit",
        "_watched_missing",
        "branch_of",
        "changes",
        "place_of",
        "root",
    )

    def __init__(self, num_gpu_blocks: int) -> None:
        self.changes = 0
        self.clear(num_gpu_blocks)

    def clear(self, num_gpu_blocks: int) -> None:
        """Nothing is cached any more."""
        self.changes += 1
        self.root = (Branch(None, -1, None), -1)
        self.branch_of: list[Branch | None] = [None] * num_gpu_blocks
        self.place_of = [0] * num_gpu_blocks
        self._watched_hit: frozenset[int] = frozenset()
        self._watched_end = self.root
        self._watched_missing: Hashable = None

    def find(self, contents: Sequence[Hashable]) -> Hit:
        """The longest run of cached blocks that begins with the first content."""
        found: list[int] = []
        end = self.root
        branch, place = end
        for content in contents:
            following = place + 1
            if following < len(branch.contents) and branch.contents[following] == content:
                place = following
            else:
                forks = branch.forks.get(place)
                other = None if forks is None else forks.get(content)
                if other is None:
                    return found, end, content
                branch, place = other, 0
            block_id = branch.block_ids[place]
            if not block_id:
                return found, end, content
            found.append(block_id)
            end = branch, place
        return found, end, None

    def watch(self, hit: Hit) -> None:
        """Watches a hit, to count what may change it."""
        block_ids, self._watched_end, self._watched_missing = hit
        self._watched_hit = frozenset(block_ids)

    def enter(
        self, position: Position, contents: Sequence[Hashable], block_ids: Sequence[int]
    ) -> Position:
        """Blocks enter the cache, each behind all others of the same content.

        Args:
            position: The content before the first of them.
            contents: Their contents.
            block_ids: The blocks.

        Returns:
            The content of the last of them.
        """
        branch, place = position
        branch_of, place_of = self.branch_of, self.place_of
        forks = branch.forks.get(place)
        if place + 1 < len(branch.contents) or (forks is not None and contents[0] in forks):
            return self._enter_one_by_one(position, contents, block_ids)
        if position == self._watched_end and contents[0] == self._watched_missing:
            self.changes += 1
        # Nobody has gone on from here before, or not this way: all of them stand in one list.
        if branch.parent is None:
            branch, place = self._fork(branch, place, contents[0]), -1
        branch.contents += contents
        branch.block_ids += block_ids
        for block_id in block_ids:
            place += 1
            branch_of[block_id] = branch
            place_of[block_id] = place
        return branch, place

    def forget(self, block_ids: Iterable[int]) -> None:
        """Blocks leave the cache, if they are in it."""
        branch_of, watched = self.branch_of, self._watched_hit
        for block_id in block_ids:
            branch = branch_of[block_id]
            if branch is None:
                continue
            branch_of[block_id] = None
            if block_id in watched:
                self.changes += 1
            ids = branch.block_ids
            if ids[-1] == block_id and not branch.later and not branch.forks:
                # As for most: nothing begins with it, and nobody else has it.
                ids.pop()
                branch.contents.pop()
                if not ids or not ids[-1]:
                    self._trim(branch)
            else:
                self._leave_hole(branch, self.place_of[block_id], block_id)

    def _leave_hole(self, branch: Branch, place: int, block_id: int) -> None:
        """A block leaves a place where others may be, or behind which there may be others."""
        others = branch.later.get(place)
        if others is None:
            branch.block_ids[place] = NULL_BLOCK
            self._trim(branch)
            return
        if branch.block_ids[place] != block_id:
            del others[block_id]
        else:
            branch.block_ids[place], _ = others.popitem(last=False)
        if not others:
            del branch.later[place]

    def _enter_one_by_one(
        self, position: Position, contents: Sequence[Hashable], block_ids: Sequence[int]
    ) -> Position:
        """The same, where others went on from here before."""
        branch, place = position
        for content, block_id in zip(contents, block_ids, strict=True):
            if (branch, place) == self._watched_end and content == self._watched_missing:
                self.changes += 1
            branch, place = self._step(branch, place, content)
            if not branch.block_ids[place]:
                branch.block_ids[place] = block_id
            elif place in branch.later:
                branch.later[place][block_id] = None
            else:
                branch.later[place] = OrderedDict({block_id: None})
            self.branch_of[block_id] = branch
            self.place_of[block_id] = place
        return branch, place

    def _step(self, branch: Branch, place: int, content: Hashable) -> tuple[Branch, int]:
        """Where a content stands that follows another; it is entered if it isn't there yet."""
        following = place + 1
        if following < len(branch.contents) and branch.contents[following] == content:
            return branch, following
        forks = branch.forks.get(place)
        if forks is not None and content in forks:
            return forks[content], 0
        if following < len(branch.contents) or branch.parent is None:
            branch, following = self._fork(branch, place, content), 0
        branch.contents.append(content)
        branch.block_ids.append(NULL_BLOCK)
        return branch, following

    def _fork(self, branch: Branch, place: int, content: Hashable) -> Branch:
        """A new branch, still empty, that begins with that content."""
        made = Branch(branch, place, content)
        branch.forks.setdefault(place, {})[content] = made
        return made

    def _trim(self, branch: Branch) -> None:
        """Forgets contents at the end of a branch that no cached block has or begins with.

        And the branch itself, if none are left, and so on with the one that it leaves.
        """
        while branch.parent is not None:
            ids, forks = branch.block_ids, branch.forks
            while ids and not ids[-1] and len(ids) - 1 not in forks:
                ids.pop()
                branch.contents.pop()
            if ids:
                return
            parent = branch.parent
            siblings = parent.forks[branch.fork]
            del siblings[branch.first]
            if siblings:
                return
            del parent.forks[branch.fork]
            branch = parent
