"""Every change of a request's state, with its events: start, fork, preemption, end. Engine thread only.

    waiting ──▶ running ──▶ finished
       ▲           │  ▲
       │ recompute │  └─────────────┐
       └───────────┴──▶ swapped ────┘

What waits and what is swapped out is in the queue, in order; on its way in, a request is in `arriving`.
"""

from bisect import insort
from collections.abc import Callable
from typing import Literal, NamedTuple

from kvwatch.telemetry.events import (
    AllocationFailed,
    FirstToken,
    RequestPreempted,
    RequestRecovered,
    RequestResumed,
    SwapAbandoned,
)
from kvwatch.telemetry.events.request import PreemptionMode, PreemptionReason
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.contracts.tiers import TransferKind
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.queue import WaitingQueue
from kvwatch_engine.scheduling.request import MAX_PREEMPTED_FOR, Request, RequestState, Sequence
from kvwatch_engine.scheduling.request_events import admitted_event, finished_event, queued_event


class Preempted(NamedTuple):
    """How and why a request was preempted."""

    mode: PreemptionMode
    reason: PreemptionReason
    recompute_ns: int | None = None
    """Estimated time to compute again what it loses; None when that is not known."""
    swap_ns: int | None = None
    """Estimated time to move its blocks out and in again; None when that is not known."""


