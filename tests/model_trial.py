"""Tries one family: greedy text of the engine against transformers' `generate`, alone and batched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grouped_models import Reference, WatchedEngine
from model_families import Family
from prompts import PROMPTS
from tiny_models import tiny_tokenizer

from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.model.loader import LoadedModel, load_model

NUM_TOKENS = 24
BLOCK_SIZE = 8
TRIED_PROMPTS = (PROMPTS[0], PROMPTS[4], PROMPTS[7], PROMPTS[2], PROMPTS[16])
"""Of 1 to some hundred tokens, so that they lie before, in and beyond a window."""
MAX_BATCH_TOKENS = 24
"""Of a step: the longer prompts are computed in chunks, beside the decodes of the shorter ones."""


@dataclass(frozen=True)
class Trial:
    """What came out."""

    info: ModelInfo
    bytes_per_token: int
    """Of a cache in the dtype that was computed in, over all layers."""
    num_excused: int
    """Answers that differ where transformers' two best tokens are nearly tied."""


def prompts() -> list[list[int]]:
    """Return the prompts as token ids."""
    return [tiny_tokenizer()(text).input_ids for text in TRIED_PROMPTS]


def try_family(family: Family, folder: Path) -> Trial:
    """Make a model in `folder` and compare; an AssertionError says where texts differ."""
    family.make(folder)
    reference = Reference.load(folder)
    model = load_model(str(folder), dtype="float32")
    assert model.info.implementation == family.implementation
    asked = prompts()
    expected = [reference.answer(prompt, NUM_TOKENS) for prompt in asked]
    alone = [answer for prompt in asked for answer in _answers(model, [prompt])]
    for answers in (alone, _answers(model, asked)):
        for prompt, answer, wanted in zip(asked, answers, expected, strict=True):
            reference.check(prompt, answer, wanted)
    spec = model.cache_spec(BLOCK_SIZE)
    return Trial(model.info, spec.block_bytes * len(model.info.groups) // BLOCK_SIZE, reference.num_excused)


def engine_for(model: LoadedModel, *, num_blocks: int = 400, max_batch_tokens: int = MAX_BATCH_TOKENS) -> WatchedEngine:
    """Return an engine whose cache is full of NaN."""
    return WatchedEngine(
        model,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=min(256, model.info.max_position),
        max_num_seqs=8,
        max_batch_tokens=max_batch_tokens,
    )


def _answers(model: LoadedModel, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    return [answer for (answer,) in engine_for(model).run(asked, NUM_TOKENS)]
