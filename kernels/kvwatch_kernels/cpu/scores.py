"""What happens to a row of scores beside the softmax: scales of keys and values, soft cap, position bias.

Scores are in base 2, as the softmax wants them: cap and slopes carry the factor log2(e). Hidden keys are treated like
the others, since whatever comes of them is selected away afterwards.
"""

import math

import numpy as np

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.memory import Pointer, advance, load, store
from kvwatch_kernels.cpu.micro_gemm import TILE
from kvwatch_kernels.cpu.vectors import LANES, fma, lane_numbers, splat, tanh

_LOG2_E = np.float32(math.log2(math.e))


@subroutine
def multiply_row(scores: Pointer, factors: Pointer) -> None:
    """Multiply the scores or weights f32[TILE] of a row by the factors f32[TILE] of the tile's tokens."""
    for lane in range(0, TILE, LANES):
        store(advance(scores, lane), load(advance(scores, lane)) * load(advance(factors, lane)))


@subroutine
def cap_row(scores: Pointer, cap: float) -> None:
    """Bend the scores f32[TILE] of a row towards a bound: `cap * tanh(score / cap)`."""
    caps = splat(cap)
    for lane in range(0, TILE, LANES):
        store(advance(scores, lane), caps * tanh(load(advance(scores, lane)) / caps))


@subroutine
def bias_row(scores: Pointer, slope: float, distance: int) -> None:
    """Add `slope * (key's position - query's position)` to the scores f32[TILE] of a row.

    Args:
        scores: of the tile's keys.
        slope: of the row's head.
        distance: position of the tile's first key less that of the query.
    """
    slopes = splat(slope * _LOG2_E)
    for lane in range(0, TILE, LANES):
        distances = lane_numbers() + splat(np.float32(distance + lane))
        store(advance(scores, lane), fma(slopes, distances, load(advance(scores, lane))))
