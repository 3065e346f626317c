"""Norm, rotation and store of a fused projection, against the reference in plain torch operations."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvwatch_kernels.dims import PAD_SLOT, Int64Array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_rotate_and_store
from kvwatch_kernels.rotary import rotate_and_store
from kvwatch_kernels.slots import SlotMapping

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
NUM_HEADS, NUM_KV_HEADS = 6, 2
NUM_BLOCKS, BLOCK_SIZE = 40, 8


@dataclass
class Projection:
    """A fused projection, its angles, and a cache of two layers that holds 7 everywhere."""

    qkv: Tensor
    cosine: Tensor
    sine: Tensor
    cache: Tensor
    slots: Int64Array
    norm_weight: Tensor | None

    def fresh(self) -> "Projection":
        return replace(self, qkv=self.qkv.clone(), cache=self.cache.clone())

    def run(self) -> Tensor:
        sides = self.cache[:, 1, 0], self.cache[:, 1, 1]
        return rotate_and_store(
            self.qkv, self.cosine, self.sine, *sides, self.slots, norm_weight=self.norm_weight, eps=EPS
        )

    def run_reference(self) -> Tensor:
        sides = self.cache[:, 1, 0], self.cache[:, 1, 1]
        reference_rotate_and_store(
            self.qkv, self.cosine, self.sine, *sides, self.slots, norm_weight=self.norm_weight, eps=EPS
        )
        return self.qkv[:, :NUM_HEADS]


def projection(
    num_tokens: int, head_dim: int = 64, dtype: torch.dtype = torch.float32, *, has_norm: bool = False
) -> Projection:
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=generator)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 100
    weight = torch.randn(NUM_HEADS + NUM_KV_HEADS, head_dim, generator=generator)
    slots = np.random.default_rng(num_tokens).permutation(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].astype(np.int64)
    slots[3::7] = PAD_SLOT
    return Projection(
        qkv.to(dtype),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        torch.full((NUM_BLOCKS, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim), 7.0, dtype=dtype),
        slots,
        weight.to(dtype) if has_norm else None,
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Float32 within 1e-6 of torch; of other dtypes nearly every bit, since both round at the same places."""
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    else:
        assert (actual != expected).float().mean() < 2e-3, "only ties between two roundings may differ"


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 6, 32, 64, 80, 128])
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
def test_queries_and_cache_hold_what_plain_operations_give(
    num_tokens: int, head_dim: int, dtype: torch.dtype, has_norm: bool
) -> None:
    expected = projection(num_tokens, head_dim, dtype, has_norm=has_norm)
    actual = expected.fresh()

    queries, expected_queries = actual.run(), expected.run_reference()

    assert queries.data_ptr() == actual.qkv.data_ptr()
    assert_close(queries, expected_queries)
    assert_close(actual.cache, expected.cache)
    assert torch.equal(actual.cache == 7.0, expected.cache == 7.0), "other slots are not touched"


def test_rotation_turns_pairs_by_their_angle() -> None:
    """Complex multiplication says the same in other words."""
    case = projection(9)
    query = case.qkv[:, :NUM_HEADS].clone()

    rotated = case.run()

    turned = torch.complex(query[..., :32], query[..., 32:]) * torch.complex(case.cosine, case.sine)[:, None]
    torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-6, atol=1e-6)


def test_values_keep_all_their_bits() -> None:
    case = projection(1)
    case.qkv.view(torch.int32)[0, NUM_HEADS + NUM_KV_HEADS + 1, 5] = 0x7FC12345
    block, offset = divmod(int(case.slots[0]), BLOCK_SIZE)

    case.run()

    assert case.cache.view(torch.int32)[block, 1, 1, 1, offset, 5] == 0x7FC12345


