"""Where a model runs, and what is said when that cannot be."""

from importlib.util import find_spec

import pytest
import torch

from kvwatch.errors import ConfigError
from kvwatch_engine.memory.sizing import free_memory_bytes
from kvwatch_engine.model.devices import choose_device, free_bytes
from kvwatch_engine.model.dtypes import choose_dtype


def test_the_cpu_is_taken_when_asked_for() -> None:
    assert choose_device("cpu") == torch.device("cpu")


def test_auto_takes_a_gpu_only_where_there_is_one() -> None:
    has_gpu = torch.cuda.is_available() and find_spec("triton") is not None

    assert choose_device("auto").type == ("cuda" if has_gpu else "cpu")


def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError, match=r"--device cuda: torch .* finds no GPU; .* or take --device cpu"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")


def test_the_free_bytes_of_the_cpu_are_those_of_the_machine() -> None:
    assert free_bytes(torch.device("cpu")) == pytest.approx(free_memory_bytes(), rel=0.2)


@pytest.mark.parametrize(("has_bfloat16", "name"), [(True, "bfloat16"), (False, "float32")])
def test_on_a_gpu_auto_is_bfloat16_if_it_multiplies_that_in_hardware(
    monkeypatch: pytest.MonkeyPatch,
    has_bfloat16: bool,
    name: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bfloat16)

    choice = choose_dtype("auto", torch.device("cuda"))

    assert choice.name == name
    assert "GPU" in choice.reason
