"""Packs scheduled tokens into one immutable StepInput. Knows block tables, not why a token was scheduled."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass, replace

import numpy as np

from kvwatch.telemetry.clock import Clock
from kvwatch_engine.contracts.adapter import AdapterSpan
from kvwatch_engine.contracts.image import ImageSpan
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.step import GroupBlocks, SampleRow, ScoredSpan, StepInput
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.group_tables import GroupTables
from kvwatch_engine.memory.table_write import BlockCopy
from kvwatch_engine.scheduling.request import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that are computed in this step, and a draft that may follow them."""

    sequence: Sequence
    start: int
    end: int
    copies: tuple[BlockCopy, ...]
    draft: tuple[int, ...] = ()
    """Tokens guessed for the positions from `end` on, which the step verifies."""

    @property
    def write_end(self) -> int:
        """End of the positions whose K/V the step writes, those of the draft included."""
        return self.end + len(self.draft)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """A draft on its way: row `first_row + i` of the samples is what the model puts behind its token i."""

    token_ids: tuple[int, ...]
    first_row: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step on its way: what goes into the model, and whose results come out."""

    input: StepInput
    chunks: tuple[Chunk, ...]
    sampled: tuple[Sequence, ...]
    """Sequence of each row of `input.sample_rows`, but for those of drafts, which come last."""
    written_block_ids: list[int]
    num_recomputed: int
    drafts: Mapping[int, DraftRows]
    """Drafts by the row of the token before them."""
    scored: tuple[Sequence, ...] = ()
    """Sequence of each of `input.scored`."""
    build_ns: int = 0
    """Time that building it took."""


def build_step(
    step: int, chunks: ReadOnlySequence[Chunk], manager: BlockManager, eos_token_ids: tuple[int, ...], clock: Clock
) -> ScheduledStep:
    """Pack chunks into one step and note which blocks it writes to; those of one LoRA adapter lie side by side."""
    started = clock.monotonic_ns()
    chunks = _grouped_by_adapter(chunks)
    token_ids: list[int] = []
    query_starts = [0]
    written: list[int] = []
    sampled: list[Sequence] = []
    sample_indices: list[int] = []
    positions: list[int] = []
    images: list[ImageSpan] = []
    scored: list[tuple[Sequence, ScoredSpan]] = []
    ends: list[int] = []
    drafted: list[tuple[int, Chunk]] = []
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.end
        if sequence.request.images:
            images += _image_spans(chunk, len(token_ids))
        if not sequence.request.is_scored:
            scored += _scored_spans(chunk, len(token_ids))
        token_ids += sequence.tokens(start, end)
        if end == sequence.num_tokens:
            of_chunk = _sequences_to_sample(sequence)
            sampled += of_chunk
            sample_indices += [len(token_ids) - 1] * len(of_chunk)
        if chunk.draft:
            token_ids += chunk.draft
            end = chunk.write_end
            drafted.append((len(sampled) - 1, chunk))
        positions += range(start, end)
        ends.append(end)
        query_starts.append(len(token_ids))
        written += manager.record_written(sequence.owner, start, end)
    rows = [_sample_row(sequence, eos_token_ids) for sequence in sampled]
    drafts = _add_draft_rows(drafted, rows, sample_indices, eos_token_ids)
    copies = [copy for chunk in chunks for copy in chunk.copies]
    first, *further = (_group_blocks(chunks, ends, group) for group in manager.groups)
    step_input = StepInput(
        step=step,
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=first.slot_mapping,
        query_starts=np.array(query_starts, dtype=np.int32),
        context_lens=np.array(ends, dtype=np.int32),
        block_tables=first.block_tables,
        copy_sources=np.array([copy.source for copy in copies], dtype=np.int64),
        copy_destinations=np.array([copy.destination for copy in copies], dtype=np.int64),
        sample_rows=tuple(rows),
        sample_indices=np.array(sample_indices, dtype=np.int64),
        adapters=_adapter_spans(chunks, query_starts),
        further_groups=tuple(further),
        images=tuple(images),
        scored=tuple(span for _, span in scored),
    )
    num_recomputed = sum(max(0, min(chunk.end, chunk.sequence.num_lost) - chunk.start) for chunk in chunks)
    owners = tuple(sequence for sequence, _ in scored)
    build_ns = clock.monotonic_ns() - started
    return ScheduledStep(step_input, tuple(chunks), tuple(sampled), written, num_recomputed, drafts, owners, build_ns)


def _grouped_by_adapter(chunks: ReadOnlySequence[Chunk]) -> ReadOnlySequence[Chunk]:
    """Return the chunks with those of one adapter side by side, else in their order; all base ones come first."""
    if all(chunk.sequence.request.load_id is None for chunk in chunks):
        return chunks
    return sorted(chunks, key=lambda chunk: chunk.sequence.request.load_id or "")


def _adapter_spans(chunks: ReadOnlySequence[Chunk], query_starts: list[int]) -> tuple[AdapterSpan, ...]:
    """Return the tokens of each adapter, of chunks that `_grouped_by_adapter` has put in order."""
    if chunks[-1].sequence.request.load_id is None:
        return ()
    spans: list[AdapterSpan] = []
    for index, chunk in enumerate(chunks):
        load_id = chunk.sequence.request.load_id
        if load_id is None:
            continue
        start = spans.pop().start if spans and spans[-1].load_id == load_id else query_starts[index]
        spans.append(AdapterSpan(load_id, start, query_starts[index + 1]))
    return tuple(spans)


def _group_blocks(chunks: ReadOnlySequence[Chunk], ends: ReadOnlySequence[int], group: GroupTables) -> GroupBlocks:
    """Return where the chunks' tokens lie in one KV group, and what they can see there, up to each one's end."""
    size = group.block_size
    slots: list[int] = []
    padded = np.zeros((len(chunks), -(-max(ends) // size)), dtype=np.int32)
    for row, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        table = group.tables[chunk.sequence.owner]
        slots += [table[position // size] * size + position % size for position in range(chunk.start, end)]
        num_blocks = -(-end // size)
        padded[row, :num_blocks] = table[:num_blocks]
    return GroupBlocks(slot_mapping=np.array(slots, dtype=np.int64), block_tables=padded)


def _image_spans(chunk: Chunk, first: int) -> list[ImageSpan]:
    """Return what a chunk, whose first token is number `first` of the step, holds of its request's images."""
    spans: list[ImageSpan] = []
    for image in chunk.sequence.request.images:
        start, end = max(chunk.start, image.position), min(chunk.end, image.end)
        if start < end:
            begin = first + start - chunk.start
            spans.append(ImageSpan(begin, begin + end - start, start - image.position, image.image))
    return spans


