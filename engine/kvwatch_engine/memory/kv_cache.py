"""The tensor behind the blocks. Its layout is drawn in engine/README.md, section "KV cache layout"."""

import torch

from kvwatch_engine.contracts.cache import KVCacheSpec
from kvwatch_engine.contracts.step import Int64Array
from kvwatch_kernels.block_copy import block_copy


class KVCache:
    """Keys and values of all blocks of one pool.

    One tensor holds everything, and a block is contiguous over all layers: copying, swapping or moving a block is one
    memory copy. Only the engine thread may use it. Memory is claimed from the operating system when a block is first
    written, so that a large pool costs nothing before it is needed.
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
        shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        self._data = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        # Views are made once: making two a layer and step would cost more than the small kernels they are for.
        self._layers = tuple((self._data[:, i, 0], self._data[:, i, 1]) for i in range(spec.num_layers))

    @property
    def data(self) -> torch.Tensor:
        """The whole cache: `dtype[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous."""
        return self._data

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self._data.device

    @property
    def num_bytes(self) -> int:
        """Size of the cache in bytes."""
        return self._data.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key cache and the value cache of one layer.

        Returns:
            Two views `dtype[num_blocks, num_kv_heads, block_size, head_dim]`; a (head, block) is contiguous, the
            stride between blocks is that of a whole block over all layers. O(1), no allocation.
        """
        return self._layers[index]

    def copy_blocks(self, sources: Int64Array, destinations: Int64Array) -> None:
        """Copy whole blocks over all layers (copy-on-write).

        Args:
            sources: i64[num_copies]. Blocks to read.
            destinations: i64[num_copies]. Blocks to overwrite; none of them is also a source.
        """
        block_copy(self._data, sources, destinations)
