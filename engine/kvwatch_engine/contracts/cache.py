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


def most_window_blocks(window: int, max_chunk: int, block_size: int) -> int:
    """Return the most blocks of a sequence that a group with a window holds, computed in chunks of `max_chunk` tokens.

    The first token of a chunk sees `window` - 1 tokens before it, and they begin anywhere in a block.
    """
    return (window + max_chunk - 3) // block_size + 2


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


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the bytes of a block are laid out."""

    block_size: int
    """Tokens in one block."""
    kv_dtype: KVDtype
    dtype: str
    """Name of the torch dtype of keys and values: what `kv_dtype` is for this model."""
    block_bytes: int
    """Size of one block over all layers."""

    def has_same_content(self, other: "BlockLayout") -> bool:
        """Whether what a slot holds is the same, bit for bit, in both."""
        return self.dtype == other.dtype


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

    def layout(self, block_size: int, kv_dtype: KVDtype) -> BlockLayout:
        """Return how blocks would be laid out; changes nothing.

        Raises:
            ValueError: such blocks are not possible.
        """
        ...

    def free_bytes(self) -> int:
        """Return how much memory is left where the blocks are, beside that of the present ones."""
        ...

    def relay(self, layout: BlockLayout, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        """Go on with blocks laid out otherwise, of which slot `destinations[i]` holds what slot `sources[i]` held.

        All or nothing, as `rebuild`. Both memories exist for a while.

        Args:
            layout: of the new memory; the content of a slot is the same in both.
            num_blocks: blocks from now on, the null block included.
            sources: i64[num_slots]. Slots of the old memory.
            destinations: i64[num_slots]. Slots of the new memory, each once. All others hold nothing.
        """
        ...

    def replace(self, layout: BlockLayout, num_blocks: int) -> None:
        """Go on with empty blocks laid out otherwise. The old memory is let go first, so that there is room.

        An exception, for instance since memory is short, leaves memory of the old layout and size, empty as well.
        """
        ...
