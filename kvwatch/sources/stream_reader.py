"""Applies one publisher's batches in order, whatever the network did to them. No sockets.

Live batches come by `take_live`. When one is missing, or the publisher may be another one, the reader wants to be
*healed*: it holds live batches until `end_healing`, and takes replayed ones meanwhile. See `Healer`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan, nan

from kvwatch.sources.batch_order import BatchOrder, Verdict
from kvwatch.sources.complaints import Complaints
from kvwatch.sources.held_batches import HeldBatches
from kvwatch.sources.mirror import Mirror
from kvwatch.telemetry.clock import Clock
from kvwatch.wire.decoder import Decoder
from kvwatch.wire.foreign import Cleared, ForeignBatch

MAX_UNIX_SECONDS = 1e11
"""What lies beyond is no time of an engine, and too large to count in nanoseconds."""


@dataclass(slots=True)
class StreamCounts:
    """What happened to a stream, since the sidecar runs."""

    gaps: int = 0
    resets: int = 0
    duplicates: int = 0
    """Batches that came twice or too late, and were left out."""
    replays: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("complete", "incomplete", "failed"), 0))
    last_batch_ns: int | None = None
    """Our Unix time in ns at which the newest batch came in."""


class StreamReader:
    """One publisher's stream. Event loop only.

    Args:
        mirror: Gets what is decoded.
        decoder: Of this engine.
        complaints: Counts what is left out.
        clock: Tells when batches come in.
        can_replay: Whether what is missing can be asked for.
        on_lag: Is told of each live batch in order how long before, in ns, the engine says it was made.
    """

    def __init__(
        self,
        mirror: Mirror,
        decoder: Decoder,
        complaints: Complaints,
        clock: Clock,
        *,
        can_replay: bool,
        on_lag: Callable[[int], None] | None = None,
    ) -> None:
        self.mirror = mirror
        self.counts = StreamCounts()
        self.order = BatchOrder()
        self.held = HeldBatches()
        self.can_replay = can_replay
        self.wants_healing = False
        """Whether batches wait for a replay."""
        self._decoder = decoder
        self._complaints = complaints
        self._clock = clock
        self._on_lag = on_lag
        self._is_unverified = False

    # ------------------------------------------------------------ live

    def take_live(self, seq: int, payload: bytes) -> None:
        """A live batch came."""
        now_ns = self.counts.last_batch_ns = self._clock.wall_ns()
        batch = self._decoder.decode(payload)
        if self._is_to_be_left_out(seq, batch):
            return
        if self.wants_healing:
            self.held.hold_live(seq, payload)
            return
        verdict = self.order.judge(seq, payload, _time_of(batch))
        if verdict is Verdict.NEXT:
            self._apply(seq, payload, batch)
            self._note_lag(now_ns, batch)
        elif verdict is Verdict.RESTARTED:
            self._begin_anew(seq, payload, batch)
        elif verdict is Verdict.AHEAD:
            self._jump(seq, payload, batch)
        else:
            self.counts.duplicates += 1

    def note_connected(self) -> None:
        """A connection was made, so that batches or the engine's life may have been missed before."""
        self.order.is_life_in_doubt = self.order.next_seq is not None
        if not self.can_replay:
            self.note_unverified()

    def note_unverified(self) -> None:
        """No replay tells what was missed: until the next number shows that nothing was, the history is in doubt."""
        if self.order.is_life_in_doubt and self.mirror.is_whole:
            self._is_unverified = True
            self.mirror.doubt()

    def _jump(self, seq: int, payload: bytes, batch: ForeignBatch) -> None:
        if self.order.next_seq is not None:
            self.counts.gaps += 1
        if self.can_replay:
            self.wants_healing = True
            self.held.hold_live(seq, payload)
            return
        self._skip_to(seq)
        self._apply(seq, payload, batch)

    def _begin_anew(self, seq: int, payload: bytes, batch: ForeignBatch) -> None:
        self._forget_life(is_whole=seq == 0)
        if seq == 0 or not self.can_replay:
            self.order.skip_to(seq)
            self._apply(seq, payload, batch)
            return
        self.wants_healing = True
        self.held.hold_live(seq, payload)

    # ------------------------------------------------------------ healing

    @property
    def has_hole(self) -> bool:
        """Whether something is held that cannot be applied since batches before it are missing."""
        next_seq = self.order.next_seq
        lowest = self.held.lowest(at_least=next_seq or 0)
        return lowest is not None and lowest != next_seq

    def take_replayed(self, seq: int, payload: bytes) -> bool:
        """A replayed batch came. Return False if it shows that the publisher's life is another one: then ask from 0."""
        next_seq = self.order.next_seq
        if next_seq is not None and seq < next_seq:
            return self._is_same_life(seq, payload)
        batch = self._decoder.decode(payload)
        if self._is_to_be_left_out(seq, batch):
            return True
        if next_seq is None:
            self._skip_to(seq)
        if seq == self.order.next_seq:
            self._apply(seq, payload, batch)
        else:
            self.held.hold_numbered(seq, payload)
        return True

    def _is_same_life(self, seq: int, payload: bytes) -> bool:
        """Compare a replayed batch with the one that was seen under its number.

        A publisher that replays old batches as their sum has another one there, which begins with a clear. It says all
        that there is, so it is followed, whatever life it is of.
        """
        is_known = self.order.knows(seq, payload)
        if is_known is False:
            batch = self._decoder.decode(payload)
            if self._is_to_be_left_out(seq, batch):
                return True
            if not batch.events or not isinstance(batch.events[0], Cleared):
                return False
            self.order.skip_to(seq)
            self._apply(seq, payload, batch)
        elif is_known:
            self.order.is_life_in_doubt = False
        return True

    def begin_new_life(self) -> None:
        """The publisher turned out to be another one."""
        self._forget_life(is_whole=False)

    def begin_at_zero(self) -> None:
        """The publisher has published nothing so far."""
        if self.order.next_seq is None:
            self._skip_to(0)

    def advance(self) -> bool:
        """Apply what is held as far as numbers follow each other; return whether nothing is left."""
        while True:
            next_seq = self.order.next_seq
            payload = None if next_seq is None else self.held.take_numbered(next_seq)
            if payload is not None and next_seq is not None:
                self._apply(next_seq, payload, self._decoder.decode(payload))
                continue
            first = self.held.first_live()
            if first is None:
                self.held.forget_below(next_seq or 0)
                return len(self.held) == 0
            if next_seq is None:
                return False  # nothing tells where to begin: to be asked for, or to be given up
            if not self._advance_live(*first):
                return False

    def _advance_live(self, seq: int, payload: bytes) -> bool:
        """Do what the first live batch that is held calls for; return False if a replay must come first."""
        batch = self._decoder.decode(payload)
        verdict = self.order.judge(seq, payload, _time_of(batch))
        if verdict is Verdict.AHEAD:
            self.held.put_aside_first_live()
            return True
        if verdict is Verdict.RESTARTED:
            self._forget_life(is_whole=seq == 0)
            if seq > 0:
                return False
            self.order.skip_to(0)
        self.held.drop_first_live()
        if verdict in (Verdict.NEXT, Verdict.RESTARTED):
            self._apply(seq, payload, batch)
        return True

    def give_up_hole(self) -> None:
        """What is missing before the first batch held cannot be had: go on without it."""
        first = self.held.first_live()
        if self.order.next_seq is None and first is not None:
            self._skip_to(first[0])
            return
        lowest = self.held.lowest(at_least=self.order.next_seq or 0)
        if lowest is not None:
            self._skip_to(lowest)

    def end_healing(self) -> None:
        """Go on live: what is held is applied, holes are given up."""
        while not self.advance():
            self.give_up_hole()
        self.wants_healing = False

    # ------------------------------------------------------------ parts

    def _is_to_be_left_out(self, seq: int, batch: ForeignBatch) -> bool:
        """Whether a message is no batch and not the one expected: garbage proves neither a hole nor a new life."""
        if not batch.is_illegible or seq == self.order.next_seq:
            return False
        self._complaints.skipped(batch.skipped)
        return True

    def _note_lag(self, now_ns: int, batch: ForeignBatch) -> None:
        made = _time_of(batch)
        if self._on_lag is not None and made is not None and not isnan(made):
            self._on_lag(now_ns - int(made * 1e9))

    def _apply(self, seq: int, payload: bytes, batch: ForeignBatch) -> None:
        if batch.skipped:
            self._complaints.skipped(batch.skipped)
        if self._is_unverified:
            self._is_unverified = False
            if not batch.may_have_lost:
                self.mirror.confirm()
        num_shed = self.mirror.num_shed
        self.mirror.apply(batch)
        if self.mirror.num_shed > num_shed:
            self._complaints.warn(
                "an engine holds more blocks than are remembered, so they are not counted until it clears its cache or "
                "restarts; raise the option max_blocks",
                num_left_out=self.mirror.num_shed,
            )
        self.order.accept(seq, payload, _time_of(batch))

    def _skip_to(self, seq: int) -> None:
        """Go on with `seq`: the first of all is the start of the history, any other leaves batches out."""
        if self.order.next_seq is not None:
            self.mirror.lose(seq - self.order.next_seq)
        elif seq == 0:
            self.mirror.confirm()
        self._is_unverified = False
        self.order.skip_to(seq)

    def _forget_life(self, *, is_whole: bool) -> None:
        self.counts.resets += 1
        self._is_unverified = False
        self.mirror.reset("restart" if self.order.is_life_in_doubt else "sequence", is_whole=is_whole)
        self.held.forget_numbered()
        self.order.restart()


def _time_of(batch: ForeignBatch) -> float | None:
    """Return when a batch was made, as its engine says; NaN for what cannot be, None if it says nothing."""
    return batch.ts if batch.ts is None or 0 <= batch.ts < MAX_UNIX_SECONDS else nan
