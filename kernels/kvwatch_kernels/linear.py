"""Linear layers in float32, whose weights stay as small as they came, and in bfloat16."""

import torch
from torch import Tensor

from kvwatch_kernels.cpu.linear import PackedWeight, compiled_linear, has_fast_linear, has_fast_pairs, packed_layer
from kvwatch_kernels.cpu.pairs import multiplies_pairs
from kvwatch_kernels.errors import ShapeError

__all__ = ["PackedWeight", "can_pack", "is_fast", "linear", "pack_weight", "WEIGHT_DTYPES"]

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes in which a packed weight is kept. bfloat16 is widened in registers, which is exact."""


def is_fast(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether `linear` is the fastest product of a device in a dtype, for any number of rows.

    In float32 that is a CPU with AVX2 or AVX-512, in bfloat16 one with AVX512-BF16 and without AMX.
    """
    if device.type != "cpu":
        return False
    return has_fast_linear() if dtype == torch.float32 else dtype == torch.bfloat16 and has_fast_pairs()


def can_pack(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `pack_weight` takes a weight of this shape to compute in a dtype: pairs want even numbers of features."""
    return dtype == torch.float32 or weight.shape[1] % 2 == 0


def pack_weight(weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> PackedWeight:
    """Reorder a weight for `linear`; the original is not kept.

    Args:
        weight: float32 or bfloat16 `[out_features, in_features]`, on a CPU; bfloat16, and an even number of input
            features, where `dtype` is.
        bias: float32 or bfloat16 `[out_features]`, or none.
        dtype: to compute in; float32 or, on a processor with AVX512-BF16, bfloat16.

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
    if dtype not in WEIGHT_DTYPES or (dtype == torch.bfloat16 and not multiplies_pairs()):
        raise ShapeError(f"dtype is {dtype}: must be float32, or bfloat16 where the processor has AVX512-BF16")
    if dtype == torch.bfloat16 and (weight.dtype != dtype or not can_pack(weight, dtype)):
        raise ShapeError(
            f"weight is {weight.dtype}{list(weight.shape)}: must be bfloat16 with an even number of input features, "
            "to compute in bfloat16"
        )
    return packed_layer(weight, bias, dtype)


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """Return x @ weight.T + bias.

    Each element is one chain of fused multiply-adds over the input features, in ascending order, that starts at the
    bias: a row's result has the same bits whatever other rows there are, and for any number of threads. In bfloat16 the
    chain goes over pairs of features, in float32, and is rounded once at its end.

    Args:
        x: T[num_rows, in_features], on a CPU, last dim contiguous; T is the dtype that `packed` computes in.
        packed: see `pack_weight`.

    Returns:
        T[num_rows, out_features], contiguous.

    Raises:
        ShapeError: `x` breaks this contract.
    """
    shape, strides = x.shape, x.stride()
    if len(shape) != 2 or shape[1] != packed.in_features:
        raise ShapeError(f"x has shape {list(shape)}: must be [num_rows, {packed.in_features}]")
    if x.dtype != packed.dtype or not x.is_cpu:
        raise ShapeError(f"x is {x.dtype} on {x.device}: must be {packed.dtype} on a CPU")
    if strides[1] != 1 and shape[1] > 1:
        raise ShapeError(f"x has stride {strides[1]} in its last dim: must be 1 (Tensor.contiguous)")
    if packed.dtype == torch.bfloat16 and (strides[0] % 2 or x.data_ptr() % 4):
        x, strides = x.clone(memory_format=torch.contiguous_format), (shape[1], 1)  # pairs lie on multiples of 4 bytes
    num_rows = shape[0]
    out = x.new_empty((num_rows, packed.out_features))
    if num_rows:
        compiled_linear(x, strides[0], packed, out, num_rows)
    return out
