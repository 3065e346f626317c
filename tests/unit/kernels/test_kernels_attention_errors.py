"""Arguments that break the contract are refused by name, with their value."""

import re

import numpy as np
import pytest
import torch
from kernel_batches import PagedBatch, dense_sequence, paged_batch

from kvwatch_kernels.errors import ShapeError


def refused(message: str, **changed: object) -> None:
    """Assert that a good batch with some arguments changed is refused and nothing is written."""
    batch = paged_batch([dense_sequence(3, 20), dense_sequence(1, 33)])
    out = torch.full_like(batch.query, 7.0)
    window = changed.pop("sliding_window", None)
    out = changed.pop("out", out)  # type: ignore[assignment]
    before = out.clone()

    with pytest.raises(ShapeError, match=re.escape(message)):
        PagedBatch(**{**vars(batch), **changed}).attend(window, out)  # type: ignore[arg-type]

    assert torch.equal(out, before)


CACHE = torch.zeros(6, 2, 16, 64)


def i32(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("query has shape [4, 4]: must be [num_tokens, heads, 64]", {"query": torch.zeros(4, 4)}),
        ("query has shape [4, 4, 32]", {"query": torch.zeros(4, 4, 32)}),
        ("query has 3 heads: must be a multiple of the cache's 2", {"query": torch.zeros(4, 3, 64)}),
        ("query has 0 heads", {"query": torch.zeros(4, 0, 64)}),
        ("query has dtype torch.bfloat16, the cache torch.float32", {"query": torch.zeros(4, 4, 64).bfloat16()}),
        ("query has stride 2 in its last dim: must be 1", {"query": torch.zeros(4, 4, 128)[..., ::2]}),
        ("query is on meta, the cache on cpu", {"query": torch.zeros(4, 4, 64, device="meta")}),
        ("key_cache has shape [2, 16, 64]", {"key_cache": CACHE[0]}),
        ("key_cache has shape [6, 2, 0, 64]", {"key_cache": CACHE[:, :, :0]}),
        ("key_cache has dtype torch.float64", {"key_cache": CACHE.double(), "value_cache": CACHE.double()}),
        (
            "value_cache has shape [5, 2, 16, 64], key_cache [6, 2, 16, 64]",
            {"key_cache": CACHE, "value_cache": CACHE[1:]},
        ),
        ("value_cache has dtype torch.float16", {"key_cache": CACHE, "value_cache": CACHE.half()}),
        ("value_cache has stride 16", {"key_cache": CACHE, "value_cache": torch.zeros(6, 2, 64, 16).mT}),
        ("block_tables has dtype int64: must be int32", {"block_tables": np.ones((2, 3), dtype=np.int64)}),
        ("block_tables has shape [6]: must be [any, any]", {"block_tables": i32(1, 2, 3, 4, 5, 6)}),
        ("block_tables has strides", {"block_tables": np.ones((2, 6), dtype=np.int32)[:, ::2]}),
        ("query_starts has shape [2]: must be [3]", {"query_starts": i32(0, 4)}),
        ("context_lens has shape [3]: must be [2]", {"context_lens": i32(20, 33, 1)}),
        ("query_starts[0] is 1", {"query_starts": i32(1, 3, 4)}),
        ("query_starts[2] is 3: must start at 0, never fall, and end at 4", {"query_starts": i32(0, 3, 3)}),
        ("query_starts[2] is 4", {"query_starts": i32(0, 5, 4)}),
        ("context_lens[0] is 2: must be at least its 3 queries and at most the 48", {"context_lens": i32(2, 33)}),
        ("context_lens[1] is 49", {"context_lens": i32(20, 49)}),
        ("context_lens[1] is -1", {"context_lens": i32(20, -1)}),
        ("sliding_window is 0: must be at least 1", {"sliding_window": 0}),
        ("sliding_window is 2147483648: must be at least 1 and below 2147483648", {"sliding_window": 2**31}),
        ("scale is nan: must be from", {"scale": float("nan")}),
        ("scale is 1e+39: must be from -1.2676506002282294e+30", {"scale": 1e39}),
        ("soft_cap is 1e-50: must be from 7.888609052210118e-31", {"soft_cap": 1e-50}),
        ("soft_cap is 3e+38: must be from", {"soft_cap": 3e38}),
        ("context_lens is a list: must be a NumPy array or a CPU tensor", {"context_lens": [20, 33]}),
        ("out has shape [3, 4, 64], query [4, 4, 64]", {"out": torch.zeros(3, 4, 64)}),
        ("out has strides [0, 0, 1], but is written", {"out": torch.zeros(1, 1, 64).expand(4, 4, 64)}),
        ("out has dtype torch.float64", {"out": torch.zeros(4, 4, 64).double()}),
    ],
)
def test_an_argument_that_breaks_the_contract_is_named_with_its_value(message: str, changed: dict[str, object]) -> None:
    refused(message, **changed)


@pytest.mark.parametrize("block", [-1, 9, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["compiled", "reference"])
def test_a_block_outside_of_the_cache_is_refused_without_being_read(block: int, dtype: torch.dtype) -> None:
    batch = paged_batch([dense_sequence(3, 20, dtype=dtype), dense_sequence(1, 33, dtype=dtype)])
    assert len(batch.key_cache) == 8
    tables = batch.block_tables.copy()
    tables[1, 2] = block

    with pytest.raises(ShapeError, match=f"block_tables names block {block}: the cache has blocks 0 to 7"):
        PagedBatch(**{**vars(batch), "block_tables": tables}).attend()


@pytest.mark.parametrize(("starts", "lens"), [((0, 3, 3), (20, 33)), ((0, 3, 4), (2, 33)), ((0, 3, 4), (20, 49))])
def test_the_reference_refuses_the_same_lengths(starts: tuple[int, ...], lens: tuple[int, ...]) -> None:
    batch = paged_batch([dense_sequence(q, n, dtype=torch.float16) for q, n in ((3, 20), (1, 33))])

    with pytest.raises(ShapeError, match=r"query_starts|context_lens"):
        PagedBatch(**{**vars(batch), "query_starts": i32(*starts), "context_lens": i32(*lens)}).attend()
