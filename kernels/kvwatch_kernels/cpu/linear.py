"""Host side of the compiled linear layer: pack a weight, lay out the arguments, launch."""

from array import array
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import binding
from numba import types
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.cpu.compiled import entry_point, source_digest
from kvwatch_kernels.cpu.linear_body import (
    BIAS,
    BLOCK_ROWS,
    DEPTH,
    FLOAT_BYTES,
    NUM_COLUMNS,
    NUM_FIELDS,
    NUM_PANELS,
    NUM_ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    WEIGHT,
    WIDEN_FROM_ROWS,
    X_STRIDE,
    Y_STRIDE,
    X,
    Y,
    run_linear,
)
from kvwatch_kernels.cpu.linear_product import MAX_ROWS, PANEL
from kvwatch_kernels.cpu.memory import i64_at
from kvwatch_kernels.cpu.threads import launcher
from kvwatch_kernels.cpu.vectors import LANES

_BF16_BYTES = 2
_BLOCK_BYTES = 1 << 20
"""Bytes of a block of x: with a widened panel it stays in the L2 cache."""
_MIN_PRODUCTS = 4
"""Products of a block at least, however long the rows are: fewer would not repay fetching a panel."""


@cache
def has_fast_linear() -> bool:
    """Whether this CPU has AVX-512, or AVX2 with fused multiply-adds: on others it was never measured."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512f") or (features.get("avx2") and features.get("fma")))


def pack_panels(weight: Tensor) -> Tensor:
    """Reorder a weight into panels of `PANEL` output features; the last is filled up with zeros.

    Args:
        weight: float32 or bfloat16 `[out_features, in_features]`.

    Returns:
        Its dtype, `[num_panels, in_features, PANEL]`. In bfloat16 feature i of a panel's first half lies beside feature
        i of its second half: one 32-bit lane holds both.
    """
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    padded = functional.pad(weight, (0, 0, 0, num_panels * PANEL - out_features))
    if weight.dtype == torch.float32:
        return padded.view(num_panels, PANEL, in_features).transpose(1, 2).contiguous()
    pairs = padded.view(num_panels, 2, LANES, in_features).permute(0, 3, 2, 1)
    return pairs.reshape(num_panels, in_features, PANEL)


def pack_bias(bias: Tensor | None, num_panels: int) -> Tensor:
    """Return f32[num_panels * PANEL]: a bias, and zeros.

    Args:
        bias: float32 or bfloat16 `[out_features]`, or none.
        num_panels: of the weight.
    """
    padded = torch.zeros(num_panels * PANEL, dtype=torch.float32)
    if bias is not None:
        padded[: len(bias)] = bias
    return padded


@cache
def linear_code(dtype: torch.dtype) -> int:
    """Address of the compiled layer (compiled, or loaded from the disk cache, once in a process).

    Args:
        dtype: of the weight: float32 or bfloat16.
    """
    digest = source_digest()

    def run_f32(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        run_linear(i64_at(address), FLOAT_BYTES)

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        run_linear(i64_at(address), _BF16_BYTES)

    return entry_point(types.void(types.int64), run_f32 if dtype == torch.float32 else run_bf16)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A layer's weight and bias in the order in which the products read them; see `kvwatch_kernels.linear`."""

    panels: Tensor
    """The weight; see `pack_panels`."""
    bias: Tensor
    """See `pack_bias`."""
    in_features: int
    out_features: int
    block_rows: int
    """Rows of one block of x: whole products, about `_BLOCK_BYTES`."""
    arguments: "array[int]"
    """What every call hands to the compiled code, copied and filled in: a step has hundreds of calls."""

    @property
    def num_bytes(self) -> int:
        """Memory that weight and bias take."""
        return self.panels.nbytes + self.bias.nbytes


def packed_layer(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """Pack a checked layer.

    Args:
        weight: float32 or bfloat16 `[out_features, in_features]`, CPU.
        bias: float32 or bfloat16 `[out_features]`, or none.
    """
    out_features, in_features = weight.shape
    panels = pack_panels(weight)
    padded_bias = pack_bias(bias, len(panels))
    block_rows = max(_BLOCK_BYTES // (in_features * FLOAT_BYTES * MAX_ROWS), _MIN_PRODUCTS) * MAX_ROWS
    arguments = array("q", [0] * NUM_FIELDS)
    arguments[WEIGHT], arguments[BIAS] = panels.data_ptr(), padded_bias.data_ptr()
    arguments[DEPTH], arguments[BLOCK_ROWS] = in_features, block_rows
    arguments[NUM_PANELS] = len(panels)
    arguments[NUM_COLUMNS] = arguments[Y_STRIDE] = out_features
    return PackedWeight(panels, padded_bias, in_features, out_features, block_rows, arguments)


def compiled_linear(x: Tensor, x_stride: int, packed: PackedWeight, out: Tensor, num_rows: int) -> None:
    """Write the layer's result to `out`; see `kvwatch_kernels.linear`.

    Args:
        x: f32[num_rows, in_features], CPU, last dim contiguous.
        x_stride: elements from one row to the next.
        packed: the layer.
        out: f32[num_rows, out_features], contiguous; written.
        num_rows: at least 1.
    """
    arguments = packed.arguments[:]
    arguments[X], arguments[X_STRIDE] = x.data_ptr(), x_stride
    arguments[Y], arguments[NUM_ROWS] = out.data_ptr(), num_rows
    num_items = arguments[NUM_PANELS] * -(-num_rows // packed.block_rows)
    num_threads = min(num_items, torch.get_num_threads())
    # A tile for a panel that is not full, and behind it a widened panel: most calls of a decode need neither.
    if num_rows >= WIDEN_FROM_ROWS or packed.out_features % PANEL:
        scratch_rows = MAX_ROWS + (packed.in_features if num_rows >= WIDEN_FROM_ROWS else 0)
        scratch = torch.empty((num_threads, scratch_rows, PANEL), dtype=torch.float32)
        arguments[SCRATCH], arguments[SCRATCH_BYTES] = scratch.data_ptr(), scratch_rows * PANEL * FLOAT_BYTES
    launcher()(linear_code(packed.panels.dtype), arguments.buffer_info()[0], num_threads)
