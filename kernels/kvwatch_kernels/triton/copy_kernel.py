# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  # device code: its types are Triton's, and its branches are for the compiler
"""Kernel that copies many whole blocks at once. Knows words, not what they mean."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["words"])
def copy_kernel(
    destination,
    source,
    destination_blocks,
    source_blocks,
    words,
    destination_stride,
    source_stride,
    CHUNK: tl.constexpr,
):
    """Grid (num_copies, chunks of a block). A side without block ids is a buffer of copies, one behind the other."""
    copy = tl.program_id(0).to(tl.int64)
    destination_block = copy
    if destination_blocks is not None:
        destination_block = tl.load(destination_blocks + copy)
    source_block = copy
    if source_blocks is not None:
        source_block = tl.load(source_blocks + copy)
    offsets = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    is_word = offsets < words
    moved = tl.load(source + source_block * source_stride + offsets, mask=is_word)
    tl.store(destination + destination_block * destination_stride + offsets, moved, mask=is_word)
