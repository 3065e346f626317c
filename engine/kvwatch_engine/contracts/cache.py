"""Shape of the KV cache of one group of layers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of a KV cache; see the layout diagram in engine/README.md.

    All blocks of a pool have the same number of bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in one block."""
    dtype: str
    """Name of the torch dtype of keys and values: `float32`, `bfloat16` or `float16`."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.bytes_per_token * self.block_size
