"""The bytes of quantised caches for compiled CPU code: int8 and the FP8 formats e4m3 and e5m2.

Widening is exact for every byte, NaN and infinity included. It goes through float16, which processors convert: an e5m2
is the upper byte of one; the fields of an e4m3 moved into one give 2**-8 of its value, so it is read in units of 2**8.
Narrowing gives torch's bits for finite numbers within the format's range; others do not occur (see `quant.py`).
"""

import platform
from functools import cache
from typing import Final, NamedTuple

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from kvwatch_kernels.cpu.vectors import F32, I16, I32, LANES, integer_like, number_like, type_like

I8 = ir.IntType(8)
E4M3_UNIT: Final = 2.0**8
_ROUND_BIAS: Final = 12582912.0  # 1.5 * 2**23: adding it leaves a small float's nearest integer in the low bits


class Fp8(NamedTuple):
    """One of the FP8 formats."""

    mantissa_bits: int
    exponent_bias: int


E4M3: Final = Fp8(mantissa_bits=3, exponent_bias=7)
E5M2: Final = Fp8(mantissa_bits=2, exponent_bias=15)


@cache
def can_compile(dtype: torch.dtype) -> bool:
    """Whether this processor reads caches of a quantised dtype fast: FP8 takes its conversion of float16.

    Every ARM of 64 bits has it, and every x86 with AVX2.
    """
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return dtype == torch.int8 or not is_x86 or bool(llvm.get_host_cpu_features().get("f16c"))


def widen_int8(builder: ir.IRBuilder, byte: ir.Value) -> ir.Value:
    """Emit the float32 value of an int8."""
    return builder.sitofp(builder.sext(byte, type_like(byte, I32)), type_like(byte, F32))


def widen_e5m2(builder: ir.IRBuilder, byte: ir.Value) -> ir.Value:
    """Emit the float32 value of an e5m2."""
    wide = builder.zext(byte, type_like(byte, I16))
    return _widen_float16(builder, builder.shl(wide, integer_like(wide, 8)))


def widen_e4m3(builder: ir.IRBuilder, byte: ir.Value) -> ir.Value:
    """Emit the float32 value of an e4m3, in units of `E4M3_UNIT`."""
    wide = builder.sext(byte, type_like(byte, I16))
    return _widen_shifted_e4m3(builder, builder.shl(wide, integer_like(wide, 7)))


def _widen_float16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.fpext(builder.bitcast(bits, type_like(bits, ir.HalfType())), type_like(bits, F32))


def _widen_shifted_e4m3(builder: ir.IRBuilder, shifted: ir.Value) -> ir.Value:
    """Widen 16-bit numbers that start with the sign, one bit to drop, exponent and mantissa of an e4m3."""
    bits = builder.and_(shifted, integer_like(shifted, 0xBF80))
    # Only a NaN, which has all ones, carries into the exponent's upper bit: with that bit set it is a float16's NaN.
    carry = builder.and_(builder.add(bits, integer_like(bits, 0x80)), integer_like(bits, 0x4000))
    return _widen_float16(builder, builder.or_(bits, carry))


def element_of_int8_dword(builder: ir.IRBuilder, dwords: ir.Value, index: int) -> ir.Value:
    """Emit the float32 value of int8 number `index` of each 32-bit lane."""
    at_top = builder.shl(dwords, integer_like(dwords, 24 - 8 * index))
    return builder.sitofp(builder.ashr(at_top, integer_like(dwords, 24)), type_like(dwords, F32))


def element_of_e5m2_dword(builder: ir.IRBuilder, dwords: ir.Value, index: int) -> ir.Value:
    """Emit the float32 value of e5m2 number `index` of each 32-bit lane."""
    if index == 0:
        moved = builder.shl(dwords, integer_like(dwords, 8))
    else:
        moved = builder.lshr(dwords, integer_like(dwords, 8 * index - 8))
    bits = builder.trunc(moved, ir.VectorType(I16, LANES))
    return _widen_float16(builder, builder.and_(bits, integer_like(bits, 0xFF00)))


def element_of_e4m3_dword(builder: ir.IRBuilder, dwords: ir.Value, index: int) -> ir.Value:
    """Emit the float32 value of e4m3 number `index` of each 32-bit lane, in units of `E4M3_UNIT`."""
    at_top = builder.shl(dwords, integer_like(dwords, 24 - 8 * index))
    moved = builder.ashr(at_top, integer_like(dwords, 17))
    return _widen_shifted_e4m3(builder, builder.trunc(moved, ir.VectorType(I16, LANES)))


def narrow_to_int8(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Emit the int8 nearest to a float32 from -127.5 to 127.5, exclusive; ties to even."""
    biased = builder.fadd(value, number_like(value, _ROUND_BIAS))
    return builder.trunc(builder.bitcast(biased, type_like(value, I32)), type_like(value, I8))


def narrow_to_fp8(builder: ir.IRBuilder, value: ir.Value, fp8: Fp8) -> ir.Value:
    """Emit the FP8 nearest to a float32 that rounds to a finite one; ties to even."""
    dropped = 23 - fp8.mantissa_bits
    bits = builder.bitcast(value, type_like(value, I32))
    size = builder.and_(bits, integer_like(bits, 0x7FFFFFFF))
    is_odd = builder.and_(builder.lshr(size, integer_like(bits, dropped)), integer_like(bits, 1))
    # Half of the last bit that stays, less one unless that bit is odd: a tie carries exactly if it must.
    rounding = ((fp8.exponent_bias - 127) << 23) + (1 << (dropped - 1)) - 1
    rounded = builder.add(builder.add(size, integer_like(bits, rounding)), is_odd)
    normal = builder.lshr(rounded, integer_like(bits, dropped))
    # A sum with a number whose last bit is the smallest subnormal rounds as wanted, and leaves the subnormal there.
    magic = 2.0 ** (24 - fp8.exponent_bias - fp8.mantissa_bits)
    total = builder.fadd(builder.bitcast(size, value.type), number_like(value, magic))
    subnormal = builder.and_(builder.bitcast(total, bits.type), integer_like(bits, 0xFF))
    smallest_normal = (128 - fp8.exponent_bias) << 23
    is_normal = builder.icmp_unsigned(">=", size, integer_like(bits, smallest_normal))
    magnitude = builder.select(is_normal, normal, subnormal)
    sign = builder.and_(builder.lshr(bits, integer_like(bits, 24)), integer_like(bits, 0x80))
    return builder.trunc(builder.or_(magnitude, sign), type_like(value, I8))
