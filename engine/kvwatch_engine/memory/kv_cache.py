"""The tensor behind the blocks. Its layout is drawn in engine/README.md, section "KV cache layout"."""

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from kvwatch_engine.contracts.cache import BLOCK_ALIGNMENT, KVCacheSpec
from kvwatch_engine.contracts.step import Int64Array
from kvwatch_kernels.block_copy import block_copy

PAGE_BYTES: Final = 4096
"""No system has smaller pages."""
_BATCH_BYTES: Final = 32 * 2**20
"""Bytes that are copied at once when a cache is rebuilt: they take memory a third time."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers by their size in bytes."""


class KVCache:
    """Keys and values of all blocks of one pool.

    One tensor holds everything, and a block is contiguous over all layers, scales included: copying, swapping or moving
    a block is one memory copy. Only the engine thread may use it. On a CPU memory is claimed from the operating system
    when a block is first written, so that a large pool costs nothing before it is needed.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        """Allocate a zeroed cache of `num_blocks` blocks, the null block included.

        Raises:
            ValueError: there is not at least one block beside the null block.
        """
        if num_blocks < 2:
            raise ValueError(f"a KV cache of {num_blocks} blocks holds nothing: block 0 is reserved; give at least 2")
        self.spec = spec
        self.num_blocks = num_blocks
        self._blocks = _zeros(num_blocks, spec.block_bytes, torch.device(device))
        shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        self._data = _view(self._blocks, 0, getattr(torch, spec.dtype), shape)
        self._scales: torch.Tensor | None = None
        if spec.is_quantised:
            self._scales = _view(self._blocks, spec.scales_offset, torch.float32, shape[:-1])
        # Views are made once: making two a layer and step would cost more than the small kernels they are for.
        self._layers = tuple((self._data[:, i, 0], self._data[:, i, 1]) for i in range(spec.num_layers))
        self._layer_scales = tuple(self._views_of_scales(i) for i in range(spec.num_layers))

    def _views_of_scales(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None, None) if self._scales is None else (self._scales[:, index, 0], self._scales[:, index, 1])

    @property
    def blocks(self) -> torch.Tensor:
        """Everything: `uint8[num_blocks, block_bytes]`, contiguous. A block is its data, its scales, padding."""
        return self._blocks

    @property
    def data(self) -> torch.Tensor:
        """Keys and values: view `dtype[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""
        return self._data

    @property
    def scales(self) -> torch.Tensor | None:
        """Their scales: view `float32[num_blocks, num_layers, 2, num_kv_heads, block_size]`; none if not quantised."""
        return self._scales

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self._blocks.device

    @property
    def num_bytes(self) -> int:
        """Size of the cache in bytes."""
        return self._blocks.nbytes

    def claim(self) -> None:
        """Take all memory from the operating system now; what is in the cache stays."""
        if self.device.type == "cpu":
            flat = self._blocks.view(-1)
            flat[::PAGE_BYTES] = flat[::PAGE_BYTES].clone()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key cache and the value cache of one layer.

        Returns:
            Two views `dtype[num_blocks, num_kv_heads, block_size, head_dim]`; a (head, block) is contiguous, the
            stride between blocks is that of a whole block over all layers. O(1), no allocation.
        """
        return self._layers[index]

    def layer_scales(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of the keys and of the values of one layer; two times none if not quantised.

        Returns:
            Two views `float32[num_blocks, num_kv_heads, block_size]`. O(1), no allocation.
        """
        return self._layer_scales[index]

    def copy_blocks(self, sources: Int64Array, destinations: Int64Array) -> None:
        """Copy whole blocks over all layers (copy-on-write).

        Args:
            sources: i64[num_copies]. Blocks to read.
            destinations: i64[num_copies]. Blocks to overwrite; none of them is also a source.
        """
        block_copy(self._blocks, sources, destinations)

    def rebuilt(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> "KVCache":
        """Return a cache of another size, whose block `destinations[i]` holds what `sources[i]` holds here.

        This one stays as it is. Both exist for a while: on a CPU only the blocks that are copied take memory twice,
        on a GPU the whole of both caches does.
        """
        cache = KVCache(self.spec, num_blocks, self.device)
        batch = max(1, _BATCH_BYTES // self.spec.block_bytes)
        for first in range(0, len(sources), batch):
            from_blocks = torch.from_numpy(sources[first : first + batch]).to(self.device)
            to_blocks = torch.from_numpy(destinations[first : first + batch]).to(self.device)
            cache._blocks.index_copy_(0, to_blocks, self._blocks.index_select(0, from_blocks))
        return cache

    def relaid(self, spec: KVCacheSpec, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> "KVCache":
        """Return a cache with blocks of another size, whose slot `destinations[i]` holds what `sources[i]` holds here.

        Bits stay as they are, scales included. This one stays as it is, as with `rebuilt`.

        Args:
            spec: as this cache's, but for the block size.
            num_blocks: blocks of the new cache, the null block included.
            sources: i64[num_slots]. Slots of this cache.
            destinations: i64[num_slots]. Slots of the new one, each once.
        """
        assert replace(spec, block_size=self.spec.block_size) == self.spec, "else a slot would not hold the same"
        cache = KVCache(spec, num_blocks, self.device)
        slot_bytes = spec.num_heads_per_token * (spec.head_dim * spec.dtype_bytes + 4)
        batch = max(1, _BATCH_BYTES // slot_bytes)
        for first in range(0, len(sources), batch):
            of_slots = sources[first : first + batch], destinations[first : first + batch]
            from_blocks, from_offsets = _places(of_slots[0], self.spec.block_size, self.device)
            to_blocks, to_offsets = _places(of_slots[1], spec.block_size, self.device)
            kept = self._bits()[from_blocks, :, :, :, from_offsets]
            cache._bits()[to_blocks, :, :, :, to_offsets] = kept
            if self._scales is not None and cache._scales is not None:
                cache._scales[to_blocks, :, :, :, to_offsets] = self._scales[from_blocks, :, :, :, from_offsets]
        return cache

    def _bits(self) -> torch.Tensor:
        """Return keys and values as integers of the same size: indexing knows every such type, and changes no bit."""
        return self._data.view(_INTEGERS[self.spec.dtype_bytes])


def _places(slots: Int64Array, block_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of slots, and their offsets in these."""
    return torch.from_numpy(slots // block_size).to(device), torch.from_numpy(slots % block_size).to(device)


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeroed, aligned blocks `uint8[num_blocks, block_bytes]`; see `KVCache` for when memory is claimed."""
    if device.type != "cpu":
        return torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)
    # torch.zeros writes its zeros, NumPy takes those of the operating system.
    memory = np.zeros(num_blocks * block_bytes + BLOCK_ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % BLOCK_ALIGNMENT
    return torch.from_numpy(memory[first : first + num_blocks * block_bytes]).view(num_blocks, block_bytes)


def _view(blocks: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view `dtype[num_blocks, ...]` of what lies `offset` bytes into each of `blocks`."""
    elements = blocks.view(dtype)
    strides = [1]
    for length in reversed(shape[2:]):
        strides.insert(0, strides[0] * length)
    return elements.as_strided(shape, (elements.stride(0), *strides), offset // dtype.itemsize)
