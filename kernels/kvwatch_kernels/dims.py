"""Names of tensor dimensions, and the checks of every public kernel.

    num_tokens     tokens of a step, packed: sequence after sequence
    num_seqs       sequences of a step
    num_heads      query heads; a multiple of num_kv_heads
    num_kv_heads   heads of the KV cache; num_heads / num_kv_heads query heads share one ("group")
    head_dim       elements of one head
    num_blocks     blocks of the cache, the null block included
    block_size     tokens of one block
    max_blocks     columns of the block tables

Tensors are written `T[num_tokens, num_heads, head_dim]`, where T is float32, bfloat16 or float16 and the same for all
of a call. A cache is `C[num_blocks, num_kv_heads, block_size, head_dim]`, where C is T or quantised: then it comes with
scales `f32[num_blocks, num_kv_heads, block_size]` (see `quant.py`). Index arrays are `i32[...]` or `i64[...]`: NumPy
arrays, or CPU tensors, which are viewed without a copy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.quant import QUANTISED_LIMITS, is_quantised

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

PAD_SLOT = -1
"""Slot of a token that is not stored."""

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of everything but caches."""

CACHE_DTYPES = (*FLOAT_DTYPES, *QUANTISED_LIMITS)

FACTOR_LIMIT = 2.0**100
"""Largest factor and bound of scores, and inverse of the smallest bound: kernels keep them, their inverses and small
multiples of them in float32."""


