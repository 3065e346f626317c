"""Quantised keys and values: one small stored number for each element, one scale for each token and head.

This is the definition: the compiled CPU code and the Triton kernels give the same bits for float32 input. A stored
number means `stored * scale`. Knows nothing of blocks or slots.
"""

from typing import Final

import torch
from torch import Tensor

QUANTISED_LIMITS: Final[dict[torch.dtype, float]] = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}
"""Stored dtypes, each with its largest finite number, to which the largest element of a head is scaled."""

SMALLEST_MAGNITUDE: Final = 2.0**-100
"""A head whose largest element is smaller than this is stored as zeros: the inverse of its scale could overflow."""


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has scales."""
    return dtype in QUANTISED_LIMITS


def quantise(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the stored numbers and the scales of heads.

    In float32: scale = max |x| / limit, stored = x * (1 / scale), rounded to nearest, ties to even. A head that is
    smaller than `SMALLEST_MAGNITUDE` throughout has scale 0; one with a NaN or an infinity has scale NaN, so that it
    reads as NaN. Both store zeros.

    Args:
        heads: T[..., head_dim], of any float dtype and on any device.
        dtype: one of `QUANTISED_LIMITS`.

    Returns:
        dtype[..., head_dim] and f32[...].
    """
    limit = QUANTISED_LIMITS[dtype]
    x = heads.float()
    magnitude = x.abs().amax(dim=-1)
    scales = magnitude / torch.full_like(magnitude, limit)  # by a number, GPUs would multiply with its inverse
    scales = scales.masked_fill(magnitude < SMALLEST_MAGNITUDE, 0.0)
    scales = scales.masked_fill(~magnitude.isfinite(), float("nan"))
    inverse = scales.reciprocal().unsqueeze(-1)
    scaled = torch.where(inverse.isfinite(), x * inverse, 0.0)
    if dtype == torch.int8:
        scaled = scaled.round().clamp(-limit, limit)
    return scaled.to(dtype), scales


def dequantise(stored: Tensor, scales: Tensor) -> Tensor:
    """Return what quantised heads mean.

    Args:
        stored: dtype[..., head_dim], one of `QUANTISED_LIMITS`.
        scales: f32[...].

    Returns:
        f32[..., head_dim].
    """
    return stored.float() * scales.unsqueeze(-1)
