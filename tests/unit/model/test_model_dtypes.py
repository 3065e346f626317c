"""Which dtype is chosen, and why."""

import pytest
import torch

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.dtypes import choose_dtype


@pytest.mark.parametrize(
    ("has_amx", "has_avx512_bf16", "dtype", "reason"),
    [
        (True, True, torch.bfloat16, "AMX"),
        (False, True, torch.bfloat16, "AVX512-BF16"),
        (False, False, torch.float32, "neither AMX nor AVX512-BF16"),
    ],
)
def test_auto_takes_bfloat16_only_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool, has_avx512_bf16: bool, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_avx512_bf16)

    choice = choose_dtype("auto")

    assert choice.dtype is dtype
    assert choice.name == str(dtype).removeprefix("torch.")
    assert reason in choice.reason


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_requested_dtype_is_taken(name: str) -> None:
    choice = choose_dtype(name)

    assert (choice.name, choice.dtype, choice.reason) == (name, getattr(torch, name), "as requested")


def test_other_dtypes_are_refused_with_the_choices() -> None:
    with pytest.raises(ModelError, match="'float16' is not supported; use auto, float32, bfloat16"):
        choose_dtype("float16")
