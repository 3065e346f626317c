"""bfloat16 for compiled CPU code: the upper half of a float32, as NumPy and Numba know no such type.

Memory holds 16-bit integers. Widening is exact (a shift); narrowing rounds to nearest, ties to even, as torch does, and
keeps a NaN a NaN. These functions emit LLVM IR; `vectors.py` makes them loads and stores.
"""

import torch
from llvmlite import ir

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of queries and caches that the compiled attention knows; others take the reference."""

_QUIET_NAN = 0x7FC0
_HALF_BELOW_TIE = 0x7FFF


def _like(value: ir.Value, bits: int, constant: int) -> ir.Constant:
    """A constant integer of `bits` bits, repeated over the lanes of `value` where that is a vector."""
    element = ir.IntType(bits)
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(ir.VectorType(element, value.type.count), [constant] * value.type.count)
    return ir.Constant(element, constant)


def _retype(value: ir.Value, element: ir.Type) -> ir.Type:
    """`element`, as a vector where `value` is one."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def widen_bf16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Emit the float32 value (or lanes) whose upper half is the 16-bit `bits`."""
    wide = builder.zext(bits, _retype(bits, ir.IntType(32)))
    shifted = builder.shl(wide, _like(wide, 32, 16))
    return builder.bitcast(shifted, _retype(bits, ir.FloatType()))


def narrow_to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Emit the 16 bits of `value` (float32, one or lanes) rounded to nearest, ties to even."""
    bits = builder.bitcast(value, _retype(value, ir.IntType(32)))
    is_odd = builder.and_(builder.lshr(bits, _like(bits, 32, 16)), _like(bits, 32, 1))
    rounded = builder.add(builder.add(bits, _like(bits, 32, _HALF_BELOW_TIE)), is_odd)
    upper = builder.trunc(builder.lshr(rounded, _like(bits, 32, 16)), _retype(value, ir.IntType(16)))
    # Rounding may carry a NaN's payload into the sign or the exponent.
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, _like(value, 16, _QUIET_NAN), upper)
