"""Compiled `block_copy`: one memory copy a block."""

from array import array
from functools import cache

from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.compiled import entry_point, inlined, source_digest
from kvwatch_kernels.cpu.memory import Pointer, copy_bytes, fetch_add, i64_at, read
from kvwatch_kernels.cpu.threads import call_on_threads
from kvwatch_kernels.dims import Int64Array

# Places in the argument array.
_NEXT_ITEM, _NUM_COPIES, _CACHE, _STRIDE_BYTES, _BLOCK_BYTES, _SOURCES, _DESTINATIONS = range(7)


@inlined
def copy_blocks(params: Pointer) -> None:
    """What every thread does: copy blocks until none is left."""
    base, stride = read(params, _CACHE), read(params, _STRIDE_BYTES)
    sources, destinations = i64_at(read(params, _SOURCES)), i64_at(read(params, _DESTINATIONS))
    item = fetch_add(params, _NEXT_ITEM)
    while item < read(params, _NUM_COPIES):
        source = base + read(sources, item) * stride
        copy_bytes(base + read(destinations, item) * stride, source, read(params, _BLOCK_BYTES))
        item = fetch_add(params, _NEXT_ITEM)


@cache
def copy_code() -> int:
    """Address of the compiled copy (compiled, or loaded from the disk cache, once in a process)."""
    digest = source_digest()

    def run_copy(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        copy_blocks(i64_at(address))

    return entry_point(types.void(types.int64), run_copy)


def compiled_block_copy(cache: Tensor, sources: Int64Array, destinations: Int64Array) -> None:
    """Run the compiled copy on checked arguments; see `kvwatch_kernels.block_copy`.

    Args:
        cache: T[num_blocks, ...], CPU, each block contiguous.
        sources: i64[num_copies], contiguous; blocks of the cache.
        destinations: i64[num_copies], contiguous; blocks of the cache, disjoint from each other and from the sources.
    """
    size = cache.element_size()
    block_bytes = cache[0].numel() * size
    numbers = (cache.data_ptr(), cache.stride(0) * size, block_bytes, sources.ctypes.data, destinations.ctypes.data)
    params = array("q", (0, len(sources), *numbers))
    call_on_threads(copy_code(), params, len(sources))
