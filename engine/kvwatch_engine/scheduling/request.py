"""Requests and sequences while they are in the engine. Mutable; engine thread only."""

from collections.abc import Sequence as ReadOnlySequence
from enum import StrEnum

from kvwatch_engine.contracts.request import FinishReason, GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.memory.block_hash import HashChain
from kvwatch_engine.memory.block_pool import Owner


class RequestState(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class WaitReason(StrEnum):
    """Why a waiting request was not admitted in the last step."""

    BLOCKS = "blocks"
    """Too few free blocks."""
    SEQUENCES = "sequences"
    """`max_num_seqs` sequences run already."""
    TOKENS = "tokens"
    """The step's token budget is used up."""


class Sequence:
    """One of a request's `n` continuations.

    `num_computed` tokens have their K/V in the sequence's blocks. A sequence that has no blocks has computed nothing.
    """

    __slots__ = (
        "chain",
        "finish_reason",
        "index",
        "last_token_ns",
        "num_computed",
        "num_lost",
        "output_token_ids",
        "owner",
        "request",
        "seed",
    )

    def __init__(self, request: "Request", index: int, seed: int, chain: HashChain) -> None:
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
        "error",
        "first_token_ns",
        "has_forked",
        "last_token_ns",
        "num_cached_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "origin",
        "peak_blocks",
        "preempted_ns",
        "prompt_token_ids",
        "queued_ns",
        "request_id",
        "resumed_ns",
        "sampling",
        "sequences",
        "state",
        "wait_reason",
    )

    def __init__(
        self, source: GenerationRequest, *, arrival: int, queued_ns: int, seeds: list[int], chain: HashChain
    ) -> None:
        self.request_id = source.request_id
        self.prompt_token_ids = source.prompt_token_ids
        self.sampling: SamplingParams = source.sampling
        self.origin = source.origin
        self.arrival = arrival
        """Place in the order of arrival; it never changes, whatever happens to the request."""
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
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.peak_blocks = 0
        self.has_forked = source.sampling.n == 1
        """Whether each live sequence has a block table of its own; False while the leader computes the prompt."""
        self.sequences = [
            Sequence(self, index, seed, chain if index == 0 else chain.fork(0)) for index, seed in enumerate(seeds)
        ]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    def live_sequences(self) -> list[Sequence]:
        """Return the sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def has_recovered(self) -> bool:
        """Whether every token that a preemption dropped is computed again."""
        return all(sequence.num_computed >= sequence.num_lost for sequence in self.live_sequences())

    def active_sequences(self) -> list[Sequence]:
        """Return the live sequences that have a block table: all after the fork, the leader before it."""
        live = self.live_sequences()
        return live if self.has_forked else live[:1]