def test_a_token_without_a_slot_still_has_its_queries_rotated() -> None:
    case, other = projection(2), projection(2)
    case.slots[:] = PAD_SLOT

    assert torch.equal(case.run(), other.run())
    assert (case.cache == 7.0).all()


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_token_has_the_same_bits_alone_and_among_hundreds_on_several_threads(has_norm: bool) -> None:
    case = projection(300, 128, has_norm=has_norm)
    together = case.fresh().run()

    for token in (0, 50, 51, 299):
        row = slice(token, token + 1)
        alone = replace(
            case.fresh(),
            qkv=case.qkv[row].clone(),
            cosine=case.cosine[row],
            sine=case.sine[row],
            slots=case.slots[row],
        )
        assert torch.equal(alone.run()[0], together[token])


def test_the_projection_may_be_a_slice_of_a_wider_one() -> None:
    case = projection(5)
    wide = torch.randn(5, 12, 80)
    wide[:, 1:11, 8:72] = case.qkv
    before = wide.clone()
    sliced = replace(case.fresh(), qkv=wide[:, 1:11, 8:72])

    assert torch.equal(sliced.run(), case.run())
    assert torch.equal(sliced.cache, case.cache)
    before[:, 1:11, 8:72] = wide[:, 1:11, 8:72]
    assert torch.equal(wide, before)


def test_slots_that_were_checked_before_do_the_same() -> None:
    case = projection(20)
    checked = case.fresh()
    sides = checked.cache[:, 1, 0], checked.cache[:, 1, 1]

    mapping = SlotMapping(case.slots, NUM_BLOCKS * BLOCK_SIZE)
    rotate_and_store(checked.qkv, case.cosine, case.sine, *sides, mapping)
    case.run()

    assert torch.equal(checked.cache, case.cache)


def test_no_tokens_change_nothing() -> None:
    case = projection(0)

    assert case.run().shape == (0, NUM_HEADS, 64)
    assert (case.cache == 7.0).all()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("qkv has 4 heads: must be query heads and twice the cache's 2", {"qkv": torch.zeros(2, 4, 64)}),
        ("qkv has shape [2, 10, 60]: must be [num_tokens, heads, 64]", {"qkv": torch.zeros(2, 10, 60)}),
        ("qkv has dtype torch.bfloat16, the cache torch.float32", {"qkv": torch.zeros(2, 10, 64).bfloat16()}),
        ("cosine has shape [3, 32]: must be [2, 32]", {"cosine": torch.zeros(3, 32)}),
        ("sine has shape [2, 64]: must be [2, 32]", {"sine": torch.zeros(2, 64)}),
        ("sine has strides [64, 1]: must be contiguous", {"sine": torch.zeros(2, 64)[:, :32]}),
        ("norm_weight has shape [64]: must be [8, 64]", {"norm_weight": torch.zeros(64)}),
        ("slot_mapping has shape [1]: must be [2]", {"slots": np.array([1])}),
        ("slot_mapping has slots 0 to 320: must be 0 to 319, or -1", {"slots": np.array([0, 320])}),
    ],
)
def test_arguments_that_do_not_fit_are_named_and_nothing_is_written(message: str, changes: dict[str, object]) -> None:
    case = replace(projection(2), **changes)  # type: ignore[arg-type]  # each value is of its field's type

    with pytest.raises(ShapeError, match=re.escape(message)):
        case.run()

    assert (case.cache == 7.0).all()


def test_heads_that_cannot_turn_in_pairs_are_refused() -> None:
    cache = torch.zeros(2, 1, 4, 5)

    with pytest.raises(ShapeError, match="heads of 5 elements: must be even"):
        rotate_and_store(torch.zeros(1, 3, 5), torch.zeros(1, 2), torch.zeros(1, 2), cache, cache, np.array([0]))


def test_checked_slots_of_a_larger_cache_are_refused() -> None:
    case = projection(2)
    mapping = SlotMapping(case.slots, NUM_BLOCKS * BLOCK_SIZE + 1)

    with pytest.raises(ShapeError, match="2 slots of a cache of 321: must be one for each of 2 tokens"):
        rotate_and_store(case.qkv, case.cosine, case.sine, case.cache[:, 0, 0], case.cache[:, 0, 1], mapping)
