"""Which requests have run out of time. Engine thread only."""

from collections.abc import Callable
from heapq import heappop, heappush

from kvwatch_engine.scheduling.request import Request


class Deadlines:
    """Live requests with a deadline, the earliest first. O(log n) a request; a step without any costs a comparison."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []

    def add(self, request: Request) -> None:
        """Note a request's deadline, if it has one."""
        if request.deadline_ns is not None:
            heappush(self._heap, (request.deadline_ns, request.arrival, request.request_id))

    def pop_expired(self, now_ns: int, find: Callable[[str], Request | None]) -> list[Request]:
        """Return the live requests whose deadline has come, and forget them. `find` gives a live request by its id."""
        expired: list[Request] = []
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            _, arrival, request_id = heappop(heap)
            request = find(request_id)
            if request is not None and request.arrival == arrival:  # else it has ended, and the id may be another's
                expired.append(request)
        return expired
