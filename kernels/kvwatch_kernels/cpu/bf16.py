"""bfloat16 for compiled CPU code: the upper half of a float32, as NumPy and Numba know no such type.

Memory holds 16-bit integers. Widening is exact (a shift); narrowing rounds to nearest, ties to even, as torch does, and
keeps a NaN a NaN. These functions emit LLVM IR; `memory.py` makes them loads and stores.
"""

import torch
from llvmlite import ir

from kvwatch_kernels.cpu.pairs import multiplies_pairs, narrow_lanes
from kvwatch_kernels.cpu.vectors import F32, F32_LANES, I16, I32, integer_like, type_like

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of queries and caches that the compiled attention knows; others take the reference."""

_QUIET_NAN = 0x7FC0
_HALF_BELOW_TIE = 0x7FFF


def widen_bf16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Emit the float32 value (or lanes) whose upper half is the 16-bit `bits`."""
    wide = builder.zext(bits, type_like(bits, I32))
    return builder.bitcast(builder.shl(wide, integer_like(wide, 16)), type_like(bits, F32))


def element_of_bf16_pair(builder: ir.IRBuilder, pairs: ir.Value, index: int) -> ir.Value:
    """Emit the float32 value of the lower (`index` 0) or the upper element of each lane of 32 bits: one instruction."""
    upper = builder.and_(pairs, integer_like(pairs, -0x10000)) if index else builder.shl(pairs, integer_like(pairs, 16))
    return builder.bitcast(upper, type_like(pairs, F32))


def narrow_to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Emit the 16 bits of `value` (float32, one or lanes) rounded to nearest, ties to even.

    Of lanes, denormals become zero where the processor rounds by itself, as they do in its products of pairs.
    """
    if value.type == F32_LANES and multiplies_pairs():
        return narrow_lanes(builder, value)
    bits = builder.bitcast(value, type_like(value, I32))
    is_odd = builder.and_(builder.lshr(bits, integer_like(bits, 16)), integer_like(bits, 1))
    rounded = builder.add(builder.add(bits, integer_like(bits, _HALF_BELOW_TIE)), is_odd)
    upper = builder.trunc(builder.lshr(rounded, integer_like(bits, 16)), type_like(value, I16))
    # Rounding may carry a NaN's payload into the sign or the exponent.
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, integer_like(upper, _QUIET_NAN), upper)
