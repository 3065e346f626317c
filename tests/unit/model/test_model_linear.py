"""Packed linear layers compute the plain product, and keep a checkpoint's dtype where that is free."""

import pytest
import torch
from torch.nn import functional

from kvwatch_engine.model.linear import Linear, stored_dtype
from kvwatch_kernels.linear import is_fast

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 16, 70])
def test_a_packed_layer_equals_the_plain_product(dtype: torch.dtype, has_bias: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    weight = torch.randn(50, 36, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_tokens, 36, generator=generator).to(dtype)

    y = Linear(weight, bias, dtype=dtype)(x)

    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert (y.dtype, y.shape) == (dtype, (num_tokens, 50))
    torch.testing.assert_close(y, functional.linear(x, weight, bias), atol=tolerance, rtol=0.01)


@pytest.mark.parametrize("num_tokens", [1, 16, 70])
def test_a_bfloat16_weight_computes_in_float32_what_it_would_if_loaded_as_float32(num_tokens: int) -> None:
    weight, bias = torch.randn(50, 36).bfloat16(), torch.randn(50).bfloat16()
    x = torch.randn(num_tokens, 36)

    y = Linear(weight, bias, dtype=torch.float32)(x)

    assert torch.equal(y, Linear(weight.float(), bias.float(), dtype=torch.float32)(x))


def test_its_size_counts_weight_and_bias() -> None:
    assert Linear(torch.zeros(5, 4), torch.zeros(5), dtype=torch.float32).num_bytes == 4 * (20 + 5)


@pytest.mark.skipif(not is_fast(CPU), reason="this CPU has no AVX2")
def test_a_bfloat16_weight_stays_that_small() -> None:
    layer = Linear(torch.zeros(5, 4).bfloat16(), torch.zeros(5).bfloat16(), dtype=torch.float32)

    assert layer.num_bytes == 2 * 20 + 4 * 5


@pytest.mark.parametrize(
    ("weight_dtype", "dtype", "expected"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("has_fast", [True, False])
def test_a_weight_is_kept_in_the_smallest_dtype_that_loses_nothing_and_costs_no_time(
    monkeypatch: pytest.MonkeyPatch,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
    expected: torch.dtype,
    has_fast: bool,
) -> None:
    monkeypatch.setattr("kvwatch_kernels.linear.has_fast_linear", lambda: has_fast)

    stored = stored_dtype(torch.zeros(2, 2, dtype=weight_dtype), dtype)

    assert stored == (expected if has_fast else dtype)


def test_without_it_a_bfloat16_weight_gives_the_product_through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvwatch_kernels.linear.has_fast_linear", lambda: False)
    weight, x = torch.randn(50, 36).bfloat16(), torch.randn(3, 36)

    layer = Linear(weight, dtype=torch.float32)

    torch.testing.assert_close(layer(x), functional.linear(x, weight.float()), atol=1e-5, rtol=1e-5)
    assert layer.num_bytes == 4 * 50 * 36


def test_where_onednn_packs_no_bfloat16_the_product_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvwatch_engine.model.linear._onednn_multiplies", lambda _dtype: False)
    weight, bias, x = torch.randn(50, 36).bfloat16(), torch.randn(50).bfloat16(), torch.randn(3, 36).bfloat16()

    layer = Linear(weight, bias, dtype=torch.bfloat16)

    assert torch.equal(layer(x), functional.linear(x, weight, bias))
