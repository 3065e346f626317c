"""Packed linear layers compute the plain product."""

import pytest
import torch
from torch.nn import functional

from kvwatch_engine.model.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 16, 70])
def test_a_packed_layer_equals_the_plain_product(dtype: torch.dtype, has_bias: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    weight = torch.randn(50, 36, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_tokens, 36, generator=generator).to(dtype)

    y = Linear(weight, bias)(x)

    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert (y.dtype, y.shape) == (dtype, (num_tokens, 50))
    torch.testing.assert_close(y, functional.linear(x, weight, bias), atol=tolerance, rtol=0.01)


def test_its_size_counts_weight_and_bias() -> None:
    assert Linear(torch.zeros(5, 4), torch.zeros(5)).num_bytes == 4 * (20 + 5)
