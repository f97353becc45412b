"""The implementation's prefix cache by itself: what scenarios of a few requests can't show."""

from __future__ import annotations

from mustfit_impl.prefix_cache import PrefixCache

DEPTH = 3000


def test_conversations_that_fork_at_every_turn_are_forgotten_at_any_depth() -> None:
    """Not one call deeper for each fork: Python would give up at a thousand."""
    cache = PrefixCache(2 * DEPTH + 1)
    position = cache.root
    for level in range(DEPTH):
        cache.enter(position, ["left"], [2 * level + 1])
        position = cache.enter(position, ["right"], [2 * level + 2])
    deepest = 2 * DEPTH
    assert cache.find(["right"] * DEPTH)[0] == list(range(2, deepest + 1, 2))

    cache.forget(block_id for block_id in range(1, deepest))
    assert cache.find(["right"])[0] == []
    assert cache.root[0].forks
    cache.forget([deepest])
    assert not cache.root[0].forks
    assert not any(cache.branch_of)
