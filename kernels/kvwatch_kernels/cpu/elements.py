"""Elements in memory: the pointer types of compiled code, and how each becomes float32 lanes and comes back.

`bf16.py` and `quantised.py` know the formats; here they are put behind one table. A quantised element is read as a
number of units: what it stands for is `read * unit * scale`, and whoever multiplies by the scale takes the unit along.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from llvmlite import ir
from numba.core import types
from numba.extending import models, register_model

from kvwatch_kernels.cpu.bf16 import element_of_bf16_pair, narrow_to_bf16, widen_bf16
from kvwatch_kernels.cpu.quantised import (
    E4M3,
    E4M3_UNIT,
    E5M2,
    I8,
    element_of_e4m3_dword,
    element_of_e5m2_dword,
    element_of_int8_dword,
    narrow_to_fp8,
    narrow_to_int8,
    widen_e4m3,
    widen_e5m2,
    widen_int8,
)
from kvwatch_kernels.cpu.vectors import F32, I16
from kvwatch_kernels.quant import QUANTISED_LIMITS


class ByteType(types.Type):
    """Numba's type of an element of one byte, of one of the quantised formats."""


@register_model(ByteType)
class _ByteModel(models.PrimitiveModel):  # type: ignore[misc]  # numba is untyped
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, I8)


CPointer = types.CPointer  # type: ignore[attr-defined]  # numba's stub lacks it
F32_POINTER = CPointer(types.float32)
BF16_POINTER = CPointer(types.uint16)
I32_POINTER = CPointer(types.int32)
I64_POINTER = CPointer(types.int64)
INT8_POINTER = CPointer(ByteType("int8_element"))
E4M3_POINTER = CPointer(ByteType("e4m3_element"))
E5M2_POINTER = CPointer(ByteType("e5m2_element"))


@dataclass(frozen=True, slots=True)
class Element:
    """One kind of element. The functions emit LLVM IR; values are single ones or lanes unless said otherwise."""

    memory_type: ir.Type
    num_bytes: int
    widen: Callable[[ir.IRBuilder, ir.Value], ir.Value]
    """Elements as they lie in memory to float32."""
    narrow: Callable[[ir.IRBuilder, ir.Value], ir.Value]
    """Float32 to elements, rounded to nearest, ties to even."""
    element_of_dword: Callable[[ir.IRBuilder, ir.Value, int], ir.Value]
    """Of sixteen lanes of 32 bits, each a few neighbouring elements, number i of each lane as float32."""
    unit: float = 1.0
    """What an element that is read as 1.0 stands for."""
    limit: float = 0.0
    """Largest finite number of a quantised format."""


ELEMENTS: Final[dict[Any, Element]] = {
    F32_POINTER: Element(F32, 4, lambda _, v: v, lambda _, v: v, lambda b, v, _: b.bitcast(v, ir.VectorType(F32, 16))),
    BF16_POINTER: Element(I16, 2, widen_bf16, narrow_to_bf16, element_of_bf16_pair),
    INT8_POINTER: Element(I8, 1, widen_int8, narrow_to_int8, element_of_int8_dword, limit=QUANTISED_LIMITS[torch.int8]),
    E4M3_POINTER: Element(
        I8,
        1,
        widen_e4m3,
        lambda builder, value: narrow_to_fp8(builder, value, E4M3),
        element_of_e4m3_dword,
        unit=E4M3_UNIT,
        limit=QUANTISED_LIMITS[torch.float8_e4m3fn],
    ),
    E5M2_POINTER: Element(
        I8,
        1,
        widen_e5m2,
        lambda builder, value: narrow_to_fp8(builder, value, E5M2),
        element_of_e5m2_dword,
        limit=QUANTISED_LIMITS[torch.float8_e5m2],
    ),
}

FLOAT_POINTERS: Final = (F32_POINTER, BF16_POINTER)
"""Pointers to what queries and outputs are made of."""
QUANTISED_POINTERS: Final = (INT8_POINTER, E4M3_POINTER, E5M2_POINTER)
ELEMENT_POINTERS: Final = (*FLOAT_POINTERS, *QUANTISED_POINTERS)
"""Pointers to what caches are made of."""
INTEGER_POINTERS: Final = (I32_POINTER, I64_POINTER)
