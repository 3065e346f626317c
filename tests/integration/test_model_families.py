"""Families of models, served by whatever computes them: greedy text is transformers', and docs/models.md says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_families import FAMILIES, family
from model_trial import try_family
from models_page import PAGE, table, with_table

FAST = (
    "Mistral", "Gemma 2", "Phi-3, longrope", "GPT-NeoX", "Falcon, grouped heads", "Qwen3-MoE (experts)",
    "DeepSeek-V3 (latent attention, experts)",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("title", FAST)
def test_greedy_text_alone_and_batched_is_transformers(title: str, tmp_path: Path) -> None:
    trial = try_family(family(title), tmp_path)

    assert trial.num_excused <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_of_models_says_what_every_family_does_now(tmp_path_factory: pytest.TempPathFactory) -> None:
    trials = [(each, try_family(each, tmp_path_factory.mktemp("family"))) for each in FAMILIES]

    assert sum(trial.num_excused for _, trial in trials) <= len(FAMILIES) // 5
    assert with_table(PAGE.read_text(), table(trials)) == PAGE.read_text(), "write docs/models.md with `make models`"
