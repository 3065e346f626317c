"""The machine code of the products keeps its sums in registers, for every number of rows."""

import re
from collections.abc import Callable, Iterator

import numba
import pytest
import torch
from numba import types

from kvwatch_kernels.cpu import micro_gemm
from kvwatch_kernels.cpu.linear_product import MAX_ROWS, PANEL, multiply_panel
from kvwatch_kernels.cpu.memory import f32_at, i64_at
from kvwatch_kernels.cpu.registers import Registers, host_registers, product_parts
from kvwatch_kernels.cpu.vectors import LANES
from kvwatch_kernels.linear import is_fast


def linear_code() -> str:
    """Compile all products of a float32 panel; return the assembly."""

    def run(address: int, rows: int) -> None:
        multiply_panel(
            f32_at(address), rows, f32_at(address), rows, f32_at(address), f32_at(address), rows, address, rows, rows
        )

    return assembly(run)


def attention_code() -> str:
    """Compile attention's products of float32; return the assembly."""

    def run(address: int, rows: int) -> None:
        f32 = f32_at(address)
        micro_gemm.multiply(f32, rows, f32, rows, rows, f32, rows, rows)
        micro_gemm.multiply_onto_narrow(f32, rows, f32, rows, rows, f32, rows, f32, rows)
        micro_gemm.multiply_onto_wide(f32, rows, f32, rows, rows, f32, rows, f32, rows)
        micro_gemm.multiply_onto_in_place(
            f32, rows, f32, i64_at(address), i64_at(address), rows, rows, f32, rows, f32, rows
        )

    return assembly(run)


def assembly(run: Callable[[int, int], None]) -> str:
    """Compile a function; return the assembly."""
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


def spills(body: list[str]) -> list[str]:
    """The instructions that move a vector from or to the stack."""
    return [line for line in body if re.search(r"%rsp.*mm\d|mm\d.*%rsp", line)]


@pytest.mark.skipif(not is_fast(torch.device("cpu")), reason="this CPU has no AVX2")
def test_no_loop_of_a_linear_product_spills_a_vector() -> None:
    registers = host_registers()
    expected = {
        len(part.rows) * len(part.vectors) * registers.per_vector
        for rows in range(1, MAX_ROWS + 1)
        for part in product_parts(rows, PANEL // LANES, registers)
    }

    found = {}
    for body in innermost_loops(linear_code()):
        products = [line for line in body if "vfmadd" in line]
        if products:
            found[len(products)] = spills(body)

    assert found == {count: [] for count in expected}


@pytest.mark.skipif(not is_fast(torch.device("cpu")), reason="this CPU has no AVX2")
def test_no_loop_of_attentions_products_spills_a_vector() -> None:
    bodies = [body for body in innermost_loops(attention_code()) if any("vfmadd" in line for line in body)]

    assert len(bodies) >= 3 * micro_gemm.MAX_ROWS
    assert [spills(body) for body in bodies] == [[]] * len(bodies)


@pytest.mark.parametrize("registers", [Registers(32, 512), Registers(16, 256), Registers(32, 128), Registers(16, 128)])
@pytest.mark.parametrize("vectors", [1, 2, 4])
@pytest.mark.parametrize("rows", range(1, 13))
def test_parts_cover_a_product_once_and_fit(rows: int, vectors: int, registers: Registers) -> None:
    parts = product_parts(rows, vectors, registers)

    covered = [(row, vector) for part in parts for row in part.rows for vector in part.vectors]
    assert sorted(covered) == [(row, vector) for row in range(rows) for vector in range(vectors)]
    for part in parts:
        width = len(part.vectors) * registers.per_vector
        strip = width if len(part.rows) > 1 else 0  # a single row reads it from memory
        assert len(part.rows) * width + strip + 1 <= registers.number


@pytest.mark.parametrize(
    ("rows", "vectors", "registers", "sizes"),
    [
        (12, 2, Registers(32, 512), [(12, 2)]),
        (4, 4, Registers(32, 512), [(4, 4)]),
        (12, 2, Registers(16, 256), [(6, 1)] * 4),
        (8, 2, Registers(16, 256), [(2, 2)] * 4),
        (4, 4, Registers(16, 256), [(2, 2)] * 4),
        (2, 4, Registers(16, 256), [(2, 2)] * 2),
        (1, 4, Registers(16, 256), [(1, 4)]),
    ],
)
def test_parts_are_few(rows: int, vectors: int, registers: Registers, sizes: list[tuple[int, int]]) -> None:
    parts = product_parts(rows, vectors, registers)

    assert [(len(part.rows), len(part.vectors)) for part in parts] == sizes
