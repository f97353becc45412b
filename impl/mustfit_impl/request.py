"""Requests, as the scheduler keeps them: mutable, a few numbers and a block table each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import Final

import attrs

from mustfit_impl.prefix_cache import Position
from mustfit_spec import FinishReason, NewRequest
from mustfit_spec.config import at_least
from mustfit_spec.scenario import not_empty

#: A number of tokens that is never reached.
NEVER: Final = 1 << 62

_uids = count()


class RequestError(ValueError):
    """A request that the scheduler doesn't take. It has changed nothing."""


def _names(given: Iterable[Hashable]) -> tuple[Hashable, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class HashedRequest:
    """A request of which only lengths are known, and which of its blocks equal somebody else's.

    As in a Mooncake trace. What it samples is its own: no other request's blocks equal those.

    Attributes:
        request_id: A name that no other live request has.
        num_prompt_tokens: The prompt, in tokens, at least one.
        hash_ids: For each block of the prompt that is full, in order, a name for its content: equal
            if and only if the content is, given that all blocks before are equal too. The blocks
            are the scheduler's own, of ``block_size`` tokens. Names beyond are left alone.
        max_tokens: Output tokens after which it ends, at least one.
        priority: Under the priority policy, smaller is served first.
        arrival_time: Breaks ties between equal priorities; earlier is served first.
    """

    request_id: str = not_empty()
    num_prompt_tokens: int = at_least(1)
    hash_ids: tuple[Hashable, ...] = attrs.field(default=(), converter=_names)
    max_tokens: int = at_least(1)
    priority: int = 0
    arrival_time: int = 0


class Request:
    """A request that has been added and has not ended.

    Attributes:
        request_id: Its name.
        priority_key: Where it stands under the priority policy; the smallest is served first.
        num_prompt_tokens: Its prompt, in tokens.
        num_tokens: Tokens known: the prompt and all output so far.
        num_computed_tokens: Tokens whose keys and values are in its blocks.
        block_ids: Its block table.
        num_cached_blocks: How many of these, from the start, are in the prefix cache.
        tail: Where the content of its last cached block stands in the prefix cache, if it has any.
        running: Whether it is in ``running``.
        finish_at: ``num_tokens`` with which it ends.
        finish_reason: Why it ends then.
        num_hit_tokens: Tokens that were in the prefix cache when it was last admitted.
        num_reached_tokens: Most tokens that were computed when it was preempted.
        entry: Its entry among the decoders (``decoders.py``), or 0 if it is none of them.
        started_at: By their clock, when it would have begun, had it always computed one a step.
    """

    __slots__ = (
        "block_ids",
        "entry",
        "finish_at",
        "finish_reason",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_hit_tokens",
        "num_prompt_tokens",
        "num_reached_tokens",
        "num_tokens",
        "priority_key",
        "request_id",
        "running",
        "started_at",
        "tail",
    )

    def __init__(self, given: NewRequest | HashedRequest, num_prompt_tokens: int) -> None:
        self.request_id = given.request_id
        self.priority_key = (given.priority, given.arrival_time, given.request_id)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_hit_tokens = 0
        self.num_reached_tokens = 0
        self.block_ids: list[int] = []
        self.num_cached_blocks = 0
        self.tail: Position | None = None
        self.running = False
        self.finish_at = NEVER
        self.finish_reason: FinishReason = "length"
        self.entry = 0
        self.started_at = 0

    def num_recomputed_tokens(self) -> int:
        """Tokens computed since it was last admitted that had been computed before."""
        again = min(self.num_computed_tokens, self.num_reached_tokens) - self.num_hit_tokens
        return max(again, 0)

    def contents(self, start: int, end: int) -> Sequence[Hashable]:
        """The contents of its blocks in these places, which have to be full of known tokens.

        One equals another's if and only if the tokens do, all blocks before being equal.
        """
        raise NotImplementedError


class _TokenRequest(Request):
    """A request whose tokens are known."""

    __slots__ = ("_block_size", "_contents", "_tokens")

    def __init__(self, given: NewRequest, block_size: int) -> None:
        super().__init__(given, len(given.prompt_token_ids))
        self._block_size = block_size
        self._tokens = given
        self._contents: list[tuple[int, ...]] = []

    def contents(self, start: int, end: int) -> Sequence[Hashable]:
        """Their tokens."""
        known = self._contents
        while len(known) < end:
            known.append(self._slice(len(known)))
        return known[start:end]

    def _slice(self, index: int) -> tuple[int, ...]:
        prompt, sampled = self._tokens.prompt_token_ids, self._tokens.sampled_token_ids
        start, end = index * self._block_size, (index + 1) * self._block_size
        before = len(prompt)
        if end <= before:
            return prompt[start:end]
        return prompt[start:] + sampled[max(start - before, 0) : end - before]


class _HashedRequest(Request):
    """A request of which only the names of its blocks' contents are known."""

    __slots__ = ("_hash_ids", "_own")

    def __init__(self, given: HashedRequest, block_size: int) -> None:
        super().__init__(given, given.num_prompt_tokens)
        self._hash_ids = given.hash_ids[: given.num_prompt_tokens // block_size]
        self._own = (_HashedRequest, next(_uids))

    def contents(self, start: int, end: int) -> Sequence[Hashable]:
        """The names that were given, and behind them one that nobody else has."""
        named = self._hash_ids[start:end]
        if len(named) < end - start:
            named += (self._own,) * (end - start - len(named))
        return named


def request_of(
    given: NewRequest | HashedRequest,
    *,
    block_size: int,
    max_model_len: int,
    min_tokens_counts: bool,
) -> Request:
    """The request that the scheduler keeps.

    Raises:
        RequestError: Fewer names than full blocks of the prompt, or names that can't be hashed.
    """
    request: Request
    if isinstance(given, HashedRequest):
        num_full_blocks = given.num_prompt_tokens // block_size
        if len(given.hash_ids) < num_full_blocks:
            raise RequestError(
                f"request {given.request_id!r}: {len(given.hash_ids)} hash_ids for the "
                f"{num_full_blocks} full blocks of its prompt; give one for each"
            )
        try:
            hash(given.hash_ids)
        except TypeError as error:
            raise RequestError(
                f"request {given.request_id!r}: hash_ids have to be hashable: {error}"
            ) from error
        request = _HashedRequest(given, block_size)
        output_limit, minimum, stop_at = given.max_tokens, 0, NEVER
    else:
        request = _TokenRequest(given, block_size)
        output_limit = given.output_limit
        minimum = given.min_tokens if min_tokens_counts else 0
        stop_at = _first_stop(given, max(minimum, 1))
    length_at = max(min(output_limit, max_model_len - request.num_prompt_tokens), minimum, 1)
    if stop_at <= length_at:
        request.finish_reason = "stop"
    request.finish_at = request.num_prompt_tokens + min(stop_at, length_at)
    return request


def _first_stop(given: NewRequest, minimum: int) -> int:
    """How many output tokens there are when the first one that ends the request is in.

    Output tokens before the minimum end nothing.
    """
    stops = {*given.stop_token_ids, given.eos_token_id} - {None}
    if not stops:
        return NEVER
    for number, token in enumerate(given.sampled_token_ids[minimum - 1 :], start=minimum):
        if token in stops:
            return number
    return NEVER
