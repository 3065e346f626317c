"""A head of keys or values on its way into a quantised cache; see `kvwatch_kernels.quant` for the definition."""

import numpy as np

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.memory import Pointer, advance, limit_of, load, load_some, store, store_some, write
from kvwatch_kernels.cpu.vectors import LANES, larger_size, largest_size, splat
from kvwatch_kernels.quant import SMALLEST_MAGNITUDE

_SMALLEST = np.float32(SMALLEST_MAGNITUDE)
_ZERO = np.float32(0.0)


@subroutine
def quantise_head(source: Pointer, head_dim: int, target: Pointer, scale_target: Pointer) -> None:
    """Write a head's stored numbers and its scale.

    Args:
        source: T[head_dim], float32 or bfloat16.
        head_dim: elements of the head.
        target: of one of the quantised kinds, [head_dim]; overwritten.
        scale_target: f32[1], overwritten.
    """
    whole = head_dim // LANES * LANES
    sizes = splat(_ZERO)
    for offset in range(0, whole, LANES):
        sizes = larger_size(sizes, load(advance(source, offset)))
    if whole < head_dim:
        sizes = larger_size(sizes, load_some(advance(source, whole), head_dim - whole))
    magnitude = largest_size(sizes)
    is_finite = magnitude < np.float32(np.inf)  # false for NaN
    scale = magnitude / limit_of(target) if magnitude >= _SMALLEST else _ZERO
    # Without a scale everything is stored as zero. NaN must be kept out, as it has no place in an int8.
    is_stored = is_finite and scale > _ZERO
    inverse = splat(np.float32(1.0) / scale if is_stored else _ZERO)
    for offset in range(0, whole, LANES):
        scaled = load(advance(source, offset)) * inverse
        store(advance(target, offset), scaled if is_stored else inverse)
    if whole < head_dim:
        scaled = load_some(advance(source, whole), head_dim - whole) * inverse
        store_some(advance(target, whole), head_dim - whole, scaled if is_stored else inverse)
    write(scale_target, 0, scale if is_finite else np.float32(np.nan))
