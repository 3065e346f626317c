"""Brings a step's arrays to the device: laid out in one pinned buffer, carried over by one copy.

    buffer    | token_ids | positions | sampled | slot_mapping | query_starts | context_lens | block_tables |
                i64, max_tokens each                             i32: max_seqs + 1, max_seqs, max_seqs x max_blocks

Slot mapping and block tables are there for each KV group. Each array has its place for good, so that a captured graph
finds the next step's numbers where the last one's were. The tables come last: what is behind the last row in use of the
last of them is not carried over. Knows nothing of models and kernels.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvwatch_engine.contracts.block import NULL_BLOCK, PAD_SLOT
from kvwatch_engine.contracts.step import Int64Array, StepInput

_ALIGNMENT: Final = 64
_NUM_HOST_BUFFERS: Final = 2
"""While one is being carried over, the next step is written to the other."""


_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StagingSizes:
    """How much room a staging area has."""

    max_tokens: int
    max_seqs: int
    max_blocks: int
    """Blocks of the longest block table."""
    num_groups: int = 1
    """KV groups."""

    def holds(self, step: StepInput) -> bool:
        """Whether a step has room."""
        num_seqs, num_blocks = step.block_tables.shape
        return step.num_tokens <= self.max_tokens and num_seqs <= self.max_seqs and num_blocks <= self.max_blocks


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """Where a step's tokens lie in one KV group, on the device."""

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    """i32[num_seqs, max_blocks of the staging area], contiguous."""


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step's arrays on the device, as `StepInput` describes them. Valid until the next step is staged."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[StagedGroup, ...]
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    sampled: torch.Tensor
    """i64[num_sampled]: packed tokens whose logits are wanted."""


class StepStaging:
    """A staging area. Engine thread only.

    On a CPU the same code runs without pinned memory and events; it is then only good for tests.
    """

    def __init__(self, device: torch.device, sizes: StagingSizes) -> None:
        """Allocate pinned and device memory for steps of these sizes."""
        self.sizes: Final = sizes
        self._is_cuda = device.type == "cuda"
        tokens: tuple[type[np.signedinteger], int] = (np.int64, sizes.max_tokens)
        arrays: tuple[tuple[str, type[np.signedinteger], int], ...] = (
            *(("token_ids", *tokens), ("positions", *tokens), ("sampled", *tokens)),
            *((f"slot_mapping_{number}", *tokens) for number in range(sizes.num_groups)),
            ("query_starts", np.int32, sizes.max_seqs + 1),
            ("context_lens", np.int32, sizes.max_seqs),
            *((_tables(number), np.int32, sizes.max_seqs * sizes.max_blocks) for number in range(sizes.num_groups)),
        )
        self._places: dict[str, tuple[int, type[np.signedinteger], int]] = {}
        num_bytes = 0
        for name, dtype, length in arrays:
            self._places[name] = (num_bytes, dtype, length)
            num_bytes += -(-length * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._device_buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._host_buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._carried: list[torch.cuda.Event | None] = [None] * _NUM_HOST_BUFFERS
        self._turn = 0

    def stage(self, step: StepInput, sampled: Int64Array, num_rows: int | None = None) -> StagedStep:
        """Carry a step's arrays to the device, in the order of the current stream; does not wait.

        Args:
            step: has room, see `StagingSizes.holds`.
            sampled: i64[at most max_tokens], packed tokens whose logits are wanted.
            num_rows: for a step of single-token sequences: pad it to so many of them, at most `max_seqs` and
                `max_tokens`. A padding row is token 0 at position 0, which sees one slot of the null block and is
                stored nowhere; `sampled` is padded to the same number with token 0.

        Returns:
            Views of the staging area.
        """
        num_tokens, num_seqs, num_sampled = step.num_tokens, len(step.context_lens), len(sampled)
        rows, tokens, wanted = num_seqs, num_tokens, num_sampled
        if num_rows is not None:
            assert num_seqs == num_tokens <= num_rows, "only single-token sequences can be padded"
            rows = tokens = wanted = num_rows
        host = self._next_host_buffer()
        self._write(host, "token_ids", step.token_ids, tokens, 0)
        self._write(host, "positions", step.positions, tokens, 0)
        self._write(host, "sampled", sampled, wanted, 0)
        starts = self._host_array(host, "query_starts")
        starts[: num_seqs + 1] = step.query_starts
        starts[num_seqs + 1 : rows + 1] = np.arange(num_seqs + 1, rows + 1)
        self._write(host, "context_lens", step.context_lens, rows, 1)
        for number, group in enumerate(step.groups):
            self._write(host, f"slot_mapping_{number}", group.slot_mapping, tokens, PAD_SLOT)
            tables = self._host_array(host, _tables(number)).reshape(-1, self.sizes.max_blocks)[:rows]
            tables[:num_seqs, : group.block_tables.shape[1]] = group.block_tables
            tables[:num_seqs, group.block_tables.shape[1] :] = NULL_BLOCK
            tables[num_seqs:] = NULL_BLOCK
        self._carry_over(host, rows)
        return self.views(tokens, rows, wanted)

    def views(self, num_tokens: int, num_seqs: int, num_sampled: int) -> StagedStep:
        """Return the places on the device where a step of these sizes is put."""
        return StagedStep(
            token_ids=self._device_array("token_ids", num_tokens),
            positions=self._device_array("positions", num_tokens),
            groups=tuple(
                StagedGroup(
                    self._device_array(f"slot_mapping_{number}", num_tokens),
                    self._device_array(_tables(number), num_seqs * self.sizes.max_blocks).view(num_seqs, -1),
                )
                for number in range(self.sizes.num_groups)
            ),
            query_starts=self._device_array("query_starts", num_seqs + 1),
            context_lens=self._device_array("context_lens", num_seqs),
            sampled=self._device_array("sampled", num_sampled),
        )

    def _next_host_buffer(self) -> torch.Tensor:
        """Return the buffer whose turn it is, once what it held before has left it."""
        self._turn = (self._turn + 1) % _NUM_HOST_BUFFERS
        carried = self._carried[self._turn]
        if carried is not None:
            carried.synchronize()
        return self._host_buffers[self._turn]

    def _carry_over(self, host: torch.Tensor, num_rows: int) -> None:
        begin, dtype, _ = self._places[_tables(self.sizes.num_groups - 1)]
        end = begin + num_rows * self.sizes.max_blocks * np.dtype(dtype).itemsize
        self._device_buffer[:end].copy_(host[:end], non_blocking=True)
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._carried[self._turn] = event

    def _write(self, host: torch.Tensor, name: str, values: _Array, length: int, padding: int) -> None:
        array = self._host_array(host, name)
        array[: len(values)] = values
        array[len(values) : length] = padding

    def _host_array(self, host: torch.Tensor, name: str) -> _Array:
        begin, dtype, length = self._places[name]
        return host.numpy()[begin : begin + length * np.dtype(dtype).itemsize].view(dtype)

    def _device_array(self, name: str, length: int) -> torch.Tensor:
        begin, dtype, _ = self._places[name]
        end = begin + length * np.dtype(dtype).itemsize
        return self._device_buffer[begin:end].view(torch.int64 if dtype is np.int64 else torch.int32)


def _tables(group: int) -> str:
    """Return the name of a KV group's block tables among the arrays."""
    return f"block_tables_{group}"
