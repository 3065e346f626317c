"""Sixteen float32 lanes as one value inside compiled code.

LLVM's auto-vectoriser may reorder sums as it likes and differs from one processor to the next. Here the lanes are
written out, so that every sum has one order everywhere: LLVM maps a vector to one AVX-512 register, two of AVX2 or four
of SSE or NEON. `memory.py` loads and stores them.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import models, register_model

Vector: TypeAlias = float
"""Sixteen float32 lanes inside compiled code; `+ - * /` work lane by lane."""
Mask: TypeAlias = bool
"""Sixteen booleans inside compiled code."""
Emitter: TypeAlias = Callable[..., Any]
"""A function that emits LLVM IR; once registered, compiled code calls it as if it computed."""

LANES = 16

F32 = ir.FloatType()
I1, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
F32_LANES = ir.VectorType(F32, LANES)
I32_LANES = ir.VectorType(I32, LANES)


class VectorType(types.Type):
    """Numba's type of sixteen float32 lanes."""


class MaskType(types.Type):
    """Numba's type of sixteen booleans."""


VECTOR = VectorType("f32x16")
MASK = MaskType("i1x16")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]  # numba is untyped
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, F32_LANES)


@register_model(MaskType)
class _MaskModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, ir.VectorType(I1, LANES))


