"""Groups of layers, the shape of their KV cache, and who owns its memory."""

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from kvwatch_engine.contracts.step import Int64Array

KVDtype = Literal["auto", "int8", "fp8_e4m3", "fp8_e5m2"]
"""How keys and values are kept: as the model computes them, or quantised with a scale for each token and head."""

QUANTISED_DTYPES: Final[dict[KVDtype, str]] = {
    "int8": "int8",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Names of the torch dtypes."""

BLOCK_ALIGNMENT: Final = 64
"""Every block, and the scales in it, start at a multiple of this many bytes: a line of the processor's cache."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2} | dict.fromkeys(QUANTISED_DTYPES.values(), 1)
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind of attention. Each group has block tables of its own over the pool that all share."""

    layers: tuple[int, ...] = ()
    """Indices in the model, ascending."""
    window: int | None = None
    """Tokens that a query sees, itself included; none sees all."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of a KV cache; see the layout diagram in engine/README.md.

    All blocks of a pool have the same number of bytes, whichever group uses them.
    """

    num_layers: int
    """Layers of one group."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in one block."""
    dtype: str
    """Name of the torch dtype of keys and values: `float32`, `bfloat16`, `float16`, or a quantised one."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES[self.dtype]

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values come with scales."""
        return self.dtype in QUANTISED_DTYPES.values()

    @property
    def num_heads_per_token(self) -> int:
        """Keys and values of one token over all layers and heads: so many scales has it where there are any."""
        return 2 * self.num_layers * self.num_kv_heads

    @property
    def scales_offset(self) -> int:
        """Bytes of a block before its scales: keys and values, padded."""
        return _padded(self.num_heads_per_token * self.block_size * self.head_dim * self.dtype_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers: keys and values, scales where there are any, padding."""
        num_scales = self.num_heads_per_token * self.block_size if self.is_quantised else 0
        return self.scales_offset + _padded(num_scales * _SCALE_BYTES)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


class BlockMemory(Protocol):
    """The memory behind a pool's blocks, which can be had anew in another size. Engine thread only."""

    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        """Go on with memory for `num_blocks` blocks, of which `destinations[i]` holds what `sources[i]` held before.

        All or nothing: an exception, for instance since memory is short, leaves the old memory in use.

        Args:
            num_blocks: blocks from now on, the null block included.
            sources: i64[num_kept]. Blocks of the old memory.
            destinations: i64[num_kept]. Blocks of the new memory, each once. All others hold nothing.
        """
        ...
