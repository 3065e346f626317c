"""The blocks of the KV cache as a store, on a CPU or a GPU. The only module of the tiers that knows torch."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers.stores import BlockStore, Bytes, MemoryStore
from kvwatch_kernels.block_copy import gather_blocks, scatter_blocks


class DeviceStore:
    """Blocks of a cache on a GPU. Each thread copies on a stream of its own; returns when the copy has ended.

    Steps that were begun before have ended when a transfer is begun: their tokens are known to the host. Steps that
    are begun after a transfer has ended see what it wrote. In between they touch other blocks.
    """

    def __init__(self, cache: Callable[[], KVCache]) -> None:
        """Use what `cache` returns at that moment."""
        self._cache = cache

    def read(self, keys: Sequence[int], out: Bytes) -> None:
        """Gather blocks on the device, then bring them over in one copy."""
        blocks = self._cache().blocks
        stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(blocks.device))
        with torch.cuda.stream(stream):
            staged = torch.empty((len(keys), blocks.shape[1]), dtype=torch.uint8, device=blocks.device)
            gather_blocks(blocks, np.array(keys, np.int64), staged)
            torch.from_numpy(out).copy_(staged, non_blocking=True)
        stream.synchronize()

    def write(self, keys: Sequence[int], data: Bytes) -> None:
        """Bring blocks over in one copy, then scatter them on the device."""
        blocks = self._cache().blocks
        stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(blocks.device))
        with torch.cuda.stream(stream):
            staged = torch.from_numpy(data).to(blocks.device, non_blocking=True)
            scatter_blocks(staged, blocks, np.array(keys, np.int64))
        stream.synchronize()


def device_store(cache: Callable[[], KVCache]) -> BlockStore[int]:
    """Return the store of a cache that may be replaced; its device stays."""
    if cache().device.type == "cpu":
        return MemoryStore(lambda: cache().blocks.numpy())  # noqa: PLW0108  # it may be another one each time
    return DeviceStore(cache)


def pinned_memory(num_blocks: int, block_bytes: int) -> Bytes:
    """Return page-locked memory uint8[num_blocks, block_bytes], which a GPU can copy from and to by itself."""
    memory: Bytes = torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=True).numpy()
    return memory
