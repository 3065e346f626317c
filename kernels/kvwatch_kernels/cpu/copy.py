"""Compiled copies of whole blocks, within a cache or between two: one memory copy a block."""

from array import array
from functools import cache

from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.compiled import entry_point, inlined, source_digest
from kvwatch_kernels.cpu.memory import Pointer, copy_bytes, fetch_add, i64_at, read
from kvwatch_kernels.cpu.threads import call_on_threads
from kvwatch_kernels.dims import Int64Array

# Places in the argument array.
(
    _NEXT_ITEM,  # taken by the threads
    _NUM_COPIES,
    _BLOCK_BYTES,
    _SOURCE,  # address of the tensor that is read, bytes from one of its blocks to the next, address of its block ids
    _SOURCE_STRIDE,
    _SOURCE_BLOCKS,
    _TARGET,  # the same of the tensor that is written
    _TARGET_STRIDE,
    _TARGET_BLOCKS,
) = range(9)


@inlined
def copy_blocks(params: Pointer) -> None:
    """What every thread does: copy blocks until none is left."""
    source_blocks, target_blocks = i64_at(read(params, _SOURCE_BLOCKS)), i64_at(read(params, _TARGET_BLOCKS))
    item = fetch_add(params, _NEXT_ITEM)
    while item < read(params, _NUM_COPIES):
        source = read(params, _SOURCE) + read(source_blocks, item) * read(params, _SOURCE_STRIDE)
        target = read(params, _TARGET) + read(target_blocks, item) * read(params, _TARGET_STRIDE)
        copy_bytes(target, source, read(params, _BLOCK_BYTES))
        item = fetch_add(params, _NEXT_ITEM)


@cache
def copy_code() -> int:
    """Address of the compiled copy (compiled, or loaded from the disk cache, once in a process)."""
    digest = source_digest()

    def run_copy(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        copy_blocks(i64_at(address))

    return entry_point(types.void(types.int64), run_copy)


def compiled_block_copy(source: Tensor, source_blocks: Int64Array, target: Tensor, target_blocks: Int64Array) -> None:
    """Copy block `source_blocks[i]` of one tensor over block `target_blocks[i]` of another, or of the same.

    Args:
        source: T[num_blocks, ...], CPU, each block contiguous.
        source_blocks: i64[num_copies], contiguous; blocks of the source.
        target: T[num_blocks, ...], likewise; blocks of the same size. Written.
        target_blocks: i64[num_copies], contiguous; blocks of the target, none twice, and none that is also read.
    """
    size = source.element_size()
    arguments = (
        *(0, len(source_blocks), source[0].numel() * size),
        *(source.data_ptr(), source.stride(0) * size, source_blocks.ctypes.data),
        *(target.data_ptr(), target.stride(0) * size, target_blocks.ctypes.data),
    )
    call_on_threads(copy_code(), array("q", arguments), len(source_blocks))
