"""Typed pointers inside compiled code: loads, stores, prefetches, copies and the one atomic operation.

A pointer's type carries the dtype of the memory: `float32`, or `uint16` for bfloat16, which is widened as it is loaded
(see `bf16.py`). Addresses and offsets are 64-bit. Nothing here checks bounds: callers do.
"""

from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import signature

from kvwatch_kernels.cpu.bf16 import narrow_to_bf16, widen_bf16
from kvwatch_kernels.cpu.vectors import F32, F32_LANES, I1, I16, I32, I64, LANES, VECTOR, emitted, emitted_for, lanes_of

Pointer: TypeAlias = int
"""A pointer inside compiled code; its Numba type knows the element type."""

_CPointer = types.CPointer  # type: ignore[attr-defined]  # numba's stub lacks it
F32_POINTER = _CPointer(types.float32)
BF16_POINTER = _CPointer(types.uint16)
I32_POINTER = _CPointer(types.int32)
I64_POINTER = _CPointer(types.int64)
_POINTERS = (F32_POINTER, BF16_POINTER, I32_POINTER, I64_POINTER)
_FLOATS = (F32_POINTER, BF16_POINTER)

_BYTES = ir.IntType(8).as_pointer()


def emit_gather(builder: ir.IRBuilder, pointers: list[ir.Value], pointer_type: Any) -> ir.Value:
    """Emit one vector of the elements at several pointers, equally many from each, as float32 lanes."""
    element = F32 if pointer_type == F32_POINTER else I16
    piece = ir.VectorType(element, LANES // len(pointers)).as_pointer()
    align = 4 if pointer_type == F32_POINTER else 2
    parts = [builder.load(builder.bitcast(pointer, piece), align=align) for pointer in pointers]
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [builder.shuffle_vector(*parts[first : first + 2], order) for first in range(0, len(parts), 2)]
    return parts[0] if pointer_type == F32_POINTER else widen_bf16(builder, parts[0])


@emitted(F32_POINTER, types.int64)
def f32_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to float32 at an address."""
    return builder.inttoptr(address, F32.as_pointer())


@emitted(BF16_POINTER, types.int64)
def bf16_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to bfloat16 at an address."""
    return builder.inttoptr(address, I16.as_pointer())


@emitted(I32_POINTER, types.int64)
def i32_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to int32 at an address."""
    return builder.inttoptr(address, I32.as_pointer())


@emitted(I64_POINTER, types.int64)
def i64_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to int64 at an address."""
    return builder.inttoptr(address, I64.as_pointer())


@emitted_for(*(signature(pointer, pointer, types.int64) for pointer in _FLOATS))
def pointer_like(builder: ir.IRBuilder, _sig: Any, like: ir.Value, address: ir.Value) -> ir.Value:
    """`pointer_like(pointer, address)`: a pointer of the same type to another address."""
    return builder.inttoptr(address, like.type)


@emitted_for(*(signature(pointer, pointer, types.int64) for pointer in _POINTERS))
def advance(builder: ir.IRBuilder, _sig: Any, pointer: ir.Value, elements: ir.Value) -> ir.Value:
    """`advance(pointer, n)`: the pointer moved by n elements."""
    return builder.gep(pointer, [elements])


@emitted_for(*(signature(pointer.dtype, pointer, types.int64) for pointer in (F32_POINTER, I32_POINTER, I64_POINTER)))
def read(builder: ir.IRBuilder, _sig: Any, pointer: ir.Value, index: ir.Value) -> ir.Value:
    """`read(pointer, i)`: element i."""
    return builder.load(builder.gep(pointer, [index]))


@emitted_for(
    *(signature(types.void, pointer, types.int64, pointer.dtype) for pointer in (F32_POINTER, I32_POINTER, I64_POINTER))
)
def write(builder: ir.IRBuilder, _sig: Any, pointer: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """`write(pointer, i, value)`: set element i."""
    builder.store(value, builder.gep(pointer, [index]))


@emitted_for(*(signature(types.float32, pointer, types.int64) for pointer in _FLOATS))
def read_float(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, index: ir.Value) -> ir.Value:
    """`read_float(pointer, i)`: element i as float32."""
    element = builder.load(builder.gep(pointer, [index]))
    return element if sig.args[0] == F32_POINTER else widen_bf16(builder, element)


@emitted_for(*(signature(VECTOR, pointer) for pointer in _FLOATS))
def load(builder: ir.IRBuilder, sig: Any, pointer: ir.Value) -> ir.Value:
    """`load(pointer)`: sixteen consecutive elements as float32 lanes."""
    return emit_gather(builder, [pointer], sig.args[0])


@emitted_for(*(signature(types.void, pointer, VECTOR) for pointer in _FLOATS))
def store(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, lanes: ir.Value) -> None:
    """`store(pointer, lanes)`: write sixteen elements, rounded to the pointer's dtype."""
    is_f32 = sig.args[0] == F32_POINTER
    values = lanes if is_f32 else narrow_to_bf16(builder, lanes)
    builder.store(values, builder.bitcast(pointer, values.type.as_pointer()), align=4 if is_f32 else 2)


@emitted_for(*(signature(VECTOR, pointer, VECTOR) for pointer in _FLOATS))
def rounded_like(builder: ir.IRBuilder, sig: Any, _like: ir.Value, lanes: ir.Value) -> ir.Value:
    """`rounded_like(pointer, lanes)`: what a store through a pointer of this type and a load would give back."""
    return lanes if sig.args[0] == F32_POINTER else widen_bf16(builder, narrow_to_bf16(builder, lanes))


@emitted_for(*(signature(VECTOR, pointer, types.int64) for pointer in _FLOATS))
def load_some(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, count: ir.Value) -> ir.Value:
    """`load_some(pointer, n)`: the first n (0 to 16) elements, other lanes zero; reads nothing beyond them."""
    lanes = cgutils.alloca_once(builder, F32_LANES)
    builder.store(lanes_of(0.0), lanes)
    as_elements = builder.bitcast(lanes, F32.as_pointer())
    with cgutils.for_range(builder, count) as loop:
        element = builder.load(builder.gep(pointer, [loop.index]))
        value = element if sig.args[0] == F32_POINTER else widen_bf16(builder, element)
        builder.store(value, builder.gep(as_elements, [loop.index]))
    return builder.load(lanes)


@emitted_for(*(signature(types.void, pointer, types.int64, VECTOR) for pointer in _FLOATS))
def store_some(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, count: ir.Value, lanes: ir.Value) -> None:
    """`store_some(pointer, n, lanes)`: write the first n (0 to 16) lanes and nothing beyond them."""
    values = lanes if sig.args[0] == F32_POINTER else narrow_to_bf16(builder, lanes)
    copy = cgutils.alloca_once(builder, values.type)
    builder.store(values, copy)
    as_elements = builder.bitcast(copy, values.type.element.as_pointer())
    with cgutils.for_range(builder, count) as loop:
        element = builder.load(builder.gep(as_elements, [loop.index]))
        builder.store(element, builder.gep(pointer, [loop.index]))


@emitted(types.void, types.int64)
def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at `address`, to be read soon; any address is safe.

    It comes into the second level: the first has no room for what is worked on and for what comes next.
    """
    function_type = ir.FunctionType(ir.VoidType(), [_BYTES, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    is_read, in_second_level, is_data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, _BYTES), is_read, in_second_level, is_data])


@emitted(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: ir.IRBuilder, destination: ir.Value, source: ir.Value, count: ir.Value) -> None:
    """`copy_bytes(destination, source, n)`: copy n bytes between addresses that do not overlap."""
    function_type = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, I64, I1])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.memcpy.p0.p0.i64")
    pointers = [builder.inttoptr(address, _BYTES) for address in (destination, source)]
    builder.call(function, [*pointers, count, ir.Constant(I1, 0)])


@emitted(types.int64, I64_POINTER, types.int64)
def fetch_add(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
    """`fetch_add(pointer, i)`: add one to element i atomically and return what it was.

    Sequentially consistent: what a thread wrote before is seen by whoever reads the higher value.
    """
    return builder.atomic_rmw("add", builder.gep(pointer, [index]), ir.Constant(I64, 1), "seq_cst")
