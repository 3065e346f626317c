"""Compiled `kv_store`: rows of bytes go to their slots, whatever their dtype."""

from array import array
from functools import cache

from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.compiled import entry_point, inlined, source_digest
from kvwatch_kernels.cpu.memory import Pointer, copy_bytes, fetch_add, i64_at, read
from kvwatch_kernels.cpu.threads import call_on_threads
from kvwatch_kernels.dims import Int64Array

TOKENS_PER_ITEM = 64
"""Tokens that a thread stores at a time; fewer are not worth a second thread."""

# Places in the argument array; strides in bytes.
(
    _NEXT_ITEM,  # taken by the threads
    _NUM_TOKENS,
    _NUM_HEADS,
    _ROW_BYTES,
    _BLOCK_SIZE,
    _SLOTS,  # address of i64[num_tokens]
    _KEY,  # then, for key and for value: source, its token and head strides, cache, its block, head and token strides
    _VALUE,
) = (0, 1, 2, 3, 4, 5, 6, 13)


@inlined
def store_rows(params: Pointer, side: int, token: int, slot: int) -> None:
    """Copy one token's heads of one side (`_KEY` or `_VALUE`) to its slot."""
    block = slot // read(params, _BLOCK_SIZE)
    offset = slot - block * read(params, _BLOCK_SIZE)
    source = read(params, side) + token * read(params, side + 1)
    target = read(params, side + 3) + block * read(params, side + 4) + offset * read(params, side + 6)
    for head in range(read(params, _NUM_HEADS)):
        from_row = source + head * read(params, side + 2)
        copy_bytes(target + head * read(params, side + 5), from_row, read(params, _ROW_BYTES))


@inlined
def store_tokens(params: Pointer) -> None:
    """What every thread does: store `TOKENS_PER_ITEM` tokens at a time until none is left."""
    slots = i64_at(read(params, _SLOTS))
    first = fetch_add(params, _NEXT_ITEM) * TOKENS_PER_ITEM
    while first < read(params, _NUM_TOKENS):
        for token in range(first, min(first + TOKENS_PER_ITEM, read(params, _NUM_TOKENS))):
            slot = read(slots, token)
            if slot >= 0:
                store_rows(params, _KEY, token, slot)
                store_rows(params, _VALUE, token, slot)
        first = fetch_add(params, _NEXT_ITEM) * TOKENS_PER_ITEM


@cache
def store_code() -> int:
    """Address of the compiled store (compiled, or loaded from the disk cache, once in a process)."""
    digest = source_digest()

    def run_store(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        store_tokens(i64_at(address))

    return entry_point(types.void(types.int64), run_store)


def compiled_kv_store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Int64Array
) -> None:
    """Run the compiled store on checked arguments; see `kvwatch_kernels.kv_store`.

    Args:
        key: T[num_tokens, num_kv_heads, head_dim], CPU, last dim contiguous.
        value: same shape and dtype.
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim], CPU, last dim contiguous.
        value_cache: same shape and dtype.
        slot_mapping: i64[num_tokens], contiguous; every slot lies in the cache or is negative.
    """
    num_tokens, num_heads, head_dim = key.shape
    size = key.element_size()
    sides = [
        number
        for rows, cache in ((key, key_cache), (value, value_cache))
        for number in (
            *(rows.data_ptr(), *(size * stride for stride in rows.stride()[:2])),
            *(cache.data_ptr(), *(size * stride for stride in cache.stride()[:3])),
        )
    ]
    block_size = key_cache.shape[2]
    params = array("q", (0, num_tokens, num_heads, head_dim * size, block_size, slot_mapping.ctypes.data, *sides))
    call_on_threads(store_code(), params, -(-num_tokens // TOKENS_PER_ITEM))
