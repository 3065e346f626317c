"""What one step computes, and what comes out of it. Both are immutable values; arrays are never written again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvwatch_engine.contracts.adapter import AdapterSpan
from kvwatch_engine.contracts.guidance import SequenceGuide
from kvwatch_engine.contracts.image import ImageSpan
from kvwatch_engine.contracts.request import PositionLogprobs, PromptLogprobs
from kvwatch_engine.contracts.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One token to be sampled from one row of logits."""

    params: SamplingParams
    seed: int
    """64-bit seed of the sequence. A draw depends on (seed, position) only: neither batch nor preemption changes it."""
    position: int
    """Number of tokens generated so far by the sequence."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """The live list of the sequence, or one with its draft: the first `position` entries belong to this row. For
    penalties."""
    forbidden_token_ids: Sequence[int] = ()
    """Tokens that may not be chosen now (end tokens before `min_tokens`)."""
    num_candidates: int = 0
    """Continuations wanted of a beam, instead of one token; 0 for a sequence that is no beam."""
    guide: SequenceGuide | None = None
    """Which tokens its grammar allows now, already asked to find that out; none if anything may follow."""


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Tokens of a prompt whose log-probabilities are wanted."""

    start: int
    """Packed token that the first of them follows; the others follow one after the other."""
    token_ids: Sequence[int]
    num_top: int
    """How many of the most likely tokens are wanted at each place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlocks:
    """Where a step's tokens lie in one KV group."""

    slot_mapping: Int64Array
    """i64[num_tokens]"""
    block_tables: Int32Array
    """i32[num_seqs, max_blocks]; null blocks also stand for what has left the group's window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step: the tokens of `num_seqs` sequences, packed one after the other.

    A sequence's tokens are consecutive positions; prefill chunks and decode tokens mix freely. Copies are carried out
    before anything is written.
    """

    step: int
    token_ids: Int64Array
    """i64[num_tokens]"""
    positions: Int64Array
    """i64[num_tokens]: place of each token in its sequence, from 0."""
    slot_mapping: Int64Array
    """i64[num_tokens]: slot (block id * block size + offset) that each token's K/V is written to."""
    query_starts: Int32Array
    """i32[num_seqs + 1]: where each sequence's tokens begin in the packed arrays; the last is num_tokens."""
    context_lens: Int32Array
    """i32[num_seqs]: tokens visible to the last query of each sequence, itself included."""
    block_tables: Int32Array
    """i32[num_seqs, max_blocks]: block ids, padded with the null block."""
    copy_sources: Int64Array
    """i64[num_copies]: blocks to be copied for copy-on-write."""
    copy_destinations: Int64Array
    """i64[num_copies]"""
    sample_rows: tuple[SampleRow, ...]
    sample_indices: Int64Array
    """i64[len(sample_rows)]: packed token whose logits each row samples from. With n > 1 an index repeats; of a
    sequence that has a draft, the last tokens have a row each."""
    adapters: tuple[AdapterSpan, ...] = ()
    """Which tokens are computed with a LoRA adapter, one span for each; all others with the base model alone."""
    further_groups: tuple[GroupBlocks, ...] = ()
    """KV groups from 1 on; `slot_mapping` and `block_tables` are those of group 0."""
    images: tuple[ImageSpan, ...] = ()
    """Which tokens stand for images."""
    scored: tuple[ScoredSpan, ...] = ()
    """Tokens of prompts whose log-probabilities are wanted."""

    @property
    def groups(self) -> tuple[GroupBlocks, ...]:
        """All KV groups."""
        first = GroupBlocks(slot_mapping=self.slot_mapping, block_tables=self.block_tables)
        return (first, *self.further_groups)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely tokens that continue one beam, the most likely first."""

    token_ids: list[int]
    scores: list[float]
    """Log-probability of each, after penalties, bias and forbidden tokens."""
    logprobs: list[PositionLogprobs] | None = None
    """Of each as the model gave it, if asked for."""


class OperationTimes(NamedTuple):
    """What each kind of operation took in the layers of one forward pass, in ns; see `StepCompleted`."""

    linear_ns: int
    attention_ns: int
    rotary_ns: int
    norm_ns: int
    activation_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came out of one step, row by row of `StepInput.sample_rows`."""

    token_ids: list[int]
    """Of a row with candidates the first of them."""
    logprobs: list[PositionLogprobs | None]
    forward_ns: int
    sample_ns: int
    errors: dict[int, str] = field(default_factory=dict)
    """Row -> why no token could be chosen for it (its logits are not numbers, its guide failed). Ends that sequence,
    or its search."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Row -> continuations, for rows that asked for them."""
    scored: tuple[PromptLogprobs, ...] = ()
    """One for each of `StepInput.scored`."""
    operations: OperationTimes | None = None
    """Parts of `forward_ns`; none where that is not known."""
    logits_ns: int | None = None
    """Part of `forward_ns`; none where that is not known."""


class StepExecutor(Protocol):
    """Runs steps: the model runner, or a null model in tests of everything but the model. Engine thread only."""

    def execute(self, step: StepInput) -> StepResult:
        """Compute a step and sample its rows; an exception fails the whole step."""
        ...
