"""Typed pointers inside compiled code: loads, stores, prefetches, copies and the one atomic operation.

A pointer's type carries the kind of element in memory (see `elements.py`); loads give float32, stores take it.
Addresses and offsets are 64-bit. Nothing here checks bounds: callers do.
"""

from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import signature

from kvwatch_kernels.cpu.elements import (
    BF16_POINTER,
    E4M3_POINTER,
    E5M2_POINTER,
    ELEMENT_POINTERS,
    ELEMENTS,
    F32_POINTER,
    FLOAT_POINTERS,
    I32_POINTER,
    I64_POINTER,
    INT8_POINTER,
    INTEGER_POINTERS,
)
from kvwatch_kernels.cpu.quantised import I8
from kvwatch_kernels.cpu.vectors import F32, F32_LANES, I1, I16, I32, I64, LANES, VECTOR, emitted, emitted_for, lanes_of

Pointer: TypeAlias = int
"""A pointer inside compiled code; its Numba type knows the element type."""

CACHE_LINE_BYTES = 64

_READABLE = (F32_POINTER, *INTEGER_POINTERS)

_BYTES = ir.IntType(8).as_pointer()


def emit_load(builder: ir.IRBuilder, pointer: ir.Value, pointer_type: Any) -> ir.Value:
    """Emit sixteen consecutive elements as float32 lanes."""
    element = ELEMENTS[pointer_type]
    lanes_type = ir.VectorType(element.memory_type, LANES).as_pointer()
    return element.widen(builder, builder.load(builder.bitcast(pointer, lanes_type), align=element.num_bytes))


@emitted(F32_POINTER, types.int64)
def f32_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to float32 at an address."""
    return builder.inttoptr(address, F32.as_pointer())


@emitted(BF16_POINTER, types.int64)
def bf16_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to bfloat16 at an address."""
    return builder.inttoptr(address, I16.as_pointer())


@emitted(INT8_POINTER, types.int64)
def int8_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to int8 elements at an address."""
    return builder.inttoptr(address, I8.as_pointer())


@emitted(E4M3_POINTER, types.int64)
def e4m3_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to e4m3 elements at an address."""
    return builder.inttoptr(address, I8.as_pointer())


@emitted(E5M2_POINTER, types.int64)
def e5m2_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to e5m2 elements at an address."""
    return builder.inttoptr(address, I8.as_pointer())


@emitted(I32_POINTER, types.int64)
def i32_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to int32 at an address."""
    return builder.inttoptr(address, I32.as_pointer())


@emitted(I64_POINTER, types.int64)
def i64_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to int64 at an address."""
    return builder.inttoptr(address, I64.as_pointer())


@emitted_for(*(signature(pointer, pointer, types.int64) for pointer in (*ELEMENT_POINTERS, *INTEGER_POINTERS)))
def pointer_like(builder: ir.IRBuilder, _sig: Any, like: ir.Value, address: ir.Value) -> ir.Value:
    """`pointer_like(pointer, address)`: a pointer of the same type to another address."""
    return builder.inttoptr(address, like.type)


@emitted_for(*(signature(types.int64, pointer) for pointer in (*ELEMENT_POINTERS, *INTEGER_POINTERS)))
def address_of(builder: ir.IRBuilder, _sig: Any, pointer: ir.Value) -> ir.Value:
    """`address_of(pointer)`: where it points to."""
    return builder.ptrtoint(pointer, I64)


@emitted_for(*(signature(pointer, pointer, types.int64) for pointer in (*ELEMENT_POINTERS, *INTEGER_POINTERS)))
def advance(builder: ir.IRBuilder, _sig: Any, pointer: ir.Value, elements: ir.Value) -> ir.Value:
    """`advance(pointer, n)`: the pointer moved by n elements."""
    return builder.gep(pointer, [elements])


@emitted_for(*(signature(pointer.dtype, pointer, types.int64) for pointer in _READABLE))
def read(builder: ir.IRBuilder, _sig: Any, pointer: ir.Value, index: ir.Value) -> ir.Value:
    """`read(pointer, i)`: element i."""
    return builder.load(builder.gep(pointer, [index]))


@emitted_for(*(signature(types.void, pointer, types.int64, pointer.dtype) for pointer in _READABLE))
def write(builder: ir.IRBuilder, _sig: Any, pointer: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """`write(pointer, i, value)`: set element i."""
    builder.store(value, builder.gep(pointer, [index]))


@emitted_for(*(signature(types.float32, pointer, types.int64) for pointer in ELEMENT_POINTERS))
def read_float(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, index: ir.Value) -> ir.Value:
    """`read_float(pointer, i)`: element i as float32."""
    return ELEMENTS[sig.args[0]].widen(builder, builder.load(builder.gep(pointer, [index])))


@emitted_for(*(signature(VECTOR, pointer) for pointer in ELEMENT_POINTERS))
def load(builder: ir.IRBuilder, sig: Any, pointer: ir.Value) -> ir.Value:
    """`load(pointer)`: sixteen consecutive elements as float32 lanes."""
    return emit_load(builder, pointer, sig.args[0])


@emitted_for(*(signature(types.void, pointer, VECTOR) for pointer in ELEMENT_POINTERS))
def store(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, lanes: ir.Value) -> None:
    """`store(pointer, lanes)`: write sixteen elements, rounded to the pointer's kind of element."""
    element = ELEMENTS[sig.args[0]]
    values = element.narrow(builder, lanes)
    builder.store(values, builder.bitcast(pointer, values.type.as_pointer()), align=element.num_bytes)


