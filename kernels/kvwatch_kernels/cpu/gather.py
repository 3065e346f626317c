"""Compiled copying of chosen rows: a table's rows by number, one after the other."""

from functools import cache

from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.call import KernelCall
from kvwatch_kernels.cpu.compiled import entry_point, inlined, source_digest
from kvwatch_kernels.cpu.memory import Pointer, copy_bytes, i64_at, read, write
from kvwatch_kernels.cpu.rows import AWAKE_ELEMENTS_PER_ITEM, FIRST_ARGUMENT, rows_call, take_rows

# Bytes of a row; the table's address, row stride in bytes and number of rows; address of i64[num_rows], the numbers;
# address and row stride of the output; a number that the table does not have and 1, once there was one.
(
    _ROW_BYTES,
    _TABLE,
    _TABLE_STRIDE,
    _TABLE_ROWS,
    GATHER_INDICES,
    _OUT,
    _OUT_STRIDE,
    GATHER_FAULT_VALUE,
    GATHER_FAULT,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 9)


@inlined
def gather_rows(params: Pointer) -> None:
    """What every thread does: copy rows until none is left. In place of a row that does not exist row 0 is copied."""
    indices = i64_at(read(params, GATHER_INDICES))
    first, end = take_rows(params)
    while first < end:
        for row in range(first, end):
            index = read(indices, row)
            if index < 0 or index >= read(params, _TABLE_ROWS):
                write(params, GATHER_FAULT_VALUE, index)
                write(params, GATHER_FAULT, 1)
                index = 0
            source = read(params, _TABLE) + index * read(params, _TABLE_STRIDE)
            copy_bytes(read(params, _OUT) + row * read(params, _OUT_STRIDE), source, read(params, _ROW_BYTES))
        first, end = take_rows(params)


@cache
def gather_code() -> int:
    """Address of the compiled copying (compiled, or loaded, once in a process)."""
    digest = source_digest()

    def run(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        gather_rows(i64_at(address))

    return entry_point(types.void(types.int64), run)


def gather_call(table: Tensor, out: Tensor) -> KernelCall:
    """Lay out copying of rows; `GATHER_INDICES` is left to be filled in.

    Args:
        table: T[num_table_rows, width], CPU, last dim contiguous, at least one row.
        out: T[num_rows, width], last dim contiguous; written.
    """
    num_rows, width = out.shape
    size = out.element_size()
    arguments = (
        *(width * size, table.data_ptr(), table.stride(0) * size, len(table)),
        *(0, out.data_ptr(), out.stride(0) * size),
        *(0, 0),
    )
    return rows_call(gather_code(), num_rows, width, arguments, AWAKE_ELEMENTS_PER_ITEM)
