"""What blocks are read from and written to: memory by block id, whatever else by a key of its own.

A store moves whole blocks between itself and contiguous staging memory. Knows no tier, no owner, no request.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
K_contra = TypeVar("K_contra", contravariant=True)

_ALIGNMENT = 64


class TransferError(Exception):
    """Blocks could not be moved. `reason` is a value of the metric's label; `num_good` blocks came before."""

    def __init__(self, reason: str, num_good: int = 0, error: BaseException | None = None) -> None:
        super().__init__(f"{reason} after {num_good} blocks")
        self.reason = reason
        self.num_good = num_good
        self.error = error


class BlockStore(Protocol[K_contra]):
    """Something that keeps blocks of equal size."""

    def read(self, keys: Sequence[K_contra], out: Bytes) -> None:
        """Copy the blocks named by `keys` to `out`, uint8[len(keys), block_bytes]; on return all are there.

        Raises:
            TransferError: not all could be read; the leading `num_good` are in `out`.
        """
        ...

    def write(self, keys: Sequence[K_contra], data: Bytes) -> None:
        """Copy `data`, uint8[len(keys), block_bytes], over the blocks named by `keys`; on return all are there.

        Raises:
            TransferError: not all could be written; the leading `num_good` were.
        """
        ...


class MemoryStore:
    """Blocks in memory that NumPy can address. One block is touched by one thread at a time."""

    def __init__(self, blocks: Callable[[], Bytes]) -> None:
        """Read and write what `blocks` returns at that moment, uint8[num_blocks, block_bytes]."""
        self._blocks = blocks

    def read(self, keys: Sequence[int], out: Bytes) -> None:
        """Copy blocks to `out`; releases the interpreter while it copies one."""
        blocks = self._blocks()
        for place, block in enumerate(keys):
            np.copyto(out[place], blocks[block])

    def write(self, keys: Sequence[int], data: Bytes) -> None:
        """Copy `data` over blocks; releases the interpreter while it copies one."""
        blocks = self._blocks()
        for place, block in enumerate(keys):
            np.copyto(blocks[block], data[place])


def plain_memory(num_blocks: int, block_bytes: int) -> Bytes:
    """Return zeroed, aligned memory uint8[num_blocks, block_bytes].

    The operating system provides it page by page when it is first written, so that a large tier costs nothing before
    it is used.
    """
    memory = np.zeros(num_blocks * block_bytes + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_blocks * block_bytes].reshape(num_blocks, block_bytes)
