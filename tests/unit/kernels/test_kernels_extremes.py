"""Arguments at the ends of what the contract allows, and just beyond."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvwatch_kernels.block_copy import block_copy, scatter_blocks
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.paged_attention import paged_attention
from kvwatch_kernels.rms_norm import rms_norm
from kvwatch_kernels.rotary import rotate_and_store

CACHE = torch.zeros(4, 1, 2, 8)
SHARED = torch.zeros(1, 1, 2, 8).expand(4, 1, 2, 8)
ROWS = torch.zeros(3, 8)
SHARED_ROWS = torch.zeros(1, 8).expand(3, 8)
KEY = torch.zeros(1, 1, 8)
ANGLES = torch.zeros(1, 4)
ONE, TWO = np.array([1]), np.array([2])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("key_cache", lambda: kv_store(KEY, KEY, SHARED, CACHE, ONE)),
        ("value_cache", lambda: kv_store(KEY, KEY, CACHE, SHARED, ONE)),
        ("key_cache", lambda: rotate_and_store(KEY.repeat(1, 3, 1), ANGLES, ANGLES, SHARED, CACHE, ONE)),
        ("qkv", lambda: rotate_and_store(KEY.expand(1, 3, 8), ANGLES, ANGLES, CACHE, CACHE, ONE)),
        ("cache", lambda: block_copy(SHARED, ONE, TWO)),
        ("cache", lambda: scatter_blocks(CACHE[:1], SHARED, ONE)),
        ("x", lambda: rms_norm(SHARED_ROWS, ROWS[0], 1e-5, added=ROWS)),
    ],
)
def test_what_is_written_may_not_be_one_place_under_several_names(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ShapeError, match=rf"{name} has strides \[.*\], but is written: must be none 0"):
        call()


def test_what_is_only_read_may_be_one_place_under_several_names() -> None:
    assert torch.equal(rms_norm(SHARED_ROWS + 1, ROWS[0] + 1, 0.0), torch.ones(3, 8))
    assert torch.equal(rms_norm((ROWS[:1] + 1).expand(3, 8), ROWS[0] + 1, 0.0), torch.ones(3, 8))


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf"), 1e300])
def test_a_norms_eps_is_refused_where_float32_has_no_place_for_it(eps: float) -> None:
    with pytest.raises(ShapeError, match=r"eps is .*: must be from 0 to"):
        rms_norm(ROWS, ROWS[0], eps)
    with pytest.raises(ShapeError, match=r"eps is .*: must be from 0 to"):
        rotate_and_store(KEY.repeat(1, 3, 1), ANGLES, ANGLES, CACHE, CACHE, ONE, eps=eps)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_the_longest_context_that_32_bits_can_say_is_attended_to(num_queries: int) -> None:
    """Positions end where 32 bits do; every entry of the block table names the same block."""
    block_size, window = 2**20, 100
    generator = torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, 1, 1, block_size, 4, generator=generator)
    query = torch.randn(num_queries, 1, 4, generator=generator)
    context_len = 2**31 - 1

    out = paged_attention(
        query,
        keys,
        values,
        block_tables=np.zeros((1, 2048), dtype=np.int32),
        query_starts=np.array([0, num_queries], dtype=np.int32),
        context_lens=np.array([context_len], dtype=np.int32),
        scale=0.5,
        sliding_window=window,
        alibi_slopes=torch.tensor([0.01]),
    )

    for row in range(num_queries):
        last = block_size - 2 - (num_queries - 1 - row)  # the last token lies one slot before the block's end
        seen = slice(last - window + 1, last + 1)
        scores = keys[0, 0, seen].double() @ query[row, 0].double() * 0.5 + 0.01 * torch.arange(1 - window, 1)
        truth = scores.softmax(dim=0) @ values[0, 0, seen].double()
        torch.testing.assert_close(out[row, 0].double(), truth, rtol=1e-5, atol=1e-6)
