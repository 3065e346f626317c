"""Builds the step inputs that a scheduler would build, for tests of the model side alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.step import GroupBlocks, SampleRow, StepInput

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class PagedSequence:
    """A sequence with blocks of its own for all of its tokens, present and future."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    further_block_ids: list[list[int]] = field(default_factory=list)
    """Blocks in each KV group from 1 on."""
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)


def paged_sequences(
    prompts: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_blocks: int,
    max_new_tokens: int = 0,
    seed: int = 0,
    num_groups: int = 1,
) -> list[PagedSequence]:
    """Return a sequence for each prompt, with block ids in random order in each KV group; block 0 is never used."""
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    sequences = []
    for prompt in prompts:
        needed = -(-(len(prompt) + max_new_tokens) // block_size)
        first, *further = ([free.pop() for _ in range(needed)] for _ in range(num_groups))
        sequences.append(PagedSequence(list(prompt), first, further_block_ids=further))
    return sequences


def packed_step(
    parts: Sequence[tuple[PagedSequence, int]],
    *,
    block_size: int,
    sampled: Sequence[tuple[int, SampleRow]] = (),
    windows: Sequence[int | None] = (None,),
) -> StepInput:
    """Return a step that computes the next tokens of some sequences.

    Args:
        parts: (sequence, number of its tokens to compute); `num_computed` is not changed.
        block_size: tokens in a block.
        sampled: (index into `parts` whose last token is sampled from, how).
        windows: of each KV group; what the step cannot see any more is the null block, as in an engine.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for sequence, count in parts:
        span = range(sequence.num_computed, sequence.num_computed + count)
        token_ids += sequence.token_ids[span.start : span.stop]
        positions += span
        starts.append(len(token_ids))
    first, *further = (_group_blocks(parts, number, window, block_size) for number, window in enumerate(windows))
    return StepInput(
        step=1,
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=first.slot_mapping,
        query_starts=np.array(starts, dtype=np.int32),
        context_lens=np.array([s.num_computed + count for s, count in parts], dtype=np.int32),
        block_tables=first.block_tables,
        further_groups=tuple(further),
        copy_sources=np.zeros(0, dtype=np.int64),
        copy_destinations=np.zeros(0, dtype=np.int64),
        sample_rows=tuple(row for _, row in sampled),
        sample_indices=np.array([starts[index + 1] - 1 for index, _ in sampled], dtype=np.int64),
    )


def _group_blocks(
    parts: Sequence[tuple[PagedSequence, int]], group: int, window: int | None, block_size: int
) -> GroupBlocks:
    slots: list[int] = []
    tables = np.zeros((len(parts), max(len(sequence.block_ids) for sequence, _ in parts)), dtype=np.int32)
    for row, (sequence, count) in enumerate(parts):
        block_ids = [sequence.block_ids, *sequence.further_block_ids][group]
        span = range(sequence.num_computed, sequence.num_computed + count)
        slots += [block_ids[p // block_size] * block_size + p % block_size for p in span]
        first = 0 if window is None else max(0, sequence.num_computed - window + 1) // block_size
        tables[row, first : len(block_ids)] = block_ids[first:]
    return GroupBlocks(slot_mapping=np.array(slots, dtype=np.int64), block_tables=tables)


def sample_row(
    params: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    forbidden: Sequence[int] = (),
) -> SampleRow:
    """Return a row that samples with the given parameters."""
    return SampleRow(
        params=params,
        seed=seed,
        position=position,
        prompt_token_ids=prompt,
        output_token_ids=output,
        forbidden_token_ids=forbidden,
    )
