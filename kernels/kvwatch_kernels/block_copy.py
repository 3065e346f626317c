"""Copy whole blocks of the paged cache: within it (copy-on-write, relocation), to a staging buffer and back (swap)."""

import numpy as np
import torch
from torch import Tensor

from kvwatch_kernels.cpu.copy import compiled_block_copy
from kvwatch_kernels.dims import Int64Array, check_written, index_array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_block_copy, reference_gather_blocks, reference_scatter_blocks


def block_copy(cache: Tensor, sources: Int64Array | Tensor, destinations: Int64Array | Tensor) -> None:
    """Copy block `sources[i]` over block `destinations[i]`, for all i at once.

    Args:
        cache: T[num_blocks, ...], of any dtype, each block contiguous; written.
        sources: i64[num_copies]. Block ids; one may occur several times.
        destinations: i64[num_copies]. Block ids; none occurs twice or among the sources, so that order does not matter.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    _check_blocks("cache", cache)
    check_written("cache", cache)
    from_blocks = _block_ids("sources", sources, cache)
    to_blocks = _block_ids("destinations", destinations, cache, len(from_blocks))
    if len(from_blocks) == 0:
        return
    if len(np.unique(to_blocks)) != len(to_blocks) or np.isin(to_blocks, from_blocks).any():
        raise ShapeError(
            f"destinations is {to_blocks.tolist()}: none may occur twice or among sources {from_blocks.tolist()}"
        )
    if cache.device.type == "cpu":
        compiled_block_copy(cache, from_blocks, cache, to_blocks)
    elif cache.device.type == "cuda":
        from kvwatch_kernels.triton.copy import triton_block_copy

        triton_block_copy(cache, _on_device(from_blocks, cache), _on_device(to_blocks, cache))
    else:
        reference_block_copy(cache, from_blocks, to_blocks)


def gather_blocks(cache: Tensor, block_ids: Int64Array | Tensor, staging: Tensor) -> None:
    """Copy block `block_ids[i]` to place i of a staging buffer, for all i at once.

    Args:
        cache: T[num_blocks, ...], of any dtype, each block contiguous.
        block_ids: i64[num_copies]. Block ids; one may occur several times.
        staging: T[num_copies, ...], contiguous, each place of the shape of a block; written. May not overlap the cache.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    blocks = _check_staged(cache, block_ids, staging)
    if len(blocks) == 0:
        return
    if cache.device.type == "cpu":
        compiled_block_copy(cache, blocks, staging, np.arange(len(blocks), dtype=np.int64))
    elif cache.device.type == "cuda":
        from kvwatch_kernels.triton.copy import triton_gather_blocks

        triton_gather_blocks(cache, _on_device(blocks, cache), staging)
    else:
        reference_gather_blocks(cache, blocks, staging)


def scatter_blocks(staging: Tensor, cache: Tensor, block_ids: Int64Array | Tensor) -> None:
    """Copy place i of a staging buffer over block `block_ids[i]`, for all i at once.

    Args:
        staging: T[num_copies, ...], contiguous, each place of the shape of a block. May not overlap the cache.
        cache: T[num_blocks, ...], of any dtype, each block contiguous; written.
        block_ids: i64[num_copies]. Block ids; none occurs twice.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    blocks = _check_staged(cache, block_ids, staging)
    check_written("cache", cache)
    if len(np.unique(blocks)) != len(blocks):
        raise ShapeError(f"block_ids is {blocks.tolist()}: none may occur twice")
    if len(blocks) == 0:
        return
    if cache.device.type == "cpu":
        compiled_block_copy(staging, np.arange(len(blocks), dtype=np.int64), cache, blocks)
    elif cache.device.type == "cuda":
        from kvwatch_kernels.triton.copy import triton_scatter_blocks

        triton_scatter_blocks(staging, cache, _on_device(blocks, cache))
    else:
        reference_scatter_blocks(staging, cache, blocks)


def _check_blocks(name: str, cache: Tensor) -> None:
    if cache.ndim < 2 or len(cache) == 0 or not cache[0].is_contiguous():
        raise ShapeError(
            f"{name} has shape {list(cache.shape)} and strides {list(cache.stride())}: "
            f"must be [num_blocks, ...] with contiguous blocks"
        )


def _block_ids(name: str, block_ids: Int64Array | Tensor, cache: Tensor, num_copies: int | None = None) -> Int64Array:
    """Check block ids against the cache; `num_copies` is how many there must be."""
    blocks = index_array(name, block_ids, np.int64, (num_copies,))
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= len(cache)):
        raise ShapeError(f"{name} has blocks {blocks.min()} to {blocks.max()}: must be 0 to {len(cache) - 1}")
    return blocks


def _on_device(blocks: Int64Array, cache: Tensor) -> Tensor:
    return torch.from_numpy(blocks).to(cache.device)


def _check_staged(cache: Tensor, block_ids: Int64Array | Tensor, staging: Tensor) -> Int64Array:
    """Check the arguments of a gather or scatter; return the block ids."""
    _check_blocks("cache", cache)
    blocks = _block_ids("block_ids", block_ids, cache)
    if staging.shape != (len(blocks), *cache.shape[1:]):
        raise ShapeError(f"staging has shape {list(staging.shape)}: must be {[len(blocks), *cache.shape[1:]]}")
    if staging.dtype != cache.dtype or staging.device != cache.device:
        raise ShapeError(
            f"staging is {staging.dtype} on {staging.device}, the cache {cache.dtype} on {cache.device}: must agree"
        )
    if not staging.is_contiguous():
        raise ShapeError(f"staging has strides {list(staging.stride())}: must be contiguous (Tensor.contiguous)")
    return blocks
