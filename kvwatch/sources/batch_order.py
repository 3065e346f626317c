"""Where a reader is in the numbers of a publisher's batches, and what the next number means.

A publisher numbers its batches from 0, one by one, and begins anew when its process does. So a number that is lower
than expected is a batch that was seen already, one that comes late, or the sign of a new life. The payloads tell
them apart: those of the last batches are remembered by a digest, and time goes on within one life.
"""

from collections import deque
from enum import StrEnum

REMEMBERED = 1_024
"""Batches whose digest is kept."""


class Verdict(StrEnum):
    """What a numbered batch is to the reader."""

    NEXT = "next"
    AHEAD = "ahead"
    """Batches before it are missing, or it is the first that is seen."""
    DUPLICATE = "duplicate"
    LATE = "late"
    """Of this life, but it was given up or seen long ago."""
    RESTARTED = "restarted"
    """Of another life."""


class BatchOrder:
    """A place in one publisher's sequence."""

    __slots__ = ("_digests", "_last_ts", "_remembered", "_suspect", "is_life_in_doubt", "next_seq")

    def __init__(self) -> None:
        self.next_seq: int | None = None
        """Number of the next batch; None before any is known."""
        self.is_life_in_doubt = False
        """Whether the connection was lost since the last batch: then a lower number is a new life without more ado."""
        self._digests: dict[int, int] = {}
        self._remembered: deque[int] = deque()
        self._last_ts = 0.0
        self._suspect = -1

    def judge(self, seq: int, payload: bytes, ts: float | None) -> Verdict:
        """Say what a batch is. Changes nothing but the memory of the last number that was suspicious."""
        if self.next_seq is None or seq > self.next_seq:
            return Verdict.AHEAD
        if seq == self.next_seq:
            return Verdict.NEXT
        is_known = self.knows(seq, payload)
        if is_known:
            return Verdict.DUPLICATE
        if self.is_life_in_doubt or self._is_of_new_life(seq, ts, is_other=is_known is False):
            return Verdict.RESTARTED
        self._suspect = seq
        return Verdict.LATE

    def _is_of_new_life(self, seq: int, ts: float | None, *, is_other: bool) -> bool:
        """Whether a number that was used before is used anew. `is_other`: with another payload than before.

        Another payload alone proves nothing: a publisher may replay old batches as their sum, under their numbers. Nor
        does the time: batches may come late. And a clock may go back, which two batches that begin anew show.
        """
        is_newer = ts is None or ts >= self._last_ts if is_other else ts is not None and ts > self._last_ts
        return is_newer or (is_other and seq == 0) or (seq == 1 and self._suspect == 0)

    def knows(self, seq: int, payload: bytes) -> bool | None:
        """Whether this is the batch that was seen under a number; None if it was not seen or is long forgotten."""
        digest = self._digests.get(seq)
        return None if digest is None else digest == hash(payload)

    def accept(self, seq: int, payload: bytes, ts: float | None) -> None:
        """A batch was applied; the next one follows it."""
        self.next_seq = seq + 1
        self.is_life_in_doubt = False
        self._suspect = -1
        if ts is not None and ts > self._last_ts:
            self._last_ts = ts
        self._digests[seq] = hash(payload)
        if seq == 0:
            return  # never forgotten: it tells lives apart
        self._remembered.append(seq)
        if len(self._remembered) > REMEMBERED:
            self._digests.pop(self._remembered.popleft(), None)

    def skip_to(self, seq: int) -> None:
        """Give up what is missing before `seq`, or begin with it."""
        self.next_seq = seq

    def restart(self) -> None:
        """Forget everything: another life began."""
        self.next_seq = None
        self.is_life_in_doubt = False
        self._digests.clear()
        self._remembered.clear()
        self._last_ts = 0.0
        self._suspect = -1
