# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, RET505  # device code: its types are Triton's, and its branches are for the compiler
"""Quantising on the device, bit for bit as `kvwatch_kernels.quant` defines it. Knows one head at a time.

Rounds in integers: no device need have the conversion, and no fused multiply-add can change a tie.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kvwatch_kernels.quant import SMALLEST_MAGNITUDE

CODES: Final = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Names of stored dtypes in kernels."""

_SMALLEST = tl.constexpr(SMALLEST_MAGNITUDE)


@triton.jit
def quantise_head(x, LIMIT: tl.constexpr, CODE: tl.constexpr):
    """Stored bytes i32[LANES], 0 to 255, and the scale of one head f32[LANES]; lanes behind the head are 0."""
    magnitudes = tl.abs(x)
    is_finite = tl.min((magnitudes < float("inf")).to(tl.int32), 0) == 1
    largest = tl.max(magnitudes, 0)
    is_scaled = is_finite & (largest >= _SMALLEST)
    scale = tl.div_rn(tl.where(is_scaled, largest, LIMIT), LIMIT)
    scaled = tl.where(is_scaled, x * tl.div_rn(1.0, scale), 0.0)
    scale = tl.where(is_scaled, scale, tl.where(is_finite, 0.0, float("nan")))
    return _round(scaled, CODE), scale


@triton.jit
def _round(x, CODE: tl.constexpr):
    """To the nearest stored number, ties to even, at most the largest: bytes as i32."""
    if CODE == "e4m3":
        return _round_to_float8(x, 3, 7, 0x7E)
    elif CODE == "e5m2":
        return _round_to_float8(x, 2, 15, 0x7B)
    else:
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # A float32 is its significand of 24 bits times 2 to the (exponent - 150).
        rounded = tl.minimum(_shift_right(magnitude, 150 - (magnitude >> 23)), 127)
        return tl.where(x < 0, -rounded, rounded) & 0xFF


@triton.jit
def _round_to_float8(x, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Exponents above that of the subnormals; below it more bits are dropped instead.
    above = (magnitude >> 23) - (127 - BIAS + 1)
    kept = _shift_right(magnitude, (23 - MANTISSA_BITS) + tl.maximum(-above, 0))
    # The leading one of what is kept is the exponent's lowest bit; so is a carry out of the mantissa.
    code = tl.minimum(kept + (tl.maximum(above, 0) << MANTISSA_BITS), LARGEST)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _shift_right(magnitude, shift):
    """Significand of positive float32 bits without its last `shift` bits, 1 or more: to nearest, ties to even."""
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = tl.minimum(shift, 25)  # less than half of the lowest bit: 0
    kept = significand >> shift
    rest = significand - (kept << shift)
    half = 1 << (shift - 1)
    return kept + ((rest > half) | ((rest == half) & ((kept & 1) == 1))).to(tl.int32)
