"""Runs one step: block copies, forward pass, sampling."""

import time

import numpy as np
import torch

from kvwatch_engine.contracts.block import NULL_BLOCK, PAD_SLOT
from kvwatch_engine.contracts.step import Int64Array, StepInput, StepResult
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention, warm_up_attention
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.sampler import sample

_WARM_UP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Numbers of tokens in one step whose matrix products are prepared at start, if they can occur at all."""


class ModelRunner:
    """Executes steps of one model on one KV cache. Engine thread only; keeps nothing from one step to the next."""

    def __init__(self, model: LoadedModel, kv_cache: KVCache) -> None:
        """Bind a model to its cache, see `rebind`."""
        self._model = model
        self.rebind(kv_cache)

    @property
    def kv_cache(self) -> KVCache:
        """The cache that steps read and write."""
        return self._kv_cache

    def rebind(self, kv_cache: KVCache) -> None:
        """Use another cache from the next step on; what the old one holds is not moved.

        Raises:
            ValueError: the cache is not of this model's shape.
        """
        expected = self._model.cache_spec(kv_cache.spec.block_size)
        if kv_cache.spec != expected:
            raise ValueError(f"a KV cache of {kv_cache.spec} does not fit this model, which needs {expected}")
        self._kv_cache = kv_cache

    def execute(self, step: StepInput) -> StepResult:
        """Carry out a step and choose its tokens.

        Copies come first, then the tokens' keys and values are written and attended to, layer by layer. Logits are
        computed once for each token that is sampled from, however many rows share it.
        """
        started = time.perf_counter_ns()
        if len(step.copy_sources):
            self._kv_cache.copy_blocks(step.copy_sources, step.copy_destinations)
        sampled, logits_rows = np.unique(step.sample_indices, return_inverse=True)
        logits = self._forward(step, sampled)
        forwarded = time.perf_counter_ns()
        samples = sample(logits, step.sample_rows, logits_rows.tolist())
        return StepResult(
            token_ids=samples.token_ids,
            logprobs=samples.logprobs,
            forward_ns=forwarded - started,
            sample_ns=time.perf_counter_ns() - forwarded,
            errors=samples.errors,
        )

    def warm_up(self, max_tokens: int) -> None:
        """Do once what would make the first requests slow: compile kernels, prepare products, touch the weights.

        Nothing is written to the cache, whose memory is claimed block by block as it is used.

        Args:
            max_tokens: most tokens of one step.
        """
        warm_up_attention(self._kv_cache, self._model.info.num_heads)
        for num_tokens in sorted({min(size, max_tokens) for size in _WARM_UP_TOKENS}):
            self._forward(_idle_step(num_tokens), np.arange(num_tokens, dtype=np.int64))

    @torch.inference_mode()
    def _forward(self, step: StepInput, sampled: Int64Array) -> torch.Tensor:
        """Return f32[len(sampled), vocab_size], the logits of the packed tokens that `sampled` names."""
        decoder = self._model.decoder
        # torch.tensor copies: it may then not mind that the step's arrays are read-only.
        hidden = decoder.hidden_states(
            torch.tensor(step.token_ids), torch.tensor(step.positions), StepAttention.of_step(self._kv_cache, step)
        )
        return decoder.logits(hidden[torch.tensor(sampled)])


def _idle_step(num_tokens: int) -> StepInput:
    """Return a step of single-token sequences that writes nothing and samples nothing."""
    return StepInput(
        step=0,
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.zeros(num_tokens, dtype=np.int64),
        slot_mapping=np.full(num_tokens, PAD_SLOT, dtype=np.int64),
        query_starts=np.arange(num_tokens + 1, dtype=np.int32),
        context_lens=np.ones(num_tokens, dtype=np.int32),
        block_tables=np.full((num_tokens, 1), NULL_BLOCK, dtype=np.int32),
        copy_sources=np.zeros(0, dtype=np.int64),
        copy_destinations=np.zeros(0, dtype=np.int64),
        sample_rows=(),
        sample_indices=np.zeros(0, dtype=np.int64),
    )
