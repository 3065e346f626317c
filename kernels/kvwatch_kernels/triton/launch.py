"""How each kernel is launched: one table that can be read, no tuning at run time.

Knows sizes and dtypes, neither tensors nor Triton. The ahead-of-time gate compiles what stands here, so that a row that
spills registers or misses the matrix units fails there, without a GPU.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

SPLIT: Final = 512
"""Tokens of one split of a context, counted from position 0: what is summed together depends on positions only."""


class Queries(StrEnum):
    """What the queries of a batch are like."""

    DECODE = "decode"
    """At most one query a sequence."""
    PREFILL = "prefill"
    """Anything: chunks of prompts, mixed with decodes or not."""


class Stored(StrEnum):
    """What the cache holds, as far as the launch depends on it."""

    FLOAT32 = "float32"
    HALF = "half"
    """float16 or bfloat16"""
    QUANTISED = "quantised"
    """8 bits, widened to the query's dtype, which is float16 or bfloat16"""
    QUANTISED_FLOAT32 = "quantised, float32 query"


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Sizes of one program of the attention kernel."""

    block_m: int
    """Rows of a query tile: (query, head) pairs that share a KV head. At least 16, as matrix units have it."""
    tile: int
    """Tokens of a tile of keys and values; it need not match the cache's block size."""
    num_warps: int
    num_stages: int
    """Tiles that are on their way from memory at once, plus one."""
    chunk: int | None = None
    """Elements of a head that are multiplied at a time; None: all. Without matrix units whole rows do not fit."""


ATTENTION: Final[dict[tuple[Queries, Stored, int], AttentionLaunch]] = {
    # queries, stored, padded head size           block_m tile warps stages
    (Queries.DECODE, Stored.HALF, 64): AttentionLaunch(16, 64, 4, 3),
    (Queries.DECODE, Stored.HALF, 128): AttentionLaunch(16, 32, 4, 3),
    (Queries.DECODE, Stored.HALF, 256): AttentionLaunch(16, 32, 4, 3),
    (Queries.PREFILL, Stored.HALF, 64): AttentionLaunch(64, 32, 4, 3),
    (Queries.PREFILL, Stored.HALF, 128): AttentionLaunch(64, 32, 8, 3),
    (Queries.PREFILL, Stored.HALF, 256): AttentionLaunch(32, 16, 8, 3),
    (Queries.DECODE, Stored.QUANTISED, 64): AttentionLaunch(16, 64, 4, 3),
    (Queries.DECODE, Stored.QUANTISED, 128): AttentionLaunch(16, 32, 4, 3),
    (Queries.DECODE, Stored.QUANTISED, 256): AttentionLaunch(16, 16, 4, 3),
    (Queries.PREFILL, Stored.QUANTISED, 64): AttentionLaunch(64, 32, 4, 3),
    (Queries.PREFILL, Stored.QUANTISED, 128): AttentionLaunch(64, 32, 8, 3),
    (Queries.PREFILL, Stored.QUANTISED, 256): AttentionLaunch(16, 16, 4, 3),
    (Queries.DECODE, Stored.FLOAT32, 64): AttentionLaunch(16, 32, 4, 2, chunk=32),
    (Queries.DECODE, Stored.FLOAT32, 128): AttentionLaunch(16, 32, 4, 2, chunk=32),
    (Queries.DECODE, Stored.FLOAT32, 256): AttentionLaunch(16, 16, 8, 2, chunk=32),
    (Queries.PREFILL, Stored.FLOAT32, 64): AttentionLaunch(16, 16, 4, 2, chunk=32),
    (Queries.PREFILL, Stored.FLOAT32, 128): AttentionLaunch(16, 16, 4, 2, chunk=32),
    (Queries.PREFILL, Stored.FLOAT32, 256): AttentionLaunch(16, 16, 8, 2, chunk=32),
}
"""Launches by (queries, what is stored, head size rounded up to a power of two)."""


def padded_head_dim(head_dim: int) -> int:
    """Return the lanes that a head takes: a power of two from 64."""
    return max(64, 1 << (head_dim - 1).bit_length())


def attention_launch(queries: Queries, stored: Stored, head_dim: int, group: int) -> AttentionLaunch:
    """Return how to launch attention.

    Args:
        queries: of the batch.
        stored: what the cache holds.
        head_dim: elements of a head, up to 256.
        group: query heads that share a KV head; a query tile holds all of them.

    Returns:
        The table's row, with as many rows in the query tile as the group needs.
    """
    row = ATTENTION[
        queries, Stored.FLOAT32 if stored is Stored.QUANTISED_FLOAT32 else stored, padded_head_dim(head_dim)
    ]
    needed = 1 << (group - 1).bit_length()
    if needed <= row.block_m:
        return row
    return replace(row, block_m=needed)


@dataclass(frozen=True, slots=True)
class CopyLaunch:
    """Sizes of one program of the kernels that only move data."""

    num_warps: int
    chunk: int
    """Elements that a program moves."""


COPY: Final = CopyLaunch(4, 1024)
"""Blocks are copied as 8-byte words where their size and address allow it: 8 KiB a program."""

STORE_WARPS: Final = 1
"""Warps of a program that writes one head."""

REDUCE_WARPS: Final = 4

REDUCE_SPLITS: Final = 16
"""Splits that are merged at once; always in ascending order."""
