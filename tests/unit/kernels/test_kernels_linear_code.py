"""The machine code of the linear layer's products keeps its sums in registers, for every number of rows."""

import re
from collections.abc import Iterator

import numba
import pytest
import torch
from numba import types

from kvwatch_kernels.cpu.linear_product import MAX_ROWS, multiply_panel
from kvwatch_kernels.cpu.memory import f32_at
from kvwatch_kernels.linear import is_fast


def product_code() -> str:
    """Compile all products of a float32 panel; return the assembly."""

    def run(address: int, rows: int) -> None:
        multiply_panel(
            f32_at(address), rows, f32_at(address), rows, f32_at(address), f32_at(address), rows, address, rows, rows
        )

    compiled = numba.cfunc(types.void(types.int64, types.int64))(run)
    code: str = compiled._library.get_asm_str()
    return code


def innermost_loops(code: str) -> Iterator[list[str]]:
    """The instructions of each loop that has no jump inside but its own."""
    body: list[str] = []
    label = None
    for line in code.splitlines():
        start = re.match(r"(\.\w+):", line)
        jump = re.match(r"\s+j\w+\s+(\.\w+)", line)
        if start:
            label, body = start[1], []
        elif jump and jump[1] == label:
            yield body
        elif jump:
            label = None
        else:
            body.append(line)


@pytest.mark.skipif(not is_fast(torch.device("cpu")), reason="this CPU has no AVX-512")
def test_no_loop_of_a_product_spills_a_vector() -> None:
    sums = {}
    for body in innermost_loops(product_code()):
        products = [line for line in body if "vfmadd" in line]
        if products:
            sums[len(products)] = [line for line in body if re.search(r"%r[sb]p.*mm\d|mm\d.*%r[sb]p", line)]

    assert set(sums) == {2 * rows for rows in range(1, MAX_ROWS + 1)}
    assert sums == {count: [] for count in sums}
