"""Who may start or resume, and why the others wait."""

from collections import Counter

import structlog

from kvwatch.telemetry.events import PrefixMismatched, WaitReasonsChanged
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.tiers import TierHit, Tiers, TransferKind
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.prefix import Prefix
from kvwatch_engine.scheduling.cost_model import CostModel
from kvwatch_engine.scheduling.lifecycle import Lifecycle
from kvwatch_engine.scheduling.pause import AdmissionPause
from kvwatch_engine.scheduling.policy import TokenBudget, WatermarkAdmission, most_blocks
from kvwatch_engine.scheduling.request import PrefixHits, Request, RequestState, Sequence, WaitReason

logger = structlog.get_logger(__name__)


class Admission:
    """Admits the head of the queue while it fits: nobody overtakes it. Engine thread only."""

    def __init__(
        self,
        settings: EngineSettings,
        manager: BlockManager,
        lifecycle: Lifecycle,
        cost: CostModel,
        log: EventLog,
        tiers: Tiers | None,
    ) -> None:
        self.settings = settings
        self.pause = AdmissionPause(log)
        self.waiting_for: dict[str, int] = {}
        """Requests that do not run, by what they wait for, as of the last `note_wait_reasons`."""
        self._manager = manager
        self._lifecycle = lifecycle
        self._cost = cost
        self._log = log
        self._tiers = tiers
        self._head_reason: WaitReason | None = None
        """Why the head was not admitted in this step; None while nobody was looked at."""

    def begin_step(self) -> None:
        """Begin a step: nobody was looked at yet."""
        self.pause.end_if_over()
        self._head_reason = None

    @property
    def num_startable_tokens(self) -> int:
        """Prompt tokens that wait and could be computed now, were a step large enough; O(requests that run).

        0 while the first request lacks blocks, as of the last step, while there is no room for another sequence, and
        while nobody is admitted.
        """
        waiting = self._lifecycle.waiting
        if not waiting or self.pause.is_active or WaitReason.BLOCKS in self.waiting_for:
            return 0
        is_full = self._lifecycle.num_admitted_sequences >= self.settings.max_num_seqs
        return 0 if is_full else waiting.num_tokens

    def admit_next(self, budget: TokenBudget) -> Request | None:
        """Admit the head of the queue; return it when it runs now, None when the head must wait.

        Requests whose blocks have to be filled from another tier first are admitted on the way: they hold their
        blocks, and start when the transfer has ended.
        """
        while (request := self._lifecycle.waiting.head) is not None:
            self._head_reason = self._obstacle(request, budget, self._lifecycle.num_admitted_sequences)
            if self._head_reason is not None:
                return None
            is_swapped = request.state is RequestState.SWAPPED
            if not (self._begin_swap_in(request) if is_swapped else self._open(request, budget)):
                return None
            if request.transfer is None:
                self._start(request)
                return request
        return None

    def finish_transfer(self, request: Request, num_good_blocks: int) -> None:
        """Let an arriving request run: its blocks are filled, or, after a restore, the leading ones of them."""
        if request.transfer is TransferKind.RESTORE:
            self._note_restored(request, num_good_blocks)
        self._start(request)

    # ------------------------------------------------------------------ why requests wait

    def note_wait_reasons(self, budget: TokenBudget) -> None:
        """Find out what each request waits for that does not run. O(requests that wait).

        The head's reason is exact. Whoever else could start alone waits for what the head waits for. Known prefixes
        of the others are left out of account: to look for them costs hashing.
        """
        lifecycle = self._lifecycle
        reasons = dict.fromkeys(lifecycle.arriving, WaitReason.TRANSFER)
        if lifecycle.waiting.head is not None:
            available, num_sequences = self._num_available(), lifecycle.num_admitted_sequences
            # After a preemption nobody was looked at, and the head waits for what the preempted one gave up.
            exact, head_reason = self._head_reason, WaitReason.TOKENS if budget.remaining == 0 else WaitReason.BLOCKS
            for request in lifecycle.waiting:
                own = self._obstacle(request, budget, num_sequences) or self._lack_of_blocks(request, budget, available)
                reasons[request] = reason = exact or own or head_reason
                if request is lifecycle.waiting.head:
                    exact, head_reason = None, reason
        self.waiting_for = dict(Counter(reason.value for reason in reasons.values()))
        changed = [request for request, reason in reasons.items() if request.wait_reason is not reason]
        for request in changed:
            request.wait_reason, request.wait_since_ns = reasons[request], self._log.now_ns
        if changed and self._log.active:
            names = [request.request_id for request in changed]
            self._log.append(WaitReasonsChanged(names, [reasons[request].value for request in changed]))

    def _lack_of_blocks(self, request: Request, budget: TokenBudget, available: int) -> WaitReason | None:
        if request.state is RequestState.SWAPPED:
            assert self._tiers is not None, "only tiers hold what is swapped"
            needed = self._tiers.num_blocks_to_restore(request.request_id)
        else:
            needed = self._manager.most_blocks(self._num_tokens_at_start(request, 0, budget))
        return WaitReason.BLOCKS if needed > available else None

    def _obstacle(self, request: Request, budget: TokenBudget, num_sequences: int) -> WaitReason | None:
        """Return what keeps a request from starting beside `num_sequences` others, blocks aside."""
        if request.transfer is not None:
            return WaitReason.TRANSFER
        if self.pause.is_active:
            return WaitReason.PAUSED
        if budget.remaining == 0:
            return WaitReason.TOKENS
        is_full = num_sequences + len(request.live_sequences()) > self.settings.max_num_seqs
        return WaitReason.SEQUENCES if is_full else None

    # ------------------------------------------------------------------ blocks

    def _num_available(self) -> int:
        lifecycle = self._lifecycle
        return WatermarkAdmission(self.settings.watermark_blocks).blocks_available(
            self._manager.pool.num_free, is_idle=not lifecycle.running and not lifecycle.arriving
        )

    def _num_tokens_at_start(self, request: Request, num_found: int, budget: TokenBudget) -> int:
        """Return for how many tokens of its first sequence a request needs blocks before it may start."""
        num_tokens = request.live_sequences()[0].num_tokens
        if self.settings.reserve_prompt:
            return num_tokens
        return min(num_tokens, num_found + min(budget.max_chunk, budget.remaining))

    def _has_blocks(self, request: Request, needed: int) -> bool:
        available = self._num_available()
        if needed > available:
            self._lack(request, needed, available)
            return False
        return True

    def _lack(self, request: Request, needed: int, available: int) -> None:
        self._head_reason = WaitReason.BLOCKS
        self._lifecycle.fail_allocation(request, needed, available, is_admission=True)

    def _begin_swap_in(self, request: Request) -> bool:
        assert self._tiers is not None, "only tiers hold what is swapped"
        needed = self._tiers.num_blocks_to_restore(request.request_id)
        if not self._has_blocks(request, needed):
            return False
        if not self._tiers.begin_in(request.request_id):
            self._lack(request, needed, self._manager.pool.num_free)
            request.num_failed_allocations += 1
            return False
        request.num_failed_allocations = 0
        self._lifecycle.hold(request, TransferKind.SWAP_IN)
        return True

    def _open(self, request: Request, budget: TokenBudget) -> bool:
        """Give a request the blocks that it starts with; begin to fill those whose content another tier has."""
        leader = request.live_sequences()[0]
        hashes = self._prefix_hashes(leader)
        found = self._manager.find_prefix(hashes)
        prefix = found if self._manager.contents is None else self._equal_part(leader, hashes, found)
        tiers = self._tiers if request.is_restorable else None
        further = tiers.find(hashes[len(prefix) :]) if tiers is not None else []
        size = self._manager.block_size
        num_found = (len(prefix) + sum(len(hit.hashes) for hit in further)) * size
        num_tokens = self._num_tokens_at_start(request, num_found, budget)
        needed = self._manager.num_blocks_missing(prefix, num_tokens)
        if self.settings.reserve_prompt:
            # Windows are counted as if nothing of them were shared; but more than it was let in with it never needs.
            needed = min(needed + self._num_further_blocks(request), self._worst_case(request))
        if not self._has_blocks(request, needed):
            return False
        # Before the request's own blocks are taken, which may evict more.
        hits = self._hits(request, prefix, further)
        if tiers is not None and further:
            tiers.claim(request.request_id, leader.index, further)
        if not self._manager.open(leader.owner, prefix, num_tokens):
            self._lack(request, needed, self._manager.pool.num_free)
            request.num_failed_allocations += 1
            if tiers is not None and further:
                tiers.end_claim(request.request_id, leader.index)
            return False
        request.num_failed_allocations = 0
        if len(prefix) < len(found):
            self._report_mismatch(request, hashes, len(prefix))
        request.hits = hits
        leader.num_computed = len(prefix) * size
        if tiers is not None and further:
            tiers.begin_restore(request.request_id, leader.index, len(prefix), further)
            self._lifecycle.hold(request, TransferKind.RESTORE)
        return True

    def _prefix_hashes(self, leader: Sequence) -> list[BlockHash]:
        """Return the hashes of the blocks that may be found: none of a token whose logits are needed.

        That is the last one, and each of the prompt whose logits tell log-probabilities that are still wanted.
        """
        if not self._manager.enable_prefix_cache:
            return []
        num_tokens = leader.num_tokens if leader.request.is_scored else leader.request.num_scored
        num_blocks = (num_tokens - 1) // self._manager.block_size
        return list(leader.chain.upto(num_blocks, leader.tokens)[:num_blocks])

    def _equal_part(self, leader: Sequence, hashes: list[BlockHash], found: Prefix) -> Prefix:
        """Return the part of a hit whose blocks hold the sequence's own tokens: all of it, unless there is a defect."""
        contents = self._manager.contents
        assert contents is not None, "only a strict prefix cache is compared"
        num_equal = contents.num_equal(leader.chain.root, hashes[: len(found)], leader.tokens)
        return found if num_equal == len(found) else self._manager.find_prefix(hashes[:num_equal])

    def _report_mismatch(self, request: Request, hashes: list[BlockHash], index: int) -> None:
        logger.error("a block holds other tokens than its hash says", request=request.request_id, index=index)
        if self._log.active:
            self._log.append(PrefixMismatched(request.request_id, hashes[index], index))

    def _worst_case(self, request: Request) -> int:
        sampling = request.sampling
        return most_blocks(self.settings, request.num_prompt_tokens, sampling.max_tokens, sampling.num_sequences)

    def _num_further_blocks(self, request: Request) -> int:
        """Return how many blocks the sequences but the first need that had generated tokens before."""
        leader, *followers = request.live_sequences()
        return sum(
            self._manager.most_blocks(follower.num_tokens, request.num_common_tokens(leader, follower))
            for follower in followers
            if follower.output_token_ids
        )

    # ------------------------------------------------------------------ start

    def _start(self, request: Request) -> None:
        is_recomputed = request.preempted_ns is not None and request.state is not RequestState.SWAPPED
        self._lifecycle.start(request)
        if is_recomputed:
            self._cost.note_resumed(request.num_tokens_lost, request.num_tokens_to_recompute)

    def _hits(self, request: Request, prefix: Prefix, further: list[TierHit]) -> PrefixHits:
        size = self._manager.block_size
        num_found = len(prefix) + sum(len(hit.hashes) for hit in further)
        is_new = request.preempted_ns is None
        return PrefixHits(
            device=len(prefix) * size,
            further=tuple((hit.tier, len(hit.hashes) * size) for hit in further),
            regretted=self._num_regretted_tokens(request, num_found) if is_new and self._log.active else 0,
        )

    def _num_regretted_tokens(self, request: Request, num_hits: int) -> int:
        """Return how many more tokens of the prompt than `num_hits` blocks would have hit, had none been evicted."""
        if not self._manager.enable_prefix_cache or not request.is_scored:
            return 0
        size = self._manager.block_size
        leader = request.live_sequences()[0]
        can_hit = (request.num_prompt_tokens - 1) // size
        hashes = leader.chain.upto(can_hit, leader.tokens)[:can_hit]
        return size * self._manager.num_blocks_regretted(hashes, num_hits)

    def _note_restored(self, request: Request, num_good_blocks: int) -> None:
        """Count only what really arrived of what was found."""
        held = self._manager.owners()
        restored = next(sequence for sequence in request.sequences if sequence.owner in held)
        request.hits = request.hits.cut(num_good_blocks * self._manager.block_size)
        restored.num_computed = request.hits.total
