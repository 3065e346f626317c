"""The lowest value of the last while, exact, in memory that does not grow with time.

    time ─────────────▶        t0        t1        t2   now
    value is at least      5    │    2    │    7    │    6
    window                            [────────────────────]     lowest: 2, which lasted into the window

A value that was reached before the window and still held when it began counts: an idle hour at 2 free blocks is not
an hour without a minimum.
"""

from collections import deque


class RollingMinimum:
    """Minimum of an integer over the last `window_ns`. One thread.

    Time is cut into stretches in which the value only falls. The caller says when one ends, and what the value was
    then; of the stretch that goes on it gives the value when it asks. Times do not go back. What a later and lower
    stretch hides is forgotten, so there are never more entries than distinct values.
    """

    def __init__(self, window_ns: int, start_ns: int) -> None:
        self._window_ns = window_ns
        self._filled_ns = start_ns + window_ns
        self._ended: deque[tuple[int, int]] = deque()
        """(lowest value, end) of stretches that are over: later ones end later and are higher."""
        self._now_ns = start_ns

    def end_stretch(self, lowest: int, now_ns: int) -> None:
        """Note that the value was `lowest` at the end of a stretch, and rises now. Amortised O(1)."""
        ended = self._ended
        while ended and ended[-1][0] >= lowest:
            ended.pop()
        ended.append((lowest, max(now_ns, self._now_ns)))
        self._advance(now_ns)

    def lowest(self, value: int, now_ns: int) -> int | None:
        """Return the minimum over the window that ends now; None until a whole window has been seen."""
        self._advance(now_ns)
        if self._now_ns < self._filled_ns:
            return None
        return min(self._ended[0][0], value) if self._ended else value

    def changes_ns(self, value: int) -> int:
        """Return when the minimum changes next if `value` stays; a time that is over if it never does."""
        if self._now_ns < self._filled_ns:
            return self._filled_ns
        is_lower = self._ended and self._ended[0][0] < value
        return self._ended[0][1] + self._window_ns if is_lower else -1

    def _advance(self, now_ns: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        begin_ns = self._now_ns - self._window_ns
        while self._ended and self._ended[0][1] <= begin_ns:
            self._ended.popleft()
