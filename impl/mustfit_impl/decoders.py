"""Running requests that decode: one token each a step, all at once, by counting steps.

While a request computes one token within its blocks, fills none and doesn't end, all that a step
changes of it are two numbers, by one. So these aren't written down: they follow from how many steps
were taken since. What a step costs then doesn't depend on how many such requests there are, and
steps in which nothing else happens can be taken in one stride.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from sys import maxsize
from typing import Final

from mustfit_impl.request import Request

#: Stands for "without end", where steps are counted.
FOR_EVER: Final = maxsize

#: Void entries that aren't worth the work of taking them out.
_VOID_KEPT: Final = 64


class Decoders:
    """Those running requests that have one token to compute, the last one sampled.

    While a request is one of these, its ``num_computed_tokens`` and ``num_tokens`` are out of date.

    Attributes:
        clock: Steps taken.
        size: How many requests there are.
    """

    __slots__ = ("_entries", "_events", "clock", "size")

    def __init__(self) -> None:
        self.clock = 0
        self.size = 0
        #: When something else happens, whether it is no end, and to whom. Void if it has left.
        self._events: list[tuple[int, bool, int, Request]] = []
        self._entries = 0

    def join(self, request: Request, until: int, *, ends: bool) -> None:
        """A request is one of these; until so many tokens are computed, that is all it does.

        Args:
            request: The request.
            until: The number of tokens, or one that has been reached.
            ends: Whether the step after that is its last.
        """
        clock, computed = self.clock, request.num_computed_tokens
        request.started_at = clock - computed
        request.entry = self._entries = self._entries + 1
        self.size += 1
        at = clock + until - computed if until > computed else clock
        heappush(self._events, (at, not ends, self._entries, request))

    def leave(self, request: Request) -> None:
        """A request is none of these any more; its numbers are up to date."""
        request.entry = 0
        self.size -= 1
        computed = self.clock - request.started_at
        request.num_computed_tokens = computed
        request.num_tokens = computed + 1
        # Void entries are mostly popped when their time comes; they must not pile up before.
        if len(self._events) > 2 * self.size + _VOID_KEPT:
            self._events = [event for event in self._events if event[3].entry == event[2]]
            heapify(self._events)

    def steps(self) -> int:
        """Steps, from now on, in which none of these does anything else."""
        events = self._events
        while events:
            at, _, entry, request = events[0]
            if request.entry == entry:
                return at - self.clock
            heappop(events)
        return FOR_EVER

    def somebody_ends(self) -> bool:
        """Whether the next step is somebody's last, if ``steps`` has just given 0."""
        return not self._events[0][1]

    def due(self) -> list[Request]:
        """Those who do something else in the next step. They leave."""
        due: list[Request] = []
        while self._events and self._events[0][0] <= self.clock:
            _, _, entry, request = heappop(self._events)
            if request.entry == entry:
                self.leave(request)
                due.append(request)
        return due
