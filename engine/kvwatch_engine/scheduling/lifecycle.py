"""Every change of a request's state, with its events: admission, fork, preemption, end. Engine thread only."""

from itertools import takewhile
from typing import Literal

from kvwatch.telemetry.events import (
    AllocationFailed,
    FirstToken,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestRecovered,
    RequestResumed,
)
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.queue import WaitingQueue
from kvwatch_engine.scheduling.request import Request, RequestState, Sequence

_SEVERITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class Lifecycle:
    """Moves requests between waiting, running and finished, and their blocks with them.

    Invariant: waiting and finished requests hold no block.
    """

    def __init__(self, manager: BlockManager, log: EventLog) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        """Running requests in order of arrival."""
        self._requests: dict[str, Request] = {}
        self._manager = manager
        self._log = log

    def find(self, request_id: str) -> Request | None:
        """Return a live request."""
        return self._requests.get(request_id)

    @property
    def num_running_sequences(self) -> int:
        """Live sequences of running requests, forked or still to be."""
        return sum(len(request.live_sequences()) for request in self.running)

    def requests(self) -> list[Request]:
        """Return all live requests."""
        return list(self._requests.values())

    # ------------------------------------------------------------------ start

    def queue(self, request: Request) -> None:
        """Take a new request in."""
        self._requests[request.request_id] = request
        self.waiting.add(request)
        if self._log.active:
            self._log.append(_queued_event(request))

    def find_prefix(self, request: Request) -> list[BlockId]:
        """Return the blocks of a waiting request's longest known prefix; the last token is always left out.

        Its logits are needed, so at least the last token runs through the model.
        """
        if not self._manager.enable_prefix_cache:
            return []
        leader = request.live_sequences()[0]
        num_blocks = (leader.num_tokens - 1) // self._manager.block_size
        return self._manager.find_prefix(leader.chain.upto(num_blocks, leader.tokens)[:num_blocks])

    def num_blocks_needed(self, request: Request, prefix: list[BlockId]) -> int:
        """Return how many free blocks a waiting request takes for all tokens it has, over all its sequences."""
        leader, *followers = request.live_sequences()
        shared = request.num_prompt_tokens // self._manager.block_size
        needed = self._manager.num_blocks_missing(prefix, leader.num_tokens)
        return needed + sum(
            self._manager.blocks_for(follower.num_tokens) - shared
            for follower in followers
            if follower.output_token_ids
        )

    def admit(self, request: Request, prefix: list[BlockId]) -> None:
        """Start or resume the head of the queue, whose blocks were counted before."""
        assert request is self.waiting.head, "requests are admitted in order"
        leader = request.live_sequences()[0]
        is_first = request.preempted_ns is None
        # Before the request's own blocks are taken, which may evict more.
        regretted = self._num_regretted_tokens(leader, len(prefix)) if is_first and self._log.active else 0
        opened = self._manager.open(leader.owner, prefix, leader.num_tokens)
        assert opened, "free blocks were counted before"
        self.waiting.pop_head()
        self.running.append(request)
        request.state = RequestState.RUNNING
        request.wait_reason = None
        leader.num_computed = len(prefix) * self._manager.block_size
        self.note_blocks(request)
        if is_first:
            self._note_admitted(request, leader.num_computed, regretted)
        else:
            self._note_resumed(request, leader.num_computed)

    def fail_allocation(self, request: Request, needed: int, available: int, *, is_admission: bool) -> None:
        """Report that a request needed more blocks than it could have."""
        if self._log.active:
            reason: Literal["admission", "growth"] = "admission" if is_admission else "growth"
            self._log.append(AllocationFailed(request.request_id, needed, available, reason))

    # ------------------------------------------------------------------ progress

    def fork_followers(self, request: Request) -> None:
        """Once the leader has computed the prompt: let the other sequences share its blocks."""
        leader, *followers = request.live_sequences()
        if leader.num_computed < request.num_prompt_tokens:
            return
        for follower in followers:
            self._fork(leader, follower, request.num_prompt_tokens)
        request.has_forked = True
        self.note_blocks(request)

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

    def preempt(self, victim: Request, beneficiary: Request) -> None:
        """Take a running request's blocks; it returns to its place in the queue and computes them again later."""
        active = victim.active_sequences()
        num_blocks = self._manager.num_blocks_freed_by([sequence.owner for sequence in active])
        tokens_at_risk = sum(sequence.num_computed for sequence in active)
        for sequence in active:
            self._manager.release(sequence.owner, "preempted")
            sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
            sequence.num_computed = 0
        victim.has_forked = len(victim.live_sequences()) == 1
        victim.state = RequestState.WAITING
        victim.num_preemptions += 1
        victim.preempted_ns = self._log.now_ns
        victim.resumed_ns = None
        self.running.remove(victim)
        self.waiting.add(victim)
        if self._log.active:
            self._log.append(
                RequestPreempted(
                    victim.request_id,
                    "recompute",
                    "blocks",
                    num_blocks,
                    tokens_at_risk,
                    beneficiary.request_id,
                )
            )

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
        is_aborted = reason in (FinishReason.ABORT, FinishReason.ERROR)
        self._manager.release(sequence.owner, "aborted" if is_aborted else "finished")
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
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
        if self._log.active:
            self._log.append(_finished_event(request))

    def _note_admitted(self, request: Request, hit_tokens: int, regretted_tokens: int) -> None:
        now = self._log.now_ns
        request.admitted_ns = now
        request.num_cached_tokens = hit_tokens
        if not self._log.active:
            return
        size = self._manager.block_size
        queried = request.num_prompt_tokens if self._manager.enable_prefix_cache else 0
        can_hit = (request.num_prompt_tokens - 1) // size * size
        self._log.append(
            RequestAdmitted(
                request.request_id,
                request.num_prompt_tokens,
                queried,
                hit_tokens,
                queried - can_hit if queried else 0,
                now - request.queued_ns,
                regretted_tokens=regretted_tokens,
            )
        )

    def _num_regretted_tokens(self, leader: Sequence, num_hits: int) -> int:
        """Return how many more tokens of the prompt than `num_hits` blocks would have hit, had none been evicted."""
        if not self._manager.enable_prefix_cache:
            return 0
        size, pool = self._manager.block_size, self._manager.pool
        can_hit = (leader.request.num_prompt_tokens - 1) // size
        missed = leader.chain.upto(can_hit, leader.tokens)[num_hits:can_hit]
        return size * sum(1 for _ in takewhile(pool.would_have_hit, missed))

    def _note_resumed(self, request: Request, hit_tokens: int) -> None:
        assert request.preempted_ns is not None, "only preempted requests resume"
        if self._log.active:
            leader, *followers = request.live_sequences()
            again = max(0, leader.num_lost - hit_tokens)
            again += sum(max(0, follower.num_lost - request.num_prompt_tokens) for follower in followers)
            away_ns = self._log.now_ns - request.preempted_ns
            self._log.append(RequestResumed(request.request_id, "recompute", away_ns, hit_tokens, again))
        request.resumed_ns = self._log.now_ns
        self.note_recovered(request)


def _queued_event(request: Request) -> RequestQueued:
    origin, sampling = request.origin, request.sampling
    return RequestQueued(
        request.request_id,
        request.num_prompt_tokens,
        len(request.sequences),
        request.queued_ns,
        origin.operation,
        origin.is_stream,
        origin.trace_parent,
        origin.trace_state,
        origin.tenant,
        origin.adapter,
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
    )


def _finished_event(request: Request) -> RequestFinished:
    reasons = {sequence.finish_reason for sequence in request.sequences}
    admitted, first, last = request.admitted_ns, request.first_token_ns, request.last_token_ns
    return RequestFinished(
        request.request_id,
        next(reason for reason in _SEVERITY if reason in reasons).value,
        request.num_prompt_tokens,
        sum(len(sequence.output_token_ids) for sequence in request.sequences),
        request.num_cached_tokens,
        request.num_preemptions,
        request.peak_blocks if admitted is not None else None,
        None if admitted is None else admitted - request.queued_ns,
        None if first is None or admitted is None else first - admitted,
        None if first is None or last is None else last - first,
        None if last is None else last - request.queued_ns,
        request.num_recomputed_tokens,
        request.error,
        request.origin.tenant,
        request.origin.adapter,
    )
