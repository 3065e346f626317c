"""Requests that wait for admission, in the order of their ranks."""

from collections import deque
from collections.abc import Iterator

from kvwatch_engine.scheduling.request import Request


class WaitingQueue:
    """The lowest rank is served first; a preempted request returns to the place that its rank gives it.

    Engine thread only. Whether a new request may join is decided before, on the caller's thread (see `engine.py`).
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self.num_tokens = 0
        """Prompt tokens of all waiting requests."""

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of admission."""
        return iter(self._requests)

    @property
    def head(self) -> Request | None:
        """The request that is admitted next."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """Add a request at the place of its rank; O(1) for the last and for the first."""
        requests = self._requests
        self.num_tokens += request.num_prompt_tokens
        if not requests or request.rank > requests[-1].rank:
            requests.append(request)
            return
        index = 0
        while requests[index].rank < request.rank:
            index += 1
        requests.insert(index, request)

    def pop_head(self) -> Request:
        """Remove and return the request that is admitted next."""
        request = self._requests.popleft()
        self.num_tokens -= request.num_prompt_tokens
        return request

    def remove(self, request: Request) -> None:
        """Remove a request that was aborted while it waited."""
        self._requests.remove(request)
        self.num_tokens -= request.num_prompt_tokens
