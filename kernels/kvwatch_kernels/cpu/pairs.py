"""Products of pairs of bfloat16 in one instruction (AVX512-BF16): two products and their sum for each lane.

A pair lies in 32 bits. Its products are exact in float32; they are added to the lane's sum with the instruction's own
rounding (to nearest, ties to even; denormals count as zero).
"""

from functools import cache

from llvmlite import binding, ir
from numba.core import cgutils

from kvwatch_kernels.cpu.vectors import F32_LANES, LANES


@cache
def multiplies_pairs() -> bool:
    """Whether this processor has the instruction."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512bf16") and features.get("avx512f"))


class _PairLanes(ir.Type):  # type: ignore[misc]  # llvmlite is untyped
    """Lanes of two bfloat16 each, a type that llvmlite has no name for."""

    def _to_string(self) -> str:
        return f"<{2 * LANES} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PairLanes)

    def __hash__(self) -> int:
        return hash(_PairLanes)


def add_pairs(builder: ir.IRBuilder, sums: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Emit `sums` plus, lane by lane, the products of both halves of 32-bit pairs."""
    pairs = _PairLanes()
    function_type = ir.FunctionType(F32_LANES, [F32_LANES, pairs, pairs])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [sums, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])