def _register(function: Any, cases: tuple[Any, ...], lower: Callable[..., Any]) -> None:
    """Let compiled code call `function`; `lower(builder, signature, *values)` emits its body for each signature."""
    # An operator is its own key. For a new function Numba would look the key up in its module, where a decorator has
    # not yet put it: a name serves instead.
    key = function if function.__module__ == "_operator" else f"{function.__module__}.{function.__name__}"
    infer_global(function, typing_key=key)(type("_Template", (ConcreteTemplate,), {"cases": list(cases)}))

    def lower_call(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        value = lower(builder, sig, *args)
        return context.get_dummy_value() if sig.return_type == types.void else value

    for case in cases:
        lower_builtin(key, *case.args)(lower_call)


def emitted(result: Any, *parameters: Any) -> Callable[[Emitter], Emitter]:
    """Make an emitter of LLVM IR, `emit(builder, *values) -> value`, callable from compiled code.

    Args:
        result: Numba type of the result.
        parameters: Numba types of the parameters.
    """

    def decorate(emit: Emitter) -> Emitter:
        _register(emit, (signature(result, *parameters),), lambda builder, _sig, *args: emit(builder, *args))
        return emit

    return decorate


def emitted_for(*cases: Any) -> Callable[[Emitter], Emitter]:
    """Like `emitted` for several signatures: `emit(builder, signature, *values) -> value`."""

    def decorate(emit: Emitter) -> Emitter:
        _register(emit, cases, emit)
        return emit

    return decorate


def _register_arithmetic(operation: Callable[[Any, Any], Any], instruction: str) -> None:
    _register(
        operation,
        (signature(VECTOR, VECTOR, VECTOR),),
        lambda builder, _sig, a, b: getattr(builder, instruction)(a, b),
    )


_register_arithmetic(operator.add, "fadd")
_register_arithmetic(operator.sub, "fsub")
_register_arithmetic(operator.mul, "fmul")
_register_arithmetic(operator.truediv, "fdiv")


def lanes_of(constant: float) -> ir.Constant:
    """IR constant with `constant` in every lane."""
    return ir.Constant(F32_LANES, [constant] * LANES)


def type_like(value: ir.Value, element: ir.Type) -> ir.Type:
    """`element`, as a vector where `value` is one."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def integer_like(value: ir.Value, constant: int) -> ir.Constant:
    """IR constant of an integer's type, or in every lane where `value` is a vector."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(value.type, [constant] * value.type.count)
    return ir.Constant(value.type, constant)


def number_like(value: ir.Value, constant: float) -> ir.Constant:
    """IR constant float32, in every lane where `value` is a vector."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(ir.VectorType(F32, value.type.count), [constant] * value.type.count)
    return ir.Constant(F32, constant)


def broadcast(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Emit a vector with `scalar` in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(I32_LANES, [0] * LANES))


@emitted(VECTOR, VECTOR, VECTOR, VECTOR)
def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Emit `a * b + c` over lanes, rounded once."""
    function_type = ir.FunctionType(F32_LANES, [F32_LANES] * 3)
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


@emitted(VECTOR, types.float32)
def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """One float32 in every lane."""
    return broadcast(builder, value)


@emitted(types.float32, types.int64)
def float_of_bits(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The float32 whose bits are the lower half of an integer."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


@emitted(VECTOR, VECTOR, VECTOR)
def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Lane by lane the larger of two, `b` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emitted(MASK, VECTOR, VECTOR)
def is_less(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Lanes in which `a < b`; false where either is NaN."""
    return builder.fcmp_ordered("<", a, b)


@emitted(MASK, types.int32, types.int32)
def lanes_between(builder: ir.IRBuilder, first: ir.Value, end: ir.Value) -> ir.Value:
    """Lanes `first <= lane < end`; the bounds may lie outside of 0 to 16."""
    lane = ir.Constant(I32_LANES, list(range(LANES)))
    is_after = builder.icmp_signed(">=", lane, broadcast(builder, first))
    return builder.and_(is_after, builder.icmp_signed("<", lane, broadcast(builder, end)))


@emitted(VECTOR, MASK, VECTOR, VECTOR)
def select(builder: ir.IRBuilder, mask: ir.Value, if_true: ir.Value, if_false: ir.Value) -> ir.Value:
    """Lane by lane `if_true` where the mask is set, else `if_false`. A NaN that is not selected leaves no trace."""
    return builder.select(mask, if_true, if_false)


def _fold(
    builder: ir.IRBuilder, lanes: ir.Value, combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], Any]
) -> ir.Value:
    """Emit the combination of all lanes as a tree: lane i with i + 8, then with i + 4, i + 2, i + 1."""
    for distance in (8, 4, 2, 1):
        order = ir.Constant(I32_LANES, [(lane + distance) % LANES for lane in range(LANES)])
        lanes = combine(builder, lanes, builder.shuffle_vector(lanes, lanes, order))
    return builder.extract_element(lanes, ir.Constant(I32, 0))


@emitted(types.float32, VECTOR)
def sum_lanes(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """Sum over the lanes, always in the same order."""
    return _fold(builder, lanes, lambda builder, a, b: builder.fadd(a, b))


@emitted(types.float32, VECTOR)
def max_lanes(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """The largest lane."""
    return _fold(builder, lanes, larger)


_ROUND_BIAS = 12582912.0  # 1.5 * 2**23: adding it leaves a small float's nearest integer in the low bits
_EXPONENT_OF_ONE = 127 << 23
_SMALLEST_EXPONENT = -126.0
_LOG2_E = float(np.float32(math.log2(math.e)))
_LOG2_E_REST = math.log2(math.e) - _LOG2_E
# 2**f for -0.5 <= f <= 0.5, least maximum relative error 2e-9, with 2**0 exactly 1.
_COEFFICIENTS = (
    0.00015353360504377633,
    0.0013398875016719103,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)


def _power_of_two(builder: ir.IRBuilder, biased: ir.Value, fraction: ir.Value) -> ir.Value:
    """Emit 2 to the power of an integer, which sits in the low bits of `biased`, plus `fraction`."""
    value = lanes_of(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        value = fma(builder, value, fraction, lanes_of(coefficient))
    # Moved into the exponent field the integer is the power of two.
    exponent = builder.shl(builder.bitcast(biased, I32_LANES), ir.Constant(I32_LANES, [23] * LANES))
    one = ir.Constant(I32_LANES, [_EXPONENT_OF_ONE] * LANES)
    return builder.fmul(value, builder.bitcast(builder.add(exponent, one), F32_LANES))


def _zero_below(builder: ir.IRBuilder, x: ir.Value, smallest: float, power: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", x, lanes_of(smallest)), lanes_of(0.0), power)


@emitted(VECTOR, VECTOR)
def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2 to the power of each lane, for `x <= 0`, within 1e-7 relative; 0 below 2**-126, NaN for NaN, exactly 1 at 0."""
    bias = lanes_of(_ROUND_BIAS)
    biased = builder.fadd(x, bias)
    fraction = builder.fsub(x, builder.fsub(biased, bias))
    return _zero_below(builder, x, _SMALLEST_EXPONENT, _power_of_two(builder, biased, fraction))


@emitted(VECTOR, VECTOR)
def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Exponential of each lane, for `x <= 0`, within 1.5e-7 relative; 0 below 2**-126, NaN for NaN, exactly 1 at 0."""
    bias, factor = lanes_of(_ROUND_BIAS), lanes_of(_LOG2_E)
    biased = fma(builder, x, factor, bias)
    whole = builder.fsub(biased, bias)
    # The product's rounding would be multiplied by x: it is never rounded, and the rest of the factor is added.
    fraction = fma(builder, x, factor, builder.fneg(whole))
    fraction = fma(builder, x, lanes_of(_LOG2_E_REST), fraction)
    return _zero_below(builder, x, _SMALLEST_EXPONENT * math.log(2), _power_of_two(builder, biased, fraction))


_TANH_MIDDLE = 0.65
# (tanh(x) / x - 1) / x**2 as a polynomial of x**2 for |x| <= 0.65, least maximum error relative to tanh, 7e-9.
_TANH_COEFFICIENTS = (
    -0.005515147829489576,
    0.020469404987688733,
    -0.053688018398136236,
    0.1333083028771265,
    -0.33333259845931,
)


@emitted(VECTOR, VECTOR)
def tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Hyperbolic tangent of each lane, within 3e-7 relative; NaN for NaN."""
    square = builder.fmul(x, x)
    value = lanes_of(_TANH_COEFFICIENTS[0])
    for coefficient in _TANH_COEFFICIENTS[1:]:
        value = fma(builder, value, square, lanes_of(coefficient))
    middle = fma(builder, builder.fmul(x, square), value, x)
    bits = builder.bitcast(x, I32_LANES)
    size = builder.bitcast(builder.and_(bits, integer_like(bits, 0x7FFFFFFF)), F32_LANES)
    # Far from zero nothing cancels in (1 - e) / (1 + e) with e = exp(-2 |x|).
    power = exp(builder, builder.fmul(size, lanes_of(-2.0)))
    outer = builder.fdiv(builder.fsub(lanes_of(1.0), power), builder.fadd(lanes_of(1.0), power))
    sign = builder.and_(bits, integer_like(bits, -0x80000000))
    outer = builder.bitcast(builder.or_(builder.bitcast(outer, I32_LANES), sign), F32_LANES)
    return builder.select(builder.fcmp_ordered("<", size, lanes_of(_TANH_MIDDLE)), middle, outer)


@emitted(VECTOR)
def lane_numbers(_builder: ir.IRBuilder) -> ir.Value:
    """0.0 to 15.0, one a lane."""
    return ir.Constant(F32_LANES, [float(lane) for lane in range(LANES)])


@emitted(VECTOR, VECTOR, VECTOR)
def larger_size(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Lane by lane the larger of two absolute values; infinity is larger than any number, and NaN than infinity."""
    sizes = []
    for value in (a, b):
        bits = builder.bitcast(value, I32_LANES)
        sizes.append(builder.and_(bits, integer_like(bits, 0x7FFFFFFF)))
    is_larger = builder.icmp_unsigned(">", *sizes)
    return builder.bitcast(builder.select(is_larger, *sizes), F32_LANES)


@emitted(types.float32, VECTOR)
def largest_size(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """The largest absolute value of all lanes, ordered as in `larger_size`."""
    return _fold(builder, lanes, larger_size)