def _scored_spans(chunk: Chunk, first: int) -> list[tuple[Sequence, ScoredSpan]]:
    """Return the tokens of the prompt whose log-probabilities a chunk tells, whose first token is number `first`.

    The logits of a token are for the one that follows. What was told before a preemption is not told again.
    """
    request = chunk.sequence.request
    num_top = request.sampling.prompt_logprobs
    start, end = max(chunk.start + 1, request.num_scored), min(chunk.end + 1, request.num_prompt_tokens)
    if num_top is None or start >= end:
        return []
    span = ScoredSpan(first + start - 1 - chunk.start, request.prompt_token_ids[start:end], num_top)
    return [(chunk.sequence, span)]


def _sequences_to_sample(sequence: Sequence) -> list[Sequence]:
    """The end of a fresh prompt starts every sequence of its request; else each sequence goes on alone.

    The first beam's continuations start all beams, so it goes on alone.
    """
    request = sequence.request
    if request.search is not None:
        return [sequence]
    is_fresh = not request.has_forked and not sequence.output_token_ids
    return request.live_sequences() if is_fresh else [sequence]


def _sample_row(sequence: Sequence, eos_token_ids: tuple[int, ...]) -> SampleRow:
    params = sequence.request.sampling
    num_generated = len(sequence.output_token_ids)
    guide = sequence.guide
    if guide is not None:  # it works while the model does
        guide.prepare(sequence.output_token_ids, num_generated)
    return SampleRow(
        params=params,
        seed=sequence.seed,
        position=num_generated,
        prompt_token_ids=sequence.request.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
        forbidden_token_ids=_forbidden(params, num_generated, eos_token_ids),
        num_candidates=0 if sequence.request.search is None else sequence.request.search.num_candidates,
        guide=guide,
    )


def _add_draft_rows(
    drafted: ReadOnlySequence[tuple[int, Chunk]],
    rows: list[SampleRow],
    sample_indices: list[int],
    eos_token_ids: tuple[int, ...],
) -> dict[int, DraftRows]:
    """Add rows for the tokens of drafts behind all others; return the drafts by the row of the token before each."""
    drafts: dict[int, DraftRows] = {}
    for row, chunk in drafted:
        drafts[row] = DraftRows(chunk.draft, len(rows))
        sample_indices += range(sample_indices[row] + 1, sample_indices[row] + 1 + len(chunk.draft))
        rows += _draft_rows(rows[row], chunk, eos_token_ids)
    return drafts


def _draft_rows(first: SampleRow, chunk: Chunk, eos_token_ids: tuple[int, ...]) -> list[SampleRow]:
    """Return a row for each token of a draft: what follows it, as if it and those before it had been chosen.

    Args:
        first: the row of the token before the draft.
        chunk: has the draft.
        eos_token_ids: tokens that end a sequence.
    """
    tokens = [*first.output_token_ids, *chunk.draft]
    positions = range(first.position + 1, len(tokens) + 1)
    return [
        replace(
            first,
            position=position,
            output_token_ids=tokens,
            forbidden_token_ids=_forbidden(first.params, position, eos_token_ids),
        )
        for position in positions
    ]


def _forbidden(params: SamplingParams, num_generated: int, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return params.end_token_ids(eos_token_ids) if num_generated < params.min_tokens else ()