def index_array(
    name: str,
    value: npt.NDArray[np.int32] | npt.NDArray[np.int64] | Tensor,
    dtype: type[np.signedinteger],
    shape: Sequence[int | None],
) -> npt.NDArray[np.signedinteger]:
    """View an index argument as a contiguous NumPy array.

    Args:
        name: of the argument, for messages.
        value: NumPy array or CPU tensor.
        dtype: the integer type that it must have.
        shape: the shape that it must have; None where any length will do.

    Raises:
        ShapeError: no array at all, another dtype or shape, or not contiguous.
    """
    if not isinstance(value, np.ndarray | Tensor):
        raise ShapeError(f"{name} is a {type(value).__name__}: must be a NumPy array or a CPU tensor")
    array = value.numpy(force=True) if isinstance(value, Tensor) else value
    if array.dtype != dtype:
        raise ShapeError(f"{name} has dtype {array.dtype}: must be {np.dtype(dtype)}")
    if array.ndim != len(shape) or any(
        want is not None and have != want for have, want in zip(array.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise ShapeError(f"{name} has shape {list(array.shape)}: must be [{wanted}]")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name} has strides {array.strides}: must be contiguous (numpy.ascontiguousarray)")
    return array


def check_cache(
    key_cache: Tensor, value_cache: Tensor, key_scales: Tensor | None = None, value_scales: Tensor | None = None
) -> None:
    """Check a pair of caches against each other, and their scales.

    Args:
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous.
        value_cache: the same; its strides may differ.
        key_scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous; none unless C is quantised.
        value_scales: likewise.

    Raises:
        ShapeError: what does not fit.
    """
    if key_cache.ndim != 4 or 0 in key_cache.shape:
        raise ShapeError(
            f"key_cache has shape {list(key_cache.shape)}: "
            f"must be [num_blocks, num_kv_heads, block_size, head_dim], none 0"
        )
    if value_cache.shape != key_cache.shape:
        raise ShapeError(
            f"value_cache has shape {list(value_cache.shape)}, key_cache {list(key_cache.shape)}: must agree"
        )
    if key_cache.dtype not in CACHE_DTYPES:
        raise ShapeError(f"key_cache has dtype {key_cache.dtype}: must be one of {', '.join(map(str, CACHE_DTYPES))}")
    if value_cache.dtype != key_cache.dtype:
        raise ShapeError(f"value_cache has dtype {value_cache.dtype}, key_cache {key_cache.dtype}: must agree")
    check_device("value_cache", value_cache, key_cache)
    check_last_dim("key_cache", key_cache)
    check_last_dim("value_cache", value_cache)
    check_scales("key_scales", key_scales, key_cache)
    check_scales("value_scales", value_scales, key_cache)


def check_scales(name: str, scales: Tensor | None, key_cache: Tensor) -> None:
    """Check one side's scales.

    Args:
        name: of the argument, for messages.
        scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous; none unless the cache is quantised.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim].

    Raises:
        ShapeError: what does not fit, is missing, or is too much.
    """
    if not is_quantised(key_cache.dtype):
        if scales is not None:
            raise ShapeError(f"{name} is given, but a cache of {key_cache.dtype} has none: must be None")
        return
    if scales is None:
        raise ShapeError(f"{name} is None: must be given, as the cache is quantised ({key_cache.dtype})")
    if scales.shape != key_cache.shape[:3]:
        raise ShapeError(f"{name} has shape {list(scales.shape)}: must be {list(key_cache.shape[:3])}")
    if scales.dtype != torch.float32:
        raise ShapeError(f"{name} has dtype {scales.dtype}: must be torch.float32")
    check_device(name, scales, key_cache)
    check_last_dim(name, scales)


def check_heads(name: str, tensor: Tensor, key_cache: Tensor) -> None:
    """Check a tensor T[num_tokens, heads, head_dim] against a cache.

    Args:
        name: of the argument, for messages.
        tensor: T[num_tokens, heads, head_dim], last dim contiguous.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim].

    Raises:
        ShapeError: another number of dims, head size, dtype or device, or strided in the last dim.
    """
    if tensor.ndim != 3 or tensor.shape[2] != key_cache.shape[3]:
        raise ShapeError(
            f"{name} has shape {list(tensor.shape)}: must be [num_tokens, heads, {key_cache.shape[3]}], "
            f"the last as in the cache"
        )
    check_like(name, tensor, key_cache)
    check_last_dim(name, tensor)


def check_rows(
    name: str, tensor: Tensor, shape: tuple[int, ...] | None, like: Tensor, *, is_dense: bool = False
) -> tuple[int, ...]:
    """Check a tensor of rows.

    Args:
        name: of the argument, for messages.
        tensor: T[num_rows, width] or, as `shape` says, T[width]; last dim contiguous.
        shape: the shape that it must have; none for any number of rows, which are not empty.
        like: tensor with the dtype and the device that it must have.
        is_dense: the rows must follow each other.

    Returns:
        Its shape.

    Raises:
        ShapeError: another shape, dtype or device, or strides that are not allowed.
    """
    have = tuple(tensor.shape)
    if shape is None:
        if len(have) != 2 or have[1] == 0:
            raise ShapeError(f"{name} has shape {list(have)}: must be [num_rows, width], the width not 0")
    elif have != shape:
        raise ShapeError(f"{name} has shape {list(have)}: must be {list(shape)}")
    if tensor.dtype != like.dtype or tensor.dtype not in FLOAT_DTYPES:
        raise ShapeError(
            f"{name} has dtype {tensor.dtype}: must agree with the others', {like.dtype}, "
            f"and be one of {', '.join(map(str, FLOAT_DTYPES))}"
        )
    if tensor.device != like.device:
        raise ShapeError(f"{name} is on {tensor.device}, others on {like.device}: must agree")
    check_last_dim(name, tensor)
    if is_dense and not tensor.is_contiguous():
        raise ShapeError(f"{name} has strides {list(tensor.stride())}: must be contiguous (Tensor.contiguous)")
    return have


def check_like(name: str, tensor: Tensor, key_cache: Tensor) -> None:
    """Check that a tensor's dtype and device go with the cache.

    Args:
        name: of the argument, for messages.
        tensor: T[...], of any shape.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim].

    Raises:
        ShapeError: not the cache's dtype or, where that is quantised, no float; or on another device.
    """
    if is_quantised(key_cache.dtype):
        if tensor.dtype not in FLOAT_DTYPES:
            raise ShapeError(f"{name} has dtype {tensor.dtype}: must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    elif tensor.dtype != key_cache.dtype:
        raise ShapeError(f"{name} has dtype {tensor.dtype}, the cache {key_cache.dtype}: must agree")
    check_device(name, tensor, key_cache)


def check_device(name: str, tensor: Tensor, key_cache: Tensor) -> None:
    """Check that a tensor lies where the cache does.

    Args:
        name: of the argument, for messages.
        tensor: T[...], of any shape and dtype.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim].

    Raises:
        ShapeError: it does not.
    """
    if tensor.device != key_cache.device:
        raise ShapeError(f"{name} is on {tensor.device}, the cache on {key_cache.device}: must agree")


def check_last_dim(name: str, tensor: Tensor) -> None:
    """Check that the last dim is contiguous.

    Args:
        name: of the argument, for messages.
        tensor: T[..., head_dim].

    Raises:
        ShapeError: it is not.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeError(f"{name} has stride {tensor.stride(-1)} in its last dim: must be 1 (Tensor.contiguous)")


def check_eps(eps: float) -> None:
    """Check what a norm adds to the mean of squares.

    Raises:
        ShapeError: negative, not finite or beyond float32.
    """
    if not 0 <= eps <= FACTOR_LIMIT:
        raise ShapeError(f"eps is {eps}: must be from 0 to {FACTOR_LIMIT}")


def check_written(name: str, tensor: Tensor) -> None:
    """Check that no element of a tensor that is written stands for several places (`Tensor.expand`).

    Args:
        name: of the argument, for messages.
        tensor: T[...], of any shape and dtype.

    Raises:
        ShapeError: a dim of more than one element has stride 0.
    """
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        raise ShapeError(f"{name} has strides {list(strides)}, but is written: must be none 0 (Tensor.contiguous)")
