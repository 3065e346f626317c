"""RMS norm with the residual sum before it, against torch's own operations."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_rms_norm
from kvwatch_kernels.rms_norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 7, 16, 37, 64, 100, 576, 4096]


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Float32 within 1e-6 of torch; other dtypes may round the other way where the float32 results differ."""
    tolerance = 1e-6 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_normalised_as_torch_does_it(width: int, dtype: torch.dtype) -> None:
    x, weight = random_rows(5, width, dtype=dtype), random_rows(width, dtype=dtype)
    before = x.clone()

    normalised = rms_norm(x, weight, 1e-5)

    assert torch.equal(x, before)
    assert_close(normalised, functional.rms_norm(before, (width,), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_sum_is_kept_and_normalised_as_it_was_rounded(width: int, dtype: torch.dtype) -> None:
    x, weight = random_rows(3, width, dtype=dtype), random_rows(width, dtype=dtype)
    added = random_rows(3, width, dtype=dtype) * 3
    total = x + added

    normalised = rms_norm(x, weight, 1e-6, added=added)

    assert torch.equal(x, total)
    assert_close(normalised, functional.rms_norm(total, (width,), weight, 1e-6))


def test_bfloat16_is_rounded_once_at_the_end() -> None:
    x, weight = random_rows(64, 576, dtype=torch.bfloat16), random_rows(576, dtype=torch.bfloat16)

    normalised = rms_norm(x, weight, 1e-5)

    expected = functional.rms_norm(x.double(), (576,), weight.double(), 1e-5).bfloat16()
    assert (normalised != expected).float().mean() < 1e-3, "only ties between two roundings may differ"


def test_the_reference_does_the_same() -> None:
    x, weight, added = random_rows(4, 40), random_rows(40), random_rows(4, 40)
    other, out = x.clone(), torch.empty(4, 40)

    reference_rms_norm(other, weight, 1e-5, added, out)

    assert_close(rms_norm(x, weight, 1e-5, added=added), out)
    assert torch.equal(x, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_thousands_on_several_threads(dtype: torch.dtype) -> None:
    x, weight = random_rows(3000, 100, dtype=dtype), random_rows(100, dtype=dtype)

    together = rms_norm(x, weight, 1e-5)

    for row in (0, 1, 655, 656, 2999):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


def test_rows_may_be_slices_of_wider_ones_and_nothing_beside_them_changes() -> None:
    wide, added, weight = random_rows(6, 50), random_rows(6, 90), random_rows(37)
    expected = wide[:, 5:42] + added[:, 20:57]
    beside = torch.cat((wide[:, :5], wide[:, 42:]), dim=1)

    normalised = rms_norm(wide[:, 5:42], weight, 1e-5, added=added[:, 20:57])

    assert torch.equal(wide[:, 5:42], expected)
    assert torch.equal(torch.cat((wide[:, :5], wide[:, 42:]), dim=1), beside)
    assert_close(normalised, functional.rms_norm(expected, (37,), weight, 1e-5))


def test_a_nan_makes_its_own_row_nan_only() -> None:
    x = random_rows(3, 48)
    x[1, 47] = float("nan")

    normalised = rms_norm(x, torch.ones(48), 1e-5)

    assert normalised.isnan().any(dim=1).tolist() == [False, True, False]
    assert normalised[1].isnan().all()


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 20), torch.ones(20), 1e-6), torch.zeros(2, 20))


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(torch.zeros(0, 20), torch.ones(20), 1e-6).shape == (0, 20)


@pytest.mark.parametrize(
    ("message", "x", "weight", "added"),
    [
        ("x has shape [4]: must be [num_rows, width]", torch.zeros(4), torch.zeros(4), None),
        ("x has shape [4, 0]: must be [num_rows, width], the width not 0", torch.zeros(4, 0), torch.zeros(0), None),
        ("x has dtype torch.float64: must", torch.zeros(4, 4).double(), torch.zeros(4).double(), None),
        ("x has stride 4 in its last dim: must be 1", torch.zeros(4, 4).t(), torch.zeros(4), None),
        ("weight has shape [5]: must be [4]", torch.zeros(4, 4), torch.zeros(5), None),
        ("weight has dtype torch.bfloat16: must", torch.zeros(4, 4), torch.zeros(4).bfloat16(), None),
        ("added has shape [3, 4]: must be [4, 4]", torch.zeros(4, 4), torch.zeros(4), torch.zeros(3, 4)),
        ("added has dtype torch.float16: must", torch.zeros(4, 4), torch.zeros(4), torch.zeros(4, 4).half()),
    ],
)
def test_arguments_that_do_not_fit_are_named(message: str, x: Tensor, weight: Tensor, added: Tensor | None) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        rms_norm(x, weight, 1e-5, added=added)
