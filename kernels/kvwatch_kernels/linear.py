"""Linear layers in float32 whose weights stay as small as they came."""

import torch
from torch import Tensor

from kvwatch_kernels.cpu.linear import PackedWeight, compiled_linear, has_fast_linear, packed_layer
from kvwatch_kernels.errors import ShapeError

__all__ = ["PackedWeight", "is_fast", "linear", "pack_weight", "WEIGHT_DTYPES"]

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes in which a packed weight is kept. bfloat16 is widened in registers, which is exact."""


def is_fast(device: torch.device) -> bool:
    """Whether `linear` is the fastest float32 product of a device for any number of rows: a CPU with AVX2."""
    return device.type == "cpu" and has_fast_linear()


def pack_weight(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Reorder a weight for `linear`; the original is not kept.

    Args:
        weight: float32 or bfloat16 `[out_features, in_features]`, on a CPU.
        bias: float32 or bfloat16 `[out_features]`, or none.

    Raises:
        ShapeError: another dtype, shape or device.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise ShapeError(f"weight has shape {list(weight.shape)}: must be [out_features, in_features], none 0")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype not in WEIGHT_DTYPES or tensor.device.type != "cpu"):
            raise ShapeError(f"{name} is {tensor.dtype} on {tensor.device}: must be float32 or bfloat16 on a CPU")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias has shape {list(bias.shape)}: must be [{len(weight)}], as the weight's rows")
    return packed_layer(weight, bias)


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """Return x @ weight.T + bias.

    Each element is one chain of fused multiply-adds over the input features, in ascending order, that starts at the
    bias: a row's result has the same bits whatever other rows there are, and for any number of threads.

    Args:
        x: f32[num_rows, in_features], on a CPU, last dim contiguous.
        packed: see `pack_weight`.

    Returns:
        f32[num_rows, out_features], contiguous.

    Raises:
        ShapeError: `x` breaks this contract.
    """
    shape, strides = x.shape, x.stride()
    if len(shape) != 2 or shape[1] != packed.in_features:
        raise ShapeError(f"x has shape {list(shape)}: must be [num_rows, {packed.in_features}]")
    if x.dtype != torch.float32 or not x.is_cpu:
        raise ShapeError(f"x is {x.dtype} on {x.device}: must be float32 on a CPU")
    if strides[1] != 1 and shape[1] > 1:
        raise ShapeError(f"x has stride {strides[1]} in its last dim: must be 1 (Tensor.contiguous)")
    num_rows = shape[0]
    out = x.new_empty((num_rows, packed.out_features))
    if num_rows:
        compiled_linear(x, strides[0], packed, out, num_rows)
    return out
