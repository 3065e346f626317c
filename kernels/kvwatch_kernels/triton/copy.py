"""Block copies on a GPU: within a cache, and between a cache and a staging buffer. One launch for any number of blocks.

Knows whole blocks as bytes. Block ids are on the device and were checked one folder up.
"""

from typing import Final

import torch
from torch import Tensor

from kvwatch_kernels.triton.copy_kernel import copy_kernel
from kvwatch_kernels.triton.launch import COPY

_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


def triton_block_copy(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy block `sources[i]` over block `destinations[i]`; see `kvwatch_kernels.block_copy`.

    Args:
        cache: T[num_blocks, ...], each block contiguous; written.
        sources: i64[num_copies], on the device.
        destinations: i64[num_copies], on the device; none twice or among the sources.
    """
    _copy(cache, cache, destinations, sources, len(sources))


def triton_gather_blocks(cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks one behind the other into a buffer; see `kvwatch_kernels.block_copy`.

    Args:
        cache: T[num_blocks, ...], each block contiguous.
        block_ids: i64[num_copies], on the device.
        staging: T[num_copies, ...], each block contiguous; written. On the device, or pinned memory of the host.
    """
    _copy(staging, cache, None, block_ids, len(block_ids))


def triton_scatter_blocks(staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    """Copy a buffer's blocks to where they belong; see `kvwatch_kernels.block_copy`.

    Args:
        staging: T[num_copies, ...], each block contiguous. On the device, or pinned memory of the host.
        cache: T[num_blocks, ...], each block contiguous; written.
        block_ids: i64[num_copies], on the device; none twice.
    """
    _copy(cache, staging, block_ids, None, len(block_ids))


def _copy(
    destination: Tensor,
    source: Tensor,
    destination_blocks: Tensor | None,
    source_blocks: Tensor | None,
    num_copies: int,
) -> None:
    if num_copies == 0:
        return
    word = next(word for word in _WORDS if _is_whole(destination, word) and _is_whole(source, word))
    to_words, from_words = _as_words(destination, word), _as_words(source, word)
    words = to_words.shape[1]
    copy_kernel[(num_copies, -(-words // COPY.chunk))](
        to_words,
        from_words,
        destination_blocks,
        source_blocks,
        words,
        to_words.stride(0),
        from_words.stride(0),
        CHUNK=COPY.chunk,
        num_warps=COPY.num_warps,
    )


def _is_whole(blocks: Tensor, word: torch.dtype) -> bool:
    """Whether every block is made of whole, aligned words."""
    size = blocks.element_size()
    sizes = (blocks[0].numel() * size, blocks.stride(0) * size, blocks.storage_offset() * size, blocks.data_ptr())
    return all(number % word.itemsize == 0 for number in sizes)


def _as_words(blocks: Tensor, word: torch.dtype) -> Tensor:
    """Return T[num_blocks, ...] as word[num_blocks, words]."""
    flat = blocks.as_strided((len(blocks), blocks[0].numel()), (blocks.stride(0), 1))
    return flat.view(torch.uint8).view(word)
