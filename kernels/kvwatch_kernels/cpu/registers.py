"""How a small matrix product is cut so that its sums stay in the processor's registers.

A product keeps one vector of sums for every row and vector of a strip. Where there are more of them than the registers
hold, the compiler would spill them in every round. So the product is cut into parts that walk the depth one after the
other: an element's sum keeps its order, and its bits.
"""

import itertools
from functools import cache
from typing import NamedTuple

from llvmlite import binding

from kvwatch_kernels.cpu.vectors import LANES

_FLOAT_BITS = 32


class Registers(NamedTuple):
    """A processor's vector registers."""

    number: int
    bits: int
    """Of one of them."""

    @property
    def per_vector(self) -> int:
        """Registers that a vector of `LANES` float32 takes."""
        return max(LANES * _FLOAT_BITS // self.bits, 1)


class Part(NamedTuple):
    """A part of a product: some rows by some vectors of the strip."""

    rows: range
    vectors: range


@cache
def host_registers() -> Registers:
    """Return the registers of this processor."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Registers(32, 512)
    if features.get("avx2"):
        return Registers(16, 256)
    return Registers(32, 128) if features.get("neon") else Registers(16, 128)


def product_parts(rows: int, vectors: int, registers: Registers) -> list[Part]:
    """Cut a product into as few parts as keep their sums, one step of the strip and a factor in registers.

    Among cuts into equally many parts, one with the fewest loads is taken.

    Args:
        rows: of the product.
        vectors: of `LANES` float32 each, in one row of the strip; a power of two.
        registers: to keep them in.
    """
    # Widest first: of equals, `min` takes the one that reads whole rows of the strip.
    cuts = [_cut(rows, vectors, width, registers) for width in (4, 2, 1) if vectors % width == 0]
    return min((parts for parts in cuts if parts), key=lambda parts: (len(parts), _num_loads(parts, registers)))


def _most_rows(rows: int, width: int, registers: Registers) -> int:
    """Rows of `width` vectors that fit beside each other, if any. One row alone reads the strip from memory."""
    fitting = (registers.number - 1) // (registers.per_vector * width)
    return min(rows, max(fitting - 1, 1)) if fitting else 0


def _cut(rows: int, vectors: int, width: int, registers: Registers) -> list[Part]:
    """Cut a product into parts that are `width` vectors wide; none where that does not fit."""
    most = _most_rows(rows, width, registers)
    if not most:
        return []
    num_groups = -(-rows // most)
    borders = [group * rows // num_groups for group in range(num_groups + 1)]
    return [
        Part(range(first_row, end_row), range(first_vector, first_vector + width))
        for first_row, end_row in itertools.pairwise(borders)
        for first_vector in range(0, vectors, width)
    ]


def _num_loads(parts: list[Part], registers: Registers) -> int:
    """Loads of all parts in one step of the depth."""
    return sum(len(part.vectors) * registers.per_vector + len(part.rows) for part in parts)
