"""Copy whole blocks of the paged cache (copy-on-write, relocation)."""

import numpy as np
from torch import Tensor

from kvwatch_kernels.cpu.copy import compiled_block_copy
from kvwatch_kernels.dims import Int64Array, index_array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_block_copy


def block_copy(cache: Tensor, sources: Int64Array | Tensor, destinations: Int64Array | Tensor) -> None:
    """Copy block `sources[i]` over block `destinations[i]`, for all i at once.

    Args:
        cache: T[num_blocks, ...], of any dtype, each block contiguous; written.
        sources: i64[num_copies]. Block ids; one may occur several times.
        destinations: i64[num_copies]. Block ids; none occurs twice or among the sources, so that order does not matter.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    if cache.ndim < 2 or len(cache) == 0 or not cache[0].is_contiguous():
        raise ShapeError(
            f"cache has shape {list(cache.shape)} and strides {list(cache.stride())}: "
            f"must be [num_blocks, ...] with contiguous blocks"
        )
    from_blocks = index_array("sources", sources, np.int64, (None,))
    to_blocks = index_array("destinations", destinations, np.int64, (len(from_blocks),))
    if len(from_blocks) == 0:
        return
    for name, blocks in (("sources", from_blocks), ("destinations", to_blocks)):
        if blocks.min() < 0 or blocks.max() >= len(cache):
            raise ShapeError(f"{name} has blocks {blocks.min()} to {blocks.max()}: must be 0 to {len(cache) - 1}")
    if len(np.unique(to_blocks)) != len(to_blocks) or np.isin(to_blocks, from_blocks).any():
        raise ShapeError(
            f"destinations is {to_blocks.tolist()}: none may occur twice or among sources {from_blocks.tolist()}"
        )
    copy = compiled_block_copy if cache.device.type == "cpu" else reference_block_copy
    copy(cache, from_blocks, to_blocks)
