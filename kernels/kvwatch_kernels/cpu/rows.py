"""Kernels that work row by row: how rows are shared out among the threads.

The argument array of such a kernel starts with the three numbers below; its own follow from `FIRST_ARGUMENT` on.
"""

import struct
from array import array
from collections.abc import Sequence

from kvwatch_kernels.cpu.call import KernelCall
from kvwatch_kernels.cpu.compiled import inlined
from kvwatch_kernels.cpu.memory import Pointer, fetch_add, read

NEXT_ITEM, NUM_ROWS, ROWS_PER_ITEM, FIRST_ARGUMENT = range(4)

ELEMENTS_PER_ITEM = 65_536
"""Elements that a thread takes at a time: some ten microseconds. What is less runs on the calling thread alone, since
waking a second one takes as long."""
AWAKE_ELEMENTS_PER_ITEM = 4_096
"""The same where all threads are awake (see `program.py`)."""


@inlined
def take_rows(params: Pointer) -> tuple[int, int]:
    """Take the next rows, first and end; none are left where `first` is not below `end`."""
    first = fetch_add(params, NEXT_ITEM) * read(params, ROWS_PER_ITEM)
    return first, min(first + read(params, ROWS_PER_ITEM), read(params, NUM_ROWS))


def rows_call(
    function: int,
    num_rows: int,
    row_elements: int,
    arguments: Sequence[int],
    elements_per_item: int = ELEMENTS_PER_ITEM,
) -> KernelCall:
    """Lay out the call of a compiled row kernel over all rows.

    Args:
        function: address of `void function(int64_t)`, which takes rows by `take_rows` until none is left.
        num_rows: number of rows.
        row_elements: elements that one row reads, to judge how much work it is.
        arguments: the kernel's own.
        elements_per_item: elements that a thread takes at a time, at least one row.
    """
    rows_per_item = max(1, elements_per_item // row_elements)
    params = array("q", (0, num_rows, rows_per_item, *arguments))
    return KernelCall(function, params, -(-num_rows // rows_per_item))


def float_bits(value: float) -> int:
    """The bits of `value` as float32, to be read by `vectors.float_of_bits`."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
