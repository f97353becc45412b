"""The queue of those who wait, by either policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from mustfit_impl.request import Request


class FcfsQueue(OrderedDict[Request, None]):
    """First come, first served. Every operation takes constant time.

    A dictionary itself, so that asking whether anybody waits is no call of a method.
    """

    __slots__ = ()

    def head(self) -> Request:
        """Who is served next."""
        return next(iter(self))

    def add(self, request: Request) -> None:
        """A new request waits behind all others."""
        self[request] = None

    def requeue(self, request: Request) -> None:
        """A preempted request waits before all others."""
        self[request] = None
        self.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        """It no longer waits, whatever its place."""
        del self[request]


class PriorityQueue:
    """The smallest priority, arrival and id first.

    A heap, so that a step doesn't sort. Who is removed from the middle stays in the heap until it
    is its head, or until half of the heap is such; so what an operation takes grows with the
    logarithm of the queue's length, averaged over operations.
    """

    __slots__ = ("_heap", "_pushes", "_requests")

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        # The number keeps requests themselves from being compared where all else is equal.
        self._heap: list[tuple[tuple[int, int, str], int, Request]] = []
        self._pushes = count()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda request: request.priority_key))

    def head(self) -> Request:
        """Who is served next."""
        heap = self._heap
        while self._requests.get((request := heap[0][2]).request_id) is not request:
            heappop(heap)
        return request

    def add(self, request: Request) -> None:
        """A request waits in its place."""
        self._requests[request.request_id] = request
        heappush(self._heap, (request.priority_key, next(self._pushes), request))

    requeue = add

    def remove(self, request: Request) -> None:
        """It no longer waits, whatever its place."""
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests):
            self._heap = [(r.priority_key, next(self._pushes), r) for r in self._requests.values()]
            heapify(self._heap)
