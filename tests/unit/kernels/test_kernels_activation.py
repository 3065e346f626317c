"""The gated activation, against torch's own operations."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.activation import gelu_tanh_and_multiply, silu_and_multiply
from kvwatch_kernels.errors import ShapeError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def composite(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def random_rows(num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return (torch.randn(num_rows, 2 * width, generator=generator) * 6).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 5, 16, 33, 64, 1536])
def test_silu_of_the_gate_times_up_equals_torchs(width: int, dtype: torch.dtype) -> None:
    gate_up = random_rows(5, width, dtype)
    before = gate_up.clone()

    gated = silu_and_multiply(gate_up)

    tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(gated, composite(before), rtol=tolerance, atol=1e-30)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 33, 2048])
def test_gelu_of_the_gate_times_up_equals_torchs(width: int, dtype: torch.dtype) -> None:
    gate_up = random_rows(5, width, dtype)

    gated = gelu_tanh_and_multiply(gate_up)

    gate, up = gate_up.chunk(2, dim=-1)
    expected = functional.gelu(gate, approximate="tanh") * up
    # torch subtracts nearly equal numbers where the gate is negative: what is left has an absolute error.
    tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(gated, expected, rtol=tolerance, atol=2e-5 if dtype == torch.float32 else 1e-3)


def test_gelu_is_right_for_every_size_of_number() -> None:
    gates = torch.cat([torch.linspace(-12, 87, 40_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e4])])

    gated = gelu_tanh_and_multiply(torch.stack((gates, torch.ones_like(gates)), dim=1))[:, 0]

    expected = functional.gelu(gates.double(), approximate="tanh")
    torch.testing.assert_close(gated.double(), expected, rtol=2e-6, atol=1e-9)


def test_bfloat16_rounds_the_activation_before_it_is_multiplied() -> None:
    gate_up = random_rows(200, 160, torch.bfloat16)

    gated = silu_and_multiply(gate_up)

    assert (gated != composite(gate_up)).float().mean() < 1e-3, "only ties between two roundings may differ"
    in_one_go = composite(gate_up.float()).bfloat16()
    assert (gated != in_one_go).float().mean() > 0.05, "rounding once would give something else"


def test_the_activation_is_right_for_every_size_of_number() -> None:
    gates = torch.cat([torch.linspace(-87, 87, 40_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e4])])

    gated = silu_and_multiply(torch.stack((gates, torch.ones_like(gates)), dim=1))[:, 0]

    expected = functional.silu(gates.double())
    torch.testing.assert_close(gated.double(), expected, rtol=4e-7, atol=1e-34)


def test_infinities_and_nan_come_out_as_torchs() -> None:
    gates = torch.tensor([[float("inf")], [float("-inf")], [float("nan")], [-1000.0]])

    gated = silu_and_multiply(torch.cat((gates, torch.ones_like(gates)), dim=1))

    torch.testing.assert_close(gated, functional.silu(gates), equal_nan=True, rtol=0, atol=0)


def test_a_row_has_the_same_bits_alone_and_among_thousands_on_several_threads() -> None:
    gate_up = random_rows(4000, 50)

    together = silu_and_multiply(gate_up)

    for row in (0, 1, 654, 655, 3999):
        assert torch.equal(silu_and_multiply(gate_up[row : row + 1])[0], together[row])


def test_rows_may_be_slices_of_wider_ones() -> None:
    wide = torch.randn(6, 100)

    assert torch.equal(silu_and_multiply(wide[:, 3:77]), silu_and_multiply(wide[:, 3:77].contiguous()))


def test_no_rows_give_no_rows() -> None:
    assert silu_and_multiply(torch.zeros(0, 20)).shape == (0, 10)


@pytest.mark.parametrize(
    ("message", "gate_up"),
    [
        ("gate_up has 5 columns: must be even", torch.zeros(2, 5)),
        ("gate_up has shape [2, 3, 4]: must be [num_rows, width]", torch.zeros(2, 3, 4)),
        ("gate_up has dtype torch.int32: must", torch.zeros(2, 4, dtype=torch.int32)),
        ("gate_up has stride 2 in its last dim: must be 1", torch.zeros(4, 2).t()),
    ],
)
def test_arguments_that_do_not_fit_are_named(message: str, gate_up: Tensor) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        silu_and_multiply(gate_up)
