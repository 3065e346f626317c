"""Host side of the compiled linear layer: pack a weight, lay out the arguments, launch."""

from array import array
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import binding
from numba import types
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.cpu.call import KernelCall
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
    run_paired_linear,
)
from kvwatch_kernels.cpu.linear_product import MAX_ROWS, PANEL
from kvwatch_kernels.cpu.memory import i64_at
from kvwatch_kernels.cpu.pairs import multiplies_pairs
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


@cache
def has_fast_pairs() -> bool:
    """Whether products in bfloat16 are fast here: with AVX512-BF16, and without AMX, for which oneDNN is faster."""
    return multiplies_pairs() and not binding.get_host_cpu_features().get("amx-bf16")


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


def pack_pairs(weight: Tensor) -> Tensor:
    """Reorder a weight into panels for products of bfloat16 with bfloat16.

    Args:
        weight: bfloat16 `[out_features, in_features]`, an even number of input features.

    Returns:
        bfloat16 `[num_panels, in_features / 2, PANEL, 2]`: beside each input feature of an output lies its neighbour.
    """
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    padded = functional.pad(weight, (0, 0, 0, num_panels * PANEL - out_features))
    return padded.view(num_panels, PANEL, in_features // 2, 2).transpose(1, 2).contiguous()


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
def linear_code(dtype: torch.dtype, *, is_paired: bool = False) -> int:
    """Address of the compiled layer (compiled, or loaded from the disk cache, once in a process).

    Args:
        dtype: of the weight: float32 or bfloat16.
        is_paired: x and y are bfloat16 too, see `pack_pairs`.
    """
    digest = source_digest()

    def run_f32(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        run_linear(i64_at(address), FLOAT_BYTES)

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        run_linear(i64_at(address), _BF16_BYTES)

    def run_paired(address: int) -> None:
        digest  # noqa: B018
        run_paired_linear(i64_at(address))

    narrow = run_paired if is_paired else run_bf16
    return entry_point(types.void(types.int64), run_f32 if dtype == torch.float32 else narrow)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A layer's weight and bias in the order in which the products read them; see `kvwatch_kernels.linear`."""

    panels: Tensor
    """The weight; see `pack_panels` and `pack_pairs`."""
    bias: Tensor
    """See `pack_bias`."""
    in_features: int
    out_features: int
    dtype: torch.dtype
    """Of x and y."""
    block_rows: int
    """Rows of one block of x: whole products, about `_BLOCK_BYTES`."""
    arguments: "array[int]"
    """What every call hands to the compiled code, copied and filled in: a step has hundreds of calls."""

    @property
    def num_bytes(self) -> int:
        """Memory that weight and bias take."""
        return self.panels.nbytes + self.bias.nbytes


def packed_layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PackedWeight:
    """Pack a checked layer.

    Args:
        weight: float32 or bfloat16 `[out_features, in_features]`, CPU; bfloat16 with an even number of input features
            where `dtype` is.
        bias: float32 or bfloat16 `[out_features]`, or none.
        dtype: of x and y.
    """
    out_features, in_features = weight.shape
    is_paired = dtype == torch.bfloat16
    panels = pack_pairs(weight) if is_paired else pack_panels(weight)
    padded_bias = pack_bias(bias, len(panels))
    block_rows = max(_BLOCK_BYTES // (in_features * dtype.itemsize * MAX_ROWS), _MIN_PRODUCTS) * MAX_ROWS
    arguments = array("q", [0] * NUM_FIELDS)
    arguments[WEIGHT], arguments[BIAS] = panels.data_ptr(), padded_bias.data_ptr()
    arguments[DEPTH], arguments[BLOCK_ROWS] = in_features // 2 if is_paired else in_features, block_rows
    arguments[NUM_PANELS] = len(panels)
    arguments[NUM_COLUMNS] = arguments[Y_STRIDE] = out_features
    return PackedWeight(panels, padded_bias, in_features, out_features, dtype, block_rows, arguments)


def scratch_rows(packed: PackedWeight, num_rows: int) -> int:
    """Return how many rows f32[PANEL] of scratch each thread needs, most often none.

    They are a tile for a panel that is not full, and behind it a widened panel.
    """
    is_widened = packed.dtype == torch.float32 and num_rows >= WIDEN_FROM_ROWS
    if not is_widened and packed.out_features % PANEL == 0:
        return 0
    return MAX_ROWS + (packed.in_features if is_widened else 0)


def linear_call(
    x: Tensor, x_stride: int, packed: PackedWeight, out: Tensor, num_rows: int, scratch: Tensor | None
) -> KernelCall:
    """Lay out a layer's product; see `kvwatch_kernels.linear`.

    Args:
        x: T[num_rows, in_features], CPU, last dim contiguous; T is the dtype of `packed`.
        x_stride: elements from one row to the next; even where T is bfloat16.
        packed: the layer.
        out: T[num_rows, out_features], contiguous; written.
        num_rows: at least 1.
        scratch: f32[threads, rows, PANEL] with `scratch_rows` rows or more; none where that is 0.
    """
    arguments = packed.arguments[:]
    is_paired = packed.dtype == torch.bfloat16
    arguments[X], arguments[X_STRIDE] = x.data_ptr(), x_stride // 2 if is_paired else x_stride
    arguments[Y], arguments[NUM_ROWS] = out.data_ptr(), num_rows
    if scratch is not None:
        arguments[SCRATCH], arguments[SCRATCH_BYTES] = scratch.data_ptr(), scratch.stride(0) * FLOAT_BYTES
    num_items = arguments[NUM_PANELS] * -(-num_rows // packed.block_rows)
    return KernelCall(linear_code(packed.panels.dtype, is_paired=is_paired), arguments, num_items)


def compiled_linear(x: Tensor, x_stride: int, packed: PackedWeight, out: Tensor, num_rows: int) -> None:
    """Write the layer's result to `out`; see `linear_call`."""
    rows = scratch_rows(packed, num_rows)
    scratch = torch.empty((torch.get_num_threads(), rows, PANEL), dtype=torch.float32) if rows else None
    linear_call(x, x_stride, packed, out, num_rows, scratch).run()
