"""The compiled linear layer against torch: any size, both weight dtypes, the same bits for any batch."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.event import install_recorder
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.cpu.pairs import multiplies_pairs
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.linear import PackedWeight, linear, pack_weight

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_layer(
    out_features: int, in_features: int, dtype: torch.dtype, *, has_bias: bool = True
) -> tuple[PackedWeight, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(out_features * 10_007 + in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    return pack_weight(weight, bias), weight, bias


def make_rows(num_rows: int, in_features: int) -> Tensor:
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(num_rows))


def assert_is_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with float64; the tolerance is relative to what was summed up."""
    truth = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    size = functional.linear(x.double().abs(), weight.double().abs()) + 1

    assert y.dtype == torch.float32
    assert y.shape == truth.shape
    assert y.is_contiguous()
    assert ((y.double() - truth).abs() / size).max() < 5e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [*range(1, 66), 200, 700])
def test_any_number_of_rows_gives_the_product(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    packed, weight, bias = make_layer(77, 133, dtype, has_bias=has_bias)
    x = make_rows(num_rows, 133)

    assert_is_product(linear(x, packed), x, weight, bias)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 130),
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 200),
    num_threads=st.integers(1, 3),
)
def test_any_size_on_any_number_of_threads_gives_the_product(
    dtype: torch.dtype, num_rows: int, in_features: int, out_features: int, num_threads: int
) -> None:
    packed, weight, bias = make_layer(out_features, in_features, dtype)
    x = make_rows(num_rows, in_features)
    torch.set_num_threads(num_threads)

    assert_is_product(linear(x, packed), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_longer_than_a_block_of_x_give_the_product(dtype: torch.dtype) -> None:
    packed, weight, bias = make_layer(40, 9000, dtype)
    x = make_rows(150, 9000)

    assert_is_product(linear(x, packed), x, weight, bias)


def test_a_bfloat16_weight_gives_the_bits_of_the_same_weight_in_float32() -> None:
    packed, weight, bias = make_layer(100, 96, torch.bfloat16)
    assert bias is not None
    widened = pack_weight(weight.float(), bias.float())

    for num_rows in (1, 12, 13, 48, 49, 300):
        x = make_rows(num_rows, 96)
        assert torch.equal(linear(x, packed), linear(x, widened)), num_rows


def test_every_finite_bfloat16_is_widened_exactly() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[values.isfinite()].view(-1, 1)
    packed = pack_weight(values)

    for num_rows in (1, 60):
        assert torch.equal(linear(torch.ones(num_rows, 1), packed)[-1], values.float()[:, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    packed, _, _ = make_layer(90, 576, dtype)
    x = make_rows(400, 576)
    whole = linear(x, packed)

    for num_rows in (*range(1, 30), 48, 49, 50, 399):
        assert torch.equal(linear(x[-num_rows:], packed), whole[-num_rows:]), num_rows


@pytest.mark.parametrize("num_rows", [5, 300])
def test_threads_change_no_bit(num_rows: int) -> None:
    packed, _, _ = make_layer(300, 200, torch.bfloat16)
    x = make_rows(num_rows, 200)
    results = []
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        results.append(linear(x, packed))

    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("num_rows", [1, 30, 70])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_reaches_its_row_and_no_other(num_rows: int, value: float) -> None:
    packed, weight, _ = make_layer(70, 40, torch.float32, has_bias=False)
    x = make_rows(num_rows, 40)
    x[num_rows // 2, 7] = value

    y = linear(x, packed)

    torch.testing.assert_close(y, functional.linear(x, weight), equal_nan=True, rtol=1e-4, atol=1e-4)
    assert not y[num_rows // 2].isfinite().any()
    assert y.isfinite().all(dim=1).sum() == num_rows - 1


def test_a_weight_that_is_not_finite_reaches_its_output_and_no_other() -> None:
    _, weight, _ = make_layer(70, 40, torch.bfloat16, has_bias=False)
    weight[33, 5] = float("nan")
    for num_rows in (1, 70):
        y = linear(make_rows(num_rows, 40), pack_weight(weight))

        assert y[:, 33].isnan().all()
        assert y.isnan().sum() == num_rows


def test_rows_may_lie_apart_but_their_elements_may_not() -> None:
    packed, weight, bias = make_layer(50, 30, torch.float32)
    x = make_rows(9, 100)

    assert_is_product(linear(x[:, 20:50], packed), x[:, 20:50], weight, bias)
    with pytest.raises(ShapeError, match="x has stride 9 in its last dim: must be 1"):
        linear(x.t().contiguous().t()[:, :30], packed)


def test_no_rows_give_no_rows() -> None:
    packed, _, _ = make_layer(50, 30, torch.float32)

    assert linear(torch.zeros(0, 30), packed).shape == (0, 50)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 31), r"x has shape \[3, 31\]: must be \[num_rows, 30\]"),
        (torch.zeros(30), r"x has shape \[30\]: must be \[num_rows, 30\]"),
        (torch.zeros(3, 30, dtype=torch.bfloat16), "x is torch.bfloat16 on cpu: must be torch.float32 on a CPU"),
        (torch.zeros(3, 30, device="meta"), "x is torch.float32 on meta: must be torch.float32 on a CPU"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(x: Tensor, message: str) -> None:
    packed, _, _ = make_layer(50, 30, torch.float32)

    with pytest.raises(ShapeError, match=message):
        linear(x, packed)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(5), None, r"weight has shape \[5\]: must be \[out_features, in_features\]"),
        (torch.zeros(5, 0), None, r"weight has shape \[5, 0\]"),
        (torch.zeros(5, 4, dtype=torch.float16), None, "weight is torch.float16 on cpu: must be float32 or bfloat16"),
        (torch.zeros(5, 4), torch.zeros(4), r"bias has shape \[4\]: must be \[5\]"),
        (torch.zeros(5, 4), torch.zeros(5, dtype=torch.float64), "bias is torch.float64 on cpu"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused(weight: Tensor, bias: Tensor | None, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        pack_weight(weight, bias)


def test_its_memory_is_that_of_whole_panels_in_the_weights_dtype() -> None:
    packed, _, _ = make_layer(33, 10, torch.bfloat16)

    assert packed.num_bytes == 64 * 10 * 2 + 64 * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_call_compiles_what_every_size_needs(dtype: torch.dtype) -> None:
    packed, _, _ = make_layer(33, 10, dtype)
    linear(make_rows(1, 10), packed)

    with install_recorder("numba:compile") as recorder:
        linear(make_rows(500, 10), packed)
        other, _, _ = make_layer(700, 90, dtype)
        linear(make_rows(7, 90), other)

    assert recorder.buffer == []


# ---------------------------------------------------------------------------- bfloat16 with bfloat16

paired = pytest.mark.skipif(not multiplies_pairs(), reason="this processor has no AVX512-BF16")


def assert_is_rounded_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with float64: one rounding to bfloat16, and float32's errors of the sum."""
    truth = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    size = functional.linear(x.double().abs(), weight.double().abs()) + 1

    assert y.dtype == torch.bfloat16
    assert y.shape == truth.shape
    assert y.is_contiguous()
    assert ((y.double() - truth).abs() <= 2.0**-8 * truth.abs() + 1e-6 * size).all()


@paired
@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.integers(1, 130),
    half_features=st.integers(1, 150),
    out_features=st.integers(1, 200),
    num_threads=st.integers(1, 3),
    has_bias=st.booleans(),
)
def test_pairs_of_any_size_give_the_product(
    num_rows: int, half_features: int, out_features: int, num_threads: int, has_bias: bool
) -> None:
    _, weight, bias = make_layer(out_features, 2 * half_features, torch.bfloat16, has_bias=has_bias)
    packed = pack_weight(weight, bias, torch.bfloat16)
    x = make_rows(num_rows, 2 * half_features).bfloat16()
    torch.set_num_threads(num_threads)

    assert_is_rounded_product(linear(x, packed), x, weight, bias)


@paired
def test_pairs_in_blocks_of_long_rows_give_the_product() -> None:
    _, weight, bias = make_layer(70, 30_000, torch.bfloat16)
    packed = pack_weight(weight, bias, torch.bfloat16)
    x = make_rows(100, 30_000).bfloat16()

    assert_is_rounded_product(linear(x, packed), x, weight, bias)


@paired
def test_a_row_of_pairs_has_the_same_bits_in_any_batch_and_on_any_number_of_threads() -> None:
    _, weight, bias = make_layer(90, 576, torch.bfloat16)
    packed = pack_weight(weight, bias, torch.bfloat16)
    x = make_rows(400, 576).bfloat16()
    whole = linear(x, packed)

    for num_rows in (*range(1, 30), 48, 49, 50, 399):
        torch.set_num_threads(1 + num_rows % 3)
        assert torch.equal(linear(x[-num_rows:], packed), whole[-num_rows:]), num_rows


@paired
def test_rows_of_pairs_may_lie_anywhere() -> None:
    _, weight, bias = make_layer(40, 64, torch.bfloat16)
    packed = pack_weight(weight, bias, torch.bfloat16)
    wide = make_rows(20, 131).bfloat16()

    for first in (0, 1, 2, 3):
        x = wide[:, first : first + 64]
        assert torch.equal(linear(x, packed), linear(x.contiguous(), packed)), first


@paired
def test_a_sum_of_exact_products_is_exact() -> None:
    """Small integers: every product and every sum is exact, so only a wrong pairing of features could change it."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(-3, 4, (65, 100), generator=generator).bfloat16()
    x = torch.randint(-3, 4, (29, 100), generator=generator).bfloat16()
    packed = pack_weight(weight, None, torch.bfloat16)

    truth = x.double() @ weight.double().T
    exact = truth.abs() <= 256
    assert exact.all()
    assert torch.equal(linear(x, packed).double(), truth)


@paired
def test_what_is_not_made_for_pairs_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"weight is torch.bfloat16\[4, 3\]: must be bfloat16 with an even number"):
        pack_weight(torch.zeros(4, 3, dtype=torch.bfloat16), None, torch.bfloat16)
    with pytest.raises(ShapeError, match=r"weight is torch.float32\[4, 2\]: must be bfloat16"):
        pack_weight(torch.zeros(4, 2), None, torch.bfloat16)
    packed = pack_weight(torch.zeros(4, 2, dtype=torch.bfloat16), None, torch.bfloat16)
    with pytest.raises(ShapeError, match=r"x is torch\.float32 on cpu: must be torch\.bfloat16 on a CPU"):
        linear(torch.zeros(1, 2), packed)
    with pytest.raises(ShapeError, match=r"dtype is torch\.float16: must be float32"):
        pack_weight(torch.zeros(4, 2), None, torch.float16)
