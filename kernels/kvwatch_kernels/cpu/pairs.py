"""Products of pairs of bfloat16 in one instruction (AVX512-BF16): two products and their sum for each lane.

A pair lies in 32 bits. Its products are exact in float32; they are added to the lane's sum with the instruction's own
rounding (to nearest, ties to even; denormals count as zero).
"""

from functools import cache

from llvmlite import binding, ir
from numba.core import cgutils

from kvwatch_kernels.cpu.vectors import F32_LANES, I16, LANES


@cache
def multiplies_pairs() -> bool:
    """Whether this processor has the instruction."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512bf16") and features.get("avx512f"))


class _BfloatLanes(ir.Type):  # type: ignore[misc]  # llvmlite is untyped
    """Lanes of bfloat16, a type that llvmlite has no name for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def _to_string(self) -> str:
        return f"<{self._count} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BfloatLanes) and other._count == self._count

    def __hash__(self) -> int:
        return hash((_BfloatLanes, self._count))


def add_pairs(builder: ir.IRBuilder, sums: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Emit `sums` plus, lane by lane, the products of both halves of 32-bit pairs."""
    pairs = _BfloatLanes(2 * LANES)
    function_type = ir.FunctionType(F32_LANES, [F32_LANES, pairs, pairs])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [sums, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


def narrow_lanes(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """Emit sixteen float32 rounded to bfloat16, as 16-bit lanes; ties to even, denormals become zero."""
    function_type = ir.FunctionType(_BfloatLanes(LANES), [F32_LANES])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return builder.bitcast(builder.call(function, [lanes]), ir.VectorType(I16, LANES))