@emitted_for(*(signature(VECTOR, pointer, VECTOR) for pointer in FLOAT_POINTERS))
def rounded_like(builder: ir.IRBuilder, sig: Any, _like: ir.Value, lanes: ir.Value) -> ir.Value:
    """`rounded_like(pointer, lanes)`: what a store through a pointer of this type and a load would give back."""
    element = ELEMENTS[sig.args[0]]
    return element.widen(builder, element.narrow(builder, lanes))


@emitted_for(*(signature(VECTOR, pointer, types.int64) for pointer in ELEMENT_POINTERS))
def load_some(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, count: ir.Value) -> ir.Value:
    """`load_some(pointer, n)`: the first n (0 to 16) elements, other lanes zero; reads nothing beyond them."""
    lanes = cgutils.alloca_once(builder, F32_LANES)
    builder.store(lanes_of(0.0), lanes)
    as_floats = builder.bitcast(lanes, F32.as_pointer())
    with cgutils.for_range(builder, count) as loop:
        value = ELEMENTS[sig.args[0]].widen(builder, builder.load(builder.gep(pointer, [loop.index])))
        builder.store(value, builder.gep(as_floats, [loop.index]))
    return builder.load(lanes)


@emitted_for(*(signature(types.void, pointer, types.int64, VECTOR) for pointer in ELEMENT_POINTERS))
def store_some(builder: ir.IRBuilder, sig: Any, pointer: ir.Value, count: ir.Value, lanes: ir.Value) -> None:
    """`store_some(pointer, n, lanes)`: write the first n (0 to 16) lanes and nothing beyond them."""
    values = ELEMENTS[sig.args[0]].narrow(builder, lanes)
    copy = cgutils.alloca_once(builder, values.type)
    builder.store(values, copy)
    as_elements = builder.bitcast(copy, values.type.element.as_pointer())
    with cgutils.for_range(builder, count) as loop:
        element = builder.load(builder.gep(as_elements, [loop.index]))
        builder.store(element, builder.gep(pointer, [loop.index]))


@emitted_for(*(signature(types.float32, pointer) for pointer in ELEMENT_POINTERS))
def unit_of(_builder: ir.IRBuilder, sig: Any, _like: ir.Value) -> ir.Value:
    """`unit_of(pointer)`: what an element of this kind that is read as 1.0 stands for."""
    return ir.Constant(F32, ELEMENTS[sig.args[0]].unit)


@emitted_for(*(signature(types.float32, pointer) for pointer in ELEMENT_POINTERS))
def limit_of(_builder: ir.IRBuilder, sig: Any, _like: ir.Value) -> ir.Value:
    """`limit_of(pointer)`: the largest finite number of a quantised kind of element, 0 for others."""
    return ir.Constant(F32, ELEMENTS[sig.args[0]].limit)


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