class Lifecycle:
    """Moves requests between waiting, running, swapped and finished, and their blocks with them.

    Invariant: a request that does not run holds no block, unless a transfer of its blocks is in flight. The blocks of
    a request that ends then are released by the tiers, when the transfer has ended.
    """

    def __init__(
        self, manager: BlockManager, log: EventLog, drop_transfer: Callable[[str], None] = lambda _request_id: None
    ) -> None:
        """Create the lifecycle of no requests; `drop_transfer` tells the tiers to forget a request."""
        self.waiting = WaitingQueue()
        self.arriving: list[Request] = []
        """Requests that start or resume as soon as their blocks are filled: they are in the queue no more."""
        self.running: list[Request] = []
        """Running requests in the order of their ranks."""
        self._requests: dict[str, Request] = {}
        self._manager = manager
        self._log = log
        self._drop_transfer = drop_transfer

    def find(self, request_id: str) -> Request | None:
        """Return a live request."""
        return self._requests.get(request_id)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_admitted_sequences(self) -> int:
        """Live sequences of running and arriving requests, forked or still to be."""
        admitted = (*self.running, *self.arriving) if self.arriving else self.running
        return sum(len(request.live_sequences()) for request in admitted)

    def requests(self) -> list[Request]:
        """Return all live requests."""
        return list(self._requests.values())

    # ------------------------------------------------------------------ start

    def queue(self, request: Request) -> None:
        """Take a new request in."""
        self._requests[request.request_id] = request
        self.waiting.add(request)
        if self._log.active:
            self._log.append(queued_event(request, tells_content=self._manager.emit_token_ids))

    def hold(self, request: Request, transfer: TransferKind) -> None:
        """Take the head out of the queue: it has its blocks, and goes on when this transfer has filled them."""
        self._leave_queue(request)
        self.arriving.append(request)
        request.transfer = transfer

    def start(self, request: Request) -> None:
        """Let a request run that has its blocks: the head of the queue, or one whose transfer has ended."""
        if request.transfer is None:
            self._leave_queue(request)
        else:
            self.arriving.remove(request)
            request.transfer = None
            self._release_ended(request)
        was_swapped = request.state is RequestState.SWAPPED
        request.state = RequestState.RUNNING
        request.wait_reason = None
        insort(self.running, request, key=lambda each: each.rank)
        self.note_blocks(request)
        if request.preempted_ns is not None:
            self._note_resumed(request, "swap" if was_swapped else "recompute")
        else:
            self._note_admitted(request)

    def fail_allocation(self, request: Request, needed: int, available: int, *, is_admission: bool) -> None:
        """Report that a request needed more blocks than it could have."""
        if self._log.active:
            reason: Literal["admission", "growth"] = "admission" if is_admission else "growth"
            self._log.append(AllocationFailed(request.request_id, needed, available, reason))

    # ------------------------------------------------------------------ progress

    def fork_followers(self, request: Request) -> None:
        """Once the leader has computed what the others have in common with it: let them share its blocks.

        Samples share the prompt, beams all that they have in common; see `Request.forks_late`.
        """
        leader, *followers = request.live_sequences()
        if leader.num_computed < (leader.num_tokens if request.forks_late else request.num_prompt_tokens):
            return
        for follower in followers:
            self._fork(leader, follower, request.num_common_tokens(leader, follower))
        request.has_forked = True
        self.note_blocks(request)

    def go_on_from(self, sequence: Sequence, parent: Sequence) -> None:
        """Let a beam give up its own way and go on where another one is, all of whose tokens are computed."""
        self._manager.join(parent.owner, sequence.owner, parent.num_computed)
        sequence.num_computed = parent.num_computed
        sequence.chain = parent.chain.fork(parent.num_computed // self._manager.block_size)

    def note_token(self, sequence: Sequence) -> int | None:
        """Note the time of a generated token; return the ns since the sequence's previous one, None for its first."""
        now = self._log.now_ns
        request = sequence.request
        if request.first_token_ns is None:
            request.first_token_ns = now
            if self._log.active:
                self._log.append(FirstToken(request.request_id, now - request.queued_ns))
        previous, sequence.last_token_ns = sequence.last_token_ns, now
        request.last_token_ns = now
        return None if previous is None else now - previous

    def note_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that tokens `start` to `end` of a sequence were computed, some of them perhaps again."""
        sequence.num_computed = end
        again = min(end, sequence.num_lost) - start
        if again > 0:
            sequence.request.num_recomputed_tokens += again

    def note_recovered(self, request: Request) -> None:
        """Report a resumed request that has all tokens again that its preemption dropped, if it has."""
        if request.resumed_ns is None or not request.has_recovered:
            return
        if self._log.active:
            self._log.append(RequestRecovered(request.request_id, self._log.now_ns - request.resumed_ns))
        request.resumed_ns = None

    def note_blocks(self, request: Request) -> None:
        """Update the request's peak of distinct blocks."""
        owners = [sequence.owner for sequence in request.active_sequences()]
        request.peak_blocks = max(request.peak_blocks, self._manager.num_distinct_blocks(owners))

    # ------------------------------------------------------------------ preemption

    def preempt(self, victim: Request, beneficiary: Request | None, how: Preempted) -> None:
        """Have a running request return to its place in the queue.

        With mode `recompute` its blocks are released; with `swap` the transfer that is in flight does that.
        """
        active = victim.active_sequences()
        num_blocks = self._manager.num_blocks_freed_by([sequence.owner for sequence in active])
        tokens_at_risk = sum(sequence.num_computed for sequence in active)
        if how.mode == "recompute":
            for sequence in active:
                self._manager.release(sequence.owner, "preempted")
            self._lose_computed(victim)
            victim.state = RequestState.WAITING
        else:
            victim.state = RequestState.SWAPPED
        victim.wait_reason = None
        victim.num_preemptions += 1
        name = "" if beneficiary is None else beneficiary.request_id
        victim.preempted_for = (*victim.preempted_for, name)[-MAX_PREEMPTED_FOR:]
        victim.preempted_ns = victim.wait_since_ns = self._log.now_ns
        victim.resumed_ns = None
        self.running.remove(victim)
        self.waiting.add(victim)
        if self._log.active:
            self._log.append(
                RequestPreempted(
                    victim.request_id,
                    how.mode,
                    how.reason,
                    num_blocks,
                    tokens_at_risk,
                    name,
                    how.recompute_ns,
                    how.swap_ns,
                )
            )

    def abandon_swap(self, request: Request, reason: str) -> None:
        """Have a swapped request computed again, since its K/V was lost on the way. It holds no block any more."""
        if request in self.arriving:
            self.arriving.remove(request)
            self.waiting.add(request)
        request.transfer = None
        request.state = RequestState.WAITING
        self._lose_computed(request)
        self._drop_transfer(request.request_id)
        if self._log.active:
            self._log.append(SwapAbandoned(request.request_id, reason))

    def restart(self, request: Request) -> None:
        """Return an arriving request to the queue that has lost its blocks: what they wait for takes too long."""
        self.arriving.remove(request)
        request.transfer = None
        request.is_restorable = False
        for sequence in request.live_sequences():
            sequence.num_computed = 0
        self.waiting.add(request)

    # ------------------------------------------------------------------ end

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """End one sequence; the request ends with its last one. `error` is the class of what ended it."""
        request = sequence.request
        if sequence.finish_reason is not None:
            return
        request.error = request.error or error
        if not request.has_forked and sequence is request.live_sequences()[0]:
            self._hand_over(sequence)
        sequence.finish_reason = reason
        if request.transfer is None:
            is_cut_off = reason not in (FinishReason.STOP, FinishReason.LENGTH)
            self._manager.release(sequence.owner, "aborted" if is_cut_off else "finished")
        live = request.live_sequences()
        if not live:
            self._finish(request)
        elif len(live) == 1:
            request.has_forked = True

    def finish_request(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End all live sequences of a request, whatever its state. `error` is the class of what ended it."""
        request.has_forked = True  # nobody inherits the leader's blocks
        for sequence in request.live_sequences():
            self.finish_sequence(sequence, reason, error)

    # ------------------------------------------------------------------ parts

    def _leave_queue(self, request: Request) -> None:
        head = self.waiting.pop_head()
        assert request is head, "requests are admitted in order"

    def _release_ended(self, request: Request) -> None:
        """Release what sequences hold that ended while their blocks were away; a live one inherits the prompt."""
        held = self._manager.owners()
        for ended in request.sequences:
            if ended.finish_reason is None or ended.owner not in held:
                continue
            heir = request.live_sequences()[0]
            if heir.owner not in held:
                self._fork(ended, heir, min(ended.num_computed, request.num_prompt_tokens))
            self._manager.release(ended.owner, "finished")

    def _lose_computed(self, request: Request) -> None:
        for sequence in request.live_sequences():
            sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
            sequence.num_computed = 0
        if request.search is not None:
            request.search.forget_candidates()
        request.has_forked = len(request.live_sequences()) == 1

    def _fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        child.num_computed = self._manager.fork(parent.owner, child.owner, num_tokens)
        child.chain = parent.chain.fork(num_tokens // self._manager.block_size)

    def _hand_over(self, leader: Sequence) -> None:
        """A leader that ends before the fork leaves what it has computed of the prompt to the next sequence."""
        request = leader.request
        followers = request.live_sequences()[1:]
        if followers and request.state is RequestState.RUNNING:
            self._fork(leader, followers[0], min(leader.num_computed, request.num_prompt_tokens))

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request in self.arriving:
            self.arriving.remove(request)
        else:
            self.waiting.remove(request)
        if request.transfer is not None or request.state is RequestState.SWAPPED:
            self._drop_transfer(request.request_id)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
        if self._log.active:
            self._log.append(finished_event(request))

    def _note_admitted(self, request: Request) -> None:
        request.admitted_ns = self._log.now_ns
        request.num_cached_tokens = request.hits.total
        if self._log.active:
            is_looked_up = self._manager.enable_prefix_cache and request.is_scored
            block_size = self._manager.block_size if is_looked_up else None
            self._log.append(admitted_event(request, block_size))

    def _note_resumed(self, request: Request, mode: PreemptionMode) -> None:
        assert request.preempted_ns is not None, "only preempted requests resume"
        if self._log.active:
            found, again = (0, 0) if mode == "swap" else (request.hits.total, request.num_tokens_to_recompute)
            away_ns = self._log.now_ns - request.preempted_ns
            self._log.append(RequestResumed(request.request_id, mode, away_ns, found, again))
        request.resumed_ns = self._log.now_ns
        self.note_recovered(request)
