# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN201
"""Small kernels, each with one flaw that the ahead-of-time gate must find."""

import triton
import triton.language as tl


@triton.jit
def products_kernel(query, keys, out, num_keys, TILE: tl.constexpr, D: tl.constexpr):
    """Scores of 16 queries, tile by tile: pipelined with more than one stage."""
    rows, tokens, lanes = tl.arange(0, 16), tl.arange(0, TILE), tl.arange(0, D)
    queries = tl.load(query + rows[:, None] * D + lanes[None, :])
    sums = tl.zeros([16, TILE], tl.float32)
    for first in range(0, num_keys, TILE):
        tile = tl.load(keys + (first + tokens)[:, None] * D + lanes[None, :])
        sums += tl.dot(queries, tl.trans(tile).to(queries.dtype))
    tl.store(out + rows[:, None] * TILE + tokens[None, :], sums)


@triton.jit
def sums_kernel(query, keys, out, num_keys, TILE: tl.constexpr, D: tl.constexpr):
    """The same by sums: no matrix unit."""
    tokens, lanes = tl.arange(0, TILE), tl.arange(0, D)
    queries = tl.load(query + lanes)
    sums = tl.zeros([TILE], tl.float32)
    for first in range(0, num_keys, TILE):
        tile = tl.load(keys + (first + tokens)[:, None] * D + lanes[None, :])
        sums += tl.sum(tile.to(tl.float32) * queries[None, :].to(tl.float32), 1)
    tl.store(out + tokens, sums)


@triton.jit
def broken_kernel(query, keys, out, num_keys, TILE: tl.constexpr, D: tl.constexpr):
    """Does not compile anywhere."""
    lanes = tl.arange(0, D)
    tl.store(out + lanes, tl.load(keys + lanes) + tl.load(query + tl.arange(0, TILE)))
    tl.static_assert(num_keys is None, "no such thing")
