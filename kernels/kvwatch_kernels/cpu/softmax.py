"""The running softmax of attention, in base 2, and how two of them are merged.

A row is one query of one head. Its state is the largest score so far, the sum of the weights relative to it, and
(elsewhere) the weighted sum of values. A score that may not be seen is selected away, never multiplied by zero: a NaN
under the mask leaves no trace, while a NaN that is seen makes its row NaN.
"""

import numba
import numpy as np

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.memory import Pointer, advance, load, read, store, write
from kvwatch_kernels.cpu.vectors import LANES, Vector, exp2, lanes_between, larger, max_lanes, select, splat, sum_lanes

_NOTHING_SEEN = np.float32(-np.inf)
_ONE = np.float32(1.0)


@subroutine
def first_lane_of_exp2(x: float) -> float:
    """2**x of one float32, with the same bits as a lane of `exp2`."""
    value: float = max_lanes(exp2(splat(x)))
    return value


@subroutine
def visible_scores(scores: Pointer, first_lane: int, first: int, end: int) -> Vector:
    """Sixteen scores of a tile from `first_lane` on, -inf outside of the visible keys `first` to `end - 1`."""
    mask = lanes_between(numba.int32(first - first_lane), numba.int32(end - first_lane))
    seen: Vector = select(mask, load(advance(scores, first_lane)), splat(_NOTHING_SEEN))
    return seen


@subroutine
def softmax_row(scores: Pointer, first: int, end: int, largest: Pointer, total: Pointer, rescale: Pointer) -> None:
    """Turn one row's scores of a tile into weights and bring the row's state up to date.

    Args:
        scores: f32[TILE], replaced by weights `2**(score - largest)`; zero outside of the visible keys.
        first: first visible key of the tile.
        end: one after the last visible key of the tile; nothing is visible where it is not above `first`.
        largest: f32[1], the largest score of the row so far; -inf before the first.
        total: f32[1], the sum of the row's weights so far.
        rescale: f32[1], receives the factor for what was summed up before this tile.
    """
    scores_0 = visible_scores(scores, 0, first, end)
    scores_1 = visible_scores(scores, LANES, first, end)
    scores_2 = visible_scores(scores, 2 * LANES, first, end)
    scores_3 = visible_scores(scores, 3 * LANES, first, end)
    before = read(largest, 0)
    here = max_lanes(larger(larger(scores_0, scores_1), larger(scores_2, scores_3)))
    # A comparison with NaN is false: `now` is never NaN, the weights of NaN scores are.
    now = here if here > before else before
    shift = now if now > _NOTHING_SEEN else np.float32(0.0)
    shifts = splat(shift)
    # What is hidden is -inf here, and its weight exactly zero.
    weights_0 = exp2(scores_0 - shifts)
    weights_1 = exp2(scores_1 - shifts)
    weights_2 = exp2(scores_2 - shifts)
    weights_3 = exp2(scores_3 - shifts)
    store(scores, weights_0)
    store(advance(scores, LANES), weights_1)
    store(advance(scores, 2 * LANES), weights_2)
    store(advance(scores, 3 * LANES), weights_3)
    factor = first_lane_of_exp2(before - shift) if now > before else _ONE
    write(rescale, 0, factor)
    write(largest, 0, now)
    write(total, 0, read(total, 0) * factor + sum_lanes((weights_0 + weights_1) + (weights_2 + weights_3)))


@subroutine
def merge_row(
    largest: Pointer,
    total: Pointer,
    sums: Pointer,
    part_largest: Pointer,
    part_total: Pointer,
    part_sums: Pointer,
    width: int,
) -> None:
    """Merge the state of a row's next split into the state of the splits before it.

    Args:
        largest: f32[1], updated; not read where nothing was merged yet.
        total: f32[1], updated; 0 where nothing was merged yet.
        sums: f32[width], updated.
        part_largest: f32[1], of the next split.
        part_total: f32[1]; 0 where the row sees none of the split's keys, which changes nothing.
        part_sums: f32[width]
        width: padded head size, a multiple of 16.
    """
    if read(part_total, 0) == np.float32(0.0):
        return
    is_first = read(total, 0) == np.float32(0.0)
    part = read(part_largest, 0)
    before = part if is_first else read(largest, 0)
    now = part if part > before else before
    keep = splat(first_lane_of_exp2(before - now))
    take = splat(first_lane_of_exp2(part - now))
    for offset in range(0, width, LANES):
        added = load(advance(part_sums, offset)) * take
        old = load(advance(sums, offset))
        store(advance(sums, offset), added if is_first else old * keep + added)
    merged = read(part_total, 0) * max_lanes(take)
    write(total, 0, merged if is_first else read(total, 0) * max_lanes(keep) + merged)
    write(largest, 0, now)
