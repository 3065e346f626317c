"""The CPU kernels as the attention of staged steps: what is made for a GPU runs without one."""

import numpy as np

from kvwatch_engine.contracts.step import GroupBlocks
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.staging import StagedStep


class CpuAttention(StepAttention):
    """The CPU kernels over staged arrays, and the bounds that they were asked for."""

    bounds: tuple[int, int]

    def __init__(self, cache: KVCache, staged: StagedStep, places: LayerPlaces, *bounds: int) -> None:
        super().__init__(
            cache,
            [
                GroupBlocks(slot_mapping=group.slot_mapping.numpy(), block_tables=group.block_tables.numpy())
                for group in staged.groups
            ],
            query_starts=staged.query_starts.numpy(),
            context_lens=staged.context_lens.numpy(),
            places=places,
        )
        assert int(np.diff(staged.query_starts.numpy()).max()) <= bounds[0]
        assert int(staged.context_lens.max()) <= bounds[1]
