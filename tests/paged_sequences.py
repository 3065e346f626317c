"""Builds the step inputs that a scheduler would build, for tests of the model side alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.step import SampleRow, StepInput

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class PagedSequence:
    """A sequence with blocks of its own for all of its tokens, present and future."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)


def paged_sequences(
    prompts: Sequence[Sequence[int]], *, block_size: int, num_blocks: int, max_new_tokens: int = 0, seed: int = 0
) -> list[PagedSequence]:
    """Return a sequence for each prompt, with block ids in random order; block 0 is never used."""
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    sequences = []
    for prompt in prompts:
        needed = -(-(len(prompt) + max_new_tokens) // block_size)
        sequences.append(PagedSequence(list(prompt), [free.pop() for _ in range(needed)]))
    return sequences


def packed_step(
    parts: Sequence[tuple[PagedSequence, int]],
    *,
    block_size: int,
    sampled: Sequence[tuple[int, SampleRow]] = (),
) -> StepInput:
    """Return a step that computes the next tokens of some sequences.

    Args:
        parts: (sequence, number of its tokens to compute); `num_computed` is not changed.
        block_size: tokens in a block.
        sampled: (index into `parts` whose last token is sampled from, how).
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for sequence, count in parts:
        span = range(sequence.num_computed, sequence.num_computed + count)
        token_ids += sequence.token_ids[span.start : span.stop]
        positions += span
        slots += [sequence.block_ids[p // block_size] * block_size + p % block_size for p in span]
        starts.append(len(token_ids))
    tables = np.zeros((len(parts), max(len(s.block_ids) for s, _ in parts)), dtype=np.int32)
    for row, (sequence, _) in enumerate(parts):
        tables[row, : len(sequence.block_ids)] = sequence.block_ids
    return StepInput(
        step=1,
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_starts=np.array(starts, dtype=np.int32),
        context_lens=np.array([s.num_computed + count for s, count in parts], dtype=np.int32),
        block_tables=tables,
        copy_sources=np.zeros(0, dtype=np.int64),
        copy_destinations=np.zeros(0, dtype=np.int64),
        sample_rows=tuple(row for _, row in sampled),
        sample_indices=np.array([starts[index + 1] - 1 for index, _ in sampled], dtype=np.int64),
    )


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
