"""Proof at load that a network over the paged cache computes what transformers computes without it.

Names of architectures promise little: an unknown model may bias its scores, place its positions or scale its logits in
a way of its own. So a few tokens are computed both ways, packed and in chunks here, sequence by sequence there, and who
differs is refused. Where there are windows it is done again with windows of few tokens, which shows whether they act in
the layers that ask for them and in no others. What else shows only beyond these few tokens is not proven.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from kvwatch_engine.contracts.cache import KVCacheSpec, KVGroup
from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.step import GroupBlocks, Int32Array
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.transformers_backend.network import TransformersNetwork
from kvwatch_engine.model.transformers_backend.route import IMPLEMENTATION, PagedTarget

_CHUNKS: Final = ((6, 9), (5, 1))
"""Tokens of two sequences in each of two steps: the second begins within a block, and mixes a chunk with a decode."""

_SHORT_WINDOW: Final = 4
"""Tokens of a window that the sequences outgrow."""

_LIMITS: Final = {torch.float32: 1e-2, torch.bfloat16: 0.25}
"""Most that logits may differ, as a part of their standard deviation. Rounding to bfloat16 gives some hundredths."""


@torch.inference_mode()
def prove(network: TransformersNetwork, spec: KVCacheSpec, groups: tuple[KVGroup, ...]) -> None:
    """Compare logits over a small paged cache with those of transformers' own attention.

    Args:
        network: loaded.
        spec: of its cache.
        groups: its KV groups.

    Raises:
        ModelError: they differ.
    """
    _compare(network, spec, groups, None)
    own = vars(network.model.config).get("sliding_window")
    if isinstance(own, int) and own > _SHORT_WINDOW:
        _compare(network, spec, groups, _SHORT_WINDOW)


def _compare(network: TransformersNetwork, spec: KVCacheSpec, groups: tuple[KVGroup, ...], window: int | None) -> None:
    """Compare both ways, with windows of another length if one is given.

    Raises:
        ModelError: they differ.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(network.model.config.get_text_config().vocab_size)
    sequences = [
        torch.randint(vocab_size, (sum(counts),), generator=generator) for counts in zip(*_CHUNKS, strict=True)
    ]
    paged = _PagedSequences(network, spec, groups, sequences, window)
    ours = [torch.cat(rows) for rows in zip(*(paged.compute(counts) for counts in _CHUNKS), strict=True)]
    theirs = [_own_logits(network.model, ids, window) for ids in sequences]
    differences = _row_differences(torch.cat(ours), torch.cat(theirs))
    # In bfloat16 a router may send a token to another expert for a rounding: one row then says nothing.
    found = float(differences.max() if network.dtype == torch.float32 else differences.median())
    if not found <= _LIMITS[network.dtype]:  # nor is NaN
        raise ModelError(
            f"architecture {type(network.model).__name__} is not supported: over a paged cache its logits differ from "
            f"transformers' own by {found:.2g} of their standard deviation, so that it must use more than keys, values "
            f"and positions{'' if window is None else ', or other windows than its layers ask for'}"
        )


def _row_differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return f32[num_rows]: the largest difference of each row, in standard deviations."""
    return (found - expected).abs().amax(dim=-1) / expected.std(dim=-1)


def _own_logits(model: PreTrainedModel, token_ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return f32[num_tokens, vocab_size] as transformers computes it in plain torch."""
    model.config._attn_implementation = "eager"
    own = getattr(model.config, "sliding_window", None)
    if window is not None:
        model.config.sliding_window = window  # masks are made by it
    try:
        logits: torch.Tensor = model(input_ids=token_ids[None].to(model.device), use_cache=False).logits[0]
    finally:
        model.config._attn_implementation = IMPLEMENTATION
        if window is not None:
            model.config.sliding_window = own
    return logits.float()


class _PagedSequences:
    """Sequences with blocks of their own in each KV group of a small cache, computed in packed steps."""

    def __init__(
        self,
        network: TransformersNetwork,
        spec: KVCacheSpec,
        groups: tuple[KVGroup, ...],
        token_ids: Sequence[torch.Tensor],
        window: int | None,
    ) -> None:
        most = -(-max(map(len, token_ids)) // spec.block_size)
        shape = len(groups), len(token_ids), most
        self._tables = np.arange(1, 1 + math.prod(shape), dtype=np.int32).reshape(shape)
        self._cache = KVCache(spec, 1 + self._tables.size, network.device)
        self._network = network
        self._places = LayerPlaces(groups)
        self._token_ids = token_ids
        self._window = window
        self._num_computed = [0] * len(token_ids)

    def compute(self, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return f32[count, vocab_size] for the next so many tokens of each sequence."""
        before = self._num_computed
        self._num_computed = [first + count for first, count in zip(before, counts, strict=True)]
        spans = list(zip(before, self._num_computed, strict=True))
        attention = StepAttention(
            self._cache,
            [self._blocks_of(tables, spans) for tables in self._tables],
            query_starts=np.array([0, *np.cumsum(counts)], dtype=np.int32),
            context_lens=np.array(self._num_computed, dtype=np.int32),
            places=self._places,
        )
        token_ids = torch.cat([ids[slice(*span)] for ids, span in zip(self._token_ids, spans, strict=True)])
        positions = torch.cat([torch.arange(*span) for span in spans])
        device = self._network.device
        target = PagedTarget(attention, self._window)
        hidden = self._network.run(token_ids.to(device), positions.to(device), target)
        return list(torch.split(self._network.logits(hidden), list(counts)))

    def _blocks_of(self, tables: Int32Array, spans: Sequence[tuple[int, int]]) -> GroupBlocks:
        size = self._cache.spec.block_size
        slots = [
            table[at // size] * size + at % size
            for table, span in zip(tables, spans, strict=True)
            for at in range(*span)
        ]
        return GroupBlocks(slot_mapping=np.array(slots, dtype=np.int64), block_tables=tables)
