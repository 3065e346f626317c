"""Requests and sequences while they are in the engine. Mutable; engine thread only."""

from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.guidance import Guide, SequenceGuide
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.tiers import TransferKind
from kvwatch_engine.memory.block_hash import HashChain, lonely_root
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.scheduling.beam_search import BeamSearch
from kvwatch_engine.scheduling.prompt_lookup import TokenHistory

MAX_PREEMPTED_FOR = 8


class RequestState(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    """Preempted; its K/V is behind the device, or on its way there or back."""
    FINISHED = "finished"


class WaitReason(StrEnum):
    """Why a request did not run in the last step."""

    BLOCKS = "blocks"
    """Too few free blocks."""
    SEQUENCES = "sequences"
    """`max_num_seqs` sequences run already."""
    TOKENS = "tokens"
    """The step's token budget is used up."""
    PAUSED = "paused"
    """Nobody is admitted for now."""
    TRANSFER = "transfer"
    """Its K/V is on its way between tiers."""


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Tokens of a request that were found when it was admitted."""

    device: int = 0
    further: tuple[tuple[str, int], ...] = ()
    """(tier, tokens) of what follows in tiers behind the device, in the order of the tokens."""
    regretted: int = 0
    """Tokens that would have been found as well, had their blocks not been evicted."""

    @property
    def total(self) -> int:
        """Tokens that need not be computed."""
        return self.device + sum(num_tokens for _, num_tokens in self.further)

    def of(self, tier: str) -> int:
        """Return how many of them a tier behind the device had."""
        return sum(num_tokens for name, num_tokens in self.further if name == tier)

    def cut(self, num_arrived: int) -> "PrefixHits":
        """Return what is left of them when only the first `num_arrived` tokens behind the device's have arrived."""
        arrived: list[tuple[str, int]] = []
        for tier, num_tokens in self.further:
            arrived.append((tier, min(num_tokens, num_arrived)))
            num_arrived -= arrived[-1][1]
        return replace(self, further=tuple(arrived))


class Sequence:
    """One of a request's `n` continuations, or one of its beams.

    `num_computed` tokens have their K/V in the sequence's blocks. A sequence that has no blocks has computed nothing.
    """

    __slots__ = (
        "chain",
        "finish_reason",
        "guide",
        "history",
        "index",
        "last_token_ns",
        "num_computed",
        "num_lost",
        "output_token_ids",
        "owner",
        "request",
        "seed",
    )

    def __init__(self, request: "Request", index: int, seed: int, chain: HashChain, guide: Guide | None = None) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.chain = chain
        self.owner = Owner(request.request_id, index)
        self.output_token_ids: list[int] = []
        self.num_computed = 0
        self.num_lost = 0
        """Tokens computed before the last preemption: computing one of them again is recomputation."""
        self.last_token_ns: int | None = None
        self.finish_reason: FinishReason | None = None
        self.guide: SequenceGuide | None = None if guide is None else guide.start()
        """What keeps it within its request's grammar."""
        self.history: TokenHistory | None = None
        """Its tokens for the search of drafts, once there was one."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.request.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the newest are computed, and one was generated already."""
        return self.num_computed == self.num_tokens - 1 and bool(self.output_token_ids)

    def tokens(self, start: int, end: int) -> ReadOnlySequence[int]:
        """Return the token ids at positions `start` to `end`."""
        prompt = self.request.prompt_token_ids
        split = len(prompt)
        if end <= split:
            return prompt[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return [*prompt[start:], *self.output_token_ids[: end - split]]


class Request:
    """A request in the engine: a prompt and the sequences that continue it."""

    __slots__ = (
        "admitted_ns",
        "arrival",
        "cache_salt",
        "deadline_ns",
        "error",
        "first_token_ns",
        "forks_late",
        "has_forked",
        "hits",
        "images",
        "is_restorable",
        "last_token_ns",
        "load_id",
        "num_accepted_draft_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_failed_allocations",
        "num_preemptions",
        "num_recomputed_tokens",
        "num_scored",
        "origin",
        "own_root",
        "peak_blocks",
        "preempted_for",
        "preempted_ns",
        "priority",
        "prompt_token_ids",
        "queued_ns",
        "rank",
        "request_id",
        "resumed_ns",
        "sampling",
        "search",
        "sequences",
        "state",
        "tenant_salt",
        "transfer",
        "wait_reason",
        "wait_since_ns",
    )

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        source: GenerationRequest,
        *,
        arrival: int,
        queued_ns: int,
        seeds: list[int],
        chain: HashChain,
        search: BeamSearch | None = None,
        forks_late: bool = False,
        rank: tuple[int, int] | None = None,
        deadline_ns: int | None = None,
    ) -> None:
        """Create a request that waits.

        Args:
            source: what its caller submitted.
            arrival: its number in the order of arrival.
            queued_ns: monotonic time at which it arrived.
            seeds: seed of each sequence.
            chain: hash chain of its prompt.
            search: the beam search that it is; none for samples.
            forks_late: whether its sequences share generated tokens when they are computed anew. A leader that has
                gone on has given back what only earlier tokens see in a window: then they share the prompt.
            rank: its place among all requests, the lowest first; by arrival if none is given.
            deadline_ns: monotonic time at which it ends, finished or not.
        """
        self.request_id = source.request_id
        self.prompt_token_ids = source.prompt_token_ids
        self.images = source.images
        self.sampling: SamplingParams = source.sampling
        self.search, self.forks_late = search, forks_late
        """The beam search that its sequences are the beams of; whether its leader computes all its tokens before the
        others fork from it, where their tokens part."""
        self.origin = source.origin
        self.cache_salt = source.cache_salt
        self.load_id = source.load_id
        self.tenant_salt = source.tenant_salt
        self.own_root: BlockHash | None = None
        """Parent of its first block if it shares with nobody, whatever its keys are; see `isolate`."""
        self.arrival = arrival
        """Its number in the order of arrival."""
        self.priority = source.priority
        self.rank = rank if rank is not None else (0, arrival)
        """Its place among all requests; it never changes, whatever happens to the request."""
        self.deadline_ns = deadline_ns
        self.queued_ns = queued_ns
        self.admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.preempted_ns: int | None = None
        self.resumed_ns: int | None = None
        """When it was resumed, until it has all tokens again that the preemption dropped."""
        self.error = ""
        """Class of the error that ended it, or one of its sequences."""
        self.state = RequestState.WAITING
        self.wait_reason: WaitReason | None = None
        self.wait_since_ns = queued_ns
        """Since when it waits for this reason."""
        self.preempted_for: tuple[str, ...] = ()
        """In whose favour it was preempted, the last `MAX_PREEMPTED_FOR` times; empty ids where it was for nobody's."""
        self.transfer: TransferKind | None = None
        """The transfer of its blocks that is in flight."""
        self.is_restorable = True
        """Whether tiers behind the device are asked for its prefix; not after they took too long."""
        self.hits = PrefixHits()
        """What was found at the last admission that looked for a prefix."""
        self.num_failed_allocations = 0
        """Times in a row that the pool gave it no blocks though enough were free."""
        self.num_cached_tokens = 0
        self.num_preemptions = self.num_recomputed_tokens = self.num_draft_tokens = self.num_accepted_draft_tokens = 0
        self.peak_blocks = 0
        self.num_scored = self.num_prompt_tokens if source.sampling.prompt_logprobs is None else 1
        """Tokens of the prompt whose log-probabilities are known, or not wanted: the first one follows nothing."""
        self.has_forked = source.sampling.num_sequences == 1
        """Whether each live sequence has a block table of its own; False while the leader computes what they share."""
        self.sequences = [
            Sequence(self, index, seed, chain if index == 0 else chain.fork(0), source.guide)
            for index, seed in enumerate(seeds)
        ]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether no log-probabilities of its prompt are wanted any more."""
        return self.num_scored >= self.num_prompt_tokens

    def isolate(self) -> None:
        """Share with nobody from now on: what it holds is of a time that the prefix cache was told to forget."""
        self.own_root = lonely_root()
        for sequence in self.sequences:
            sequence.chain.move_to(self.own_root)

    def live_sequences(self) -> list[Sequence]:
        """Return the sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def sequences_of_caller(self) -> list[Sequence]:
        """Return the live sequences that its caller knows of: of beams as many as are returned."""
        return self.live_sequences()[: self.sampling.n]

    def num_common_tokens(self, leader: Sequence, follower: Sequence) -> int:
        """Return how many tokens a follower shares with the leader: the prompt, or all equal ones."""
        if not self.forks_late:
            return self.num_prompt_tokens
        pairs = zip(leader.output_token_ids, follower.output_token_ids, strict=False)
        return self.num_prompt_tokens + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def has_recovered(self) -> bool:
        """Whether every token that a preemption dropped is computed again."""
        return all(sequence.num_computed >= sequence.num_lost for sequence in self.live_sequences())

    @property
    def num_tokens_to_lose(self) -> int:
        """Tokens to compute again when it loses its blocks; what followers share with the leader counts once."""
        leader, *followers = self.active_sequences()
        return leader.num_computed + sum(
            max(0, each.num_computed - self.num_common_tokens(leader, each)) for each in followers
        )

    @property
    def num_tokens_lost(self) -> int:
        """Tokens that it had computed before preemptions; what followers share with the leader counts once."""
        leader, *followers = self.live_sequences()
        return leader.num_lost + self._num_lost_alone(leader, followers)

    @property
    def num_tokens_to_recompute(self) -> int:
        """Tokens of a request that has just resumed that were computed before and are not there again."""
        leader, *followers = self.live_sequences()
        again = max(0, leader.num_lost - leader.num_computed)
        return again + self._num_lost_alone(leader, followers)

    def _num_lost_alone(self, leader: Sequence, followers: list[Sequence]) -> int:
        return sum(max(0, each.num_lost - self.num_common_tokens(leader, each)) for each in followers)

    def active_sequences(self) -> list[Sequence]:
        """Return the live sequences that have a block table: all after the fork, the leader before it."""
        live = self.live_sequences()
        return live if self.has_forked else live[:1]
