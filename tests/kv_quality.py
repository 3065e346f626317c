"""What quantising keys and values costs in quality: a model reads text twice, and its predictions are compared.

Teacher forcing: at each position the model is asked for the next token of the text, whatever it would have written
itself. All is computed in the model's own dtype; only how keys and values are kept differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from paged_sequences import PagedSequence, packed_step
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from kvwatch_engine.contracts.cache import KVDtype
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.loader import LoadedModel

BLOCK_SIZE = 16
CHUNK_TOKENS = 256
"""Tokens that are computed together; all keys and values are read from the cache, those of the chunk too."""

MAX_PERPLEXITY_RISE = {"int8": 0.005, "fp8_e4m3": 0.015, "fp8_e5m2": 0.03}
MIN_AGREEMENT = {"int8": 0.97, "fp8_e4m3": 0.93, "fp8_e5m2": 0.88}


@dataclass(frozen=True)
class Predictions:
    """What a model made of some texts, position by position."""

    surprise: Tensor
    """f32[num_positions]: -log of the probability that the text's next token was given."""
    best: Tensor
    """i64[num_positions]: the most probable next token."""

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.surprise.double().mean()))

    def rise_over(self, other: "Predictions") -> float:
        """By which part perplexity is higher than that of `other`."""
        return self.perplexity / other.perplexity - 1

    def agreement_with(self, other: "Predictions") -> float:
        """Part of the positions with the same best token."""
        return float((self.best == other.best).double().mean())


def long_texts(model_folder: Path, names: Sequence[str] | None = None) -> list[list[int]]:
    """Return the texts of `tests/texts` in a model's tokens: all of them, or those of the given names."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    files = sorted((Path(__file__).parent / "texts").glob("*.txt"))
    chosen = [file for file in files if names is None or file.stem in names]
    return [tokenizer(file.read_text(encoding="utf-8")).input_ids for file in chosen]


@torch.inference_mode()
def predict(model: LoadedModel, texts: Sequence[Sequence[int]], kv_dtype: KVDtype) -> Predictions:
    """Let a model read texts, each from an empty cache on.

    Args:
        model: computes in its own dtype.
        texts: token ids; of a text of n tokens n - 1 positions count.
        kv_dtype: how keys and values are kept.
    """
    surprises, bests = [], []
    for text in texts:
        num_blocks = -(-len(text) // BLOCK_SIZE)
        cache = KVCache(model.cache_spec(BLOCK_SIZE, kv_dtype), num_blocks + 1)
        sequence = PagedSequence(list(text), list(range(num_blocks, 0, -1)))
        for first in range(0, len(text) - 1, CHUNK_TOKENS):
            sequence.num_computed = first
            count = min(CHUNK_TOKENS, len(text) - 1 - first)
            step = packed_step([(sequence, count)], block_size=BLOCK_SIZE)
            hidden = model.decoder.hidden_states(
                torch.from_numpy(step.token_ids), torch.from_numpy(step.positions), StepAttention.of_step(cache, step)
            )
            logits = model.decoder.logits(hidden)
            following = torch.tensor(text[first + 1 : first + 1 + count])
            surprises.append(functional.cross_entropy(logits.float(), following, reduction="none"))
            bests.append(logits.argmax(dim=-1))
    return Predictions(torch.cat(surprises), torch.cat(bests))
