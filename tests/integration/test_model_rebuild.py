"""A real model goes on, token for token, while its cache is laid out in blocks of other sizes."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_request, make_settings
from tiny_models import make_tiny_model

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import KVCacheSpec, KVDtype
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.changer import Changer, RebuildLimits
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZE, NUM_BLOCKS = 8, 64
PROMPTS = {f"r{i}": [(11 * i + 7 * j + 3) % 500 for j in range(9 + 8 * i)] for i in range(5)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))), dtype="float32")


def make_engine(model: LoadedModel, kv_dtype: KVDtype = "auto") -> EngineCore:
    runner = ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE, kv_dtype), NUM_BLOCKS))
    settings = make_settings(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=256, max_batch_tokens=48, vocab_size=512,
        eos_token_ids=(), kv_dtype=kv_dtype,
    )  # fmt: skip
    core = EngineCore(settings, runner, EventLog(), memory=runner, block_bytes=runner.kv_cache.spec.block_bytes)
    for request_id, prompt in PROMPTS.items():
        n = 2 if request_id == "r2" else 1
        core.add(make_request(request_id, prompt, max_tokens=24, n=n, temperature=0.8, seed=5), 0)
    return core


def run(core: EngineCore, changes: list[dict[str, object]]) -> dict[tuple[str, int], list[int]]:
    """Serve everything, with another change before every third step."""
    changer = Changer(core, RebuildLimits(cooldown_seconds=0.0))
    tokens: dict[tuple[str, int], list[int]] = {}
    step = 0
    while core.has_work:
        if changes and step % 3 == 2:
            wanted = changes[step // 3 % len(changes)]
            _, carry_out = changer.prepare(wanted, [], actor="test", reason="", version=None)  # type: ignore[arg-type]
            carry_out()
            core.check_integrity()
        for output in core.step():
            tokens.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
        step += 1
    return tokens


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_texts_are_the_same_while_the_block_size_changes(model: LoadedModel, kv_dtype: KVDtype) -> None:
    expected = run(make_engine(model, kv_dtype), [])
    core = make_engine(model, kv_dtype)

    sizes: list[dict[str, object]] = [{"block_size": size} for size in (16, 32, 8, 1)]
    assert run(core, sizes) == expected
    assert core.manager.pool.num_used == 0
    runner = core.memory
    assert isinstance(runner, ModelRunner)
    assert runner.kv_cache.spec.block_size == core.settings.block_size
    assert runner.kv_cache.num_blocks == core.settings.num_blocks == core.manager.pool.num_blocks


_NUM_COMPILED = """
import sys
import weakref
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_kernels.cpu import compiled

model = load_model(sys.argv[1], dtype="float32")
runner = ModelRunner(model, KVCache(model.cache_spec(8), 16))
for step in (lambda: runner.warm_up(8), lambda: runner.warm_up(8, ["int8"]),
             lambda: runner.replace(runner.layout(8, "int8"), 16)):
    before = len(compiled._KEPT)
    step()
    print(len(compiled._KEPT) - before)
"""


def test_no_kernel_is_compiled_during_a_rebuild_for_whose_type_the_runner_was_warmed_up(tmp_path: Path) -> None:
    """In a process of its own: what another test has compiled already would not be counted."""
    folder = make_tiny_model("qwen3", tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", _NUM_COMPILED, str(folder)], capture_output=True, text=True, check=True
    )

    at_start, for_int8, in_the_rebuild = map(int, done.stdout.split())
    assert at_start > 0
    assert for_int8 > 0
    assert in_the_rebuild == 0


def test_a_cache_of_another_type_serves_on_and_back_again(model: LoadedModel) -> None:
    core = make_engine(model)

    tokens = run(core, [{"kv_dtype": "int8"}, {"kv_dtype": "auto"}])

    assert {key: len(found) for key, found in tokens.items()} == {
        key: len(found) for key, found in run(make_engine(model), []).items()
    }


def test_with_another_type_that_stays_texts_are_those_of_an_engine_that_began_with_it(model: LoadedModel) -> None:
    """The change comes before the first step: nothing was computed with the old type."""
    core = make_engine(model)
    changer = Changer(core, RebuildLimits(cooldown_seconds=0.0))
    _, carry_out = changer.prepare({"kv_dtype": "int8"}, [], actor="test", reason="", version=None)

    carry_out()

    assert run(core, []) == run(make_engine(model, "int8"), [])


def test_the_old_cache_is_given_up_before_one_of_another_type_is_made(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that takes most of the memory could not be replaced otherwise."""
    runner = ModelRunner(model, KVCache(model.cache_spec(8), 16))
    runner.warm_up(8)
    old, is_given_up = weakref.ref(runner.kv_cache), []
    make = KVCache.__init__

    def noting(cache: KVCache, spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks == 32:
            gc.collect()
            is_given_up.append(old() is None)
        make(cache, spec, num_blocks, device)

    monkeypatch.setattr(KVCache, "__init__", noting)

    runner.replace(runner.layout(8, "int8"), 32)

    assert is_given_up == [True]


@pytest.mark.parametrize("changes", [{"block_size": 16}, {"kv_dtype": "int8"}])
def test_a_runner_that_cannot_have_the_memory_keeps_the_old_layout(
    model: LoadedModel, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(make_engine(model), [])
    core = make_engine(model)
    tokens: dict[tuple[str, int], list[int]] = {}
    for _ in range(4):
        for output in core.step():
            tokens.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
    init = KVCache.__init__

    def refuse(self: KVCache, spec: KVCacheSpec, *rest: object) -> None:
        if spec != model.cache_spec(BLOCK_SIZE):
            raise MemoryError("there is none")
        init(self, spec, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "__init__", refuse)
        changer = Changer(core, RebuildLimits(cooldown_seconds=0.0))
        _, carry_out = changer.prepare(changes, [], actor="test", reason="", version=None)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="MemoryError"):
            carry_out()

    core.check_integrity()
    for key, found in run(core, []).items():
        tokens.setdefault(key, []).extend(found)
    assert tokens == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_slots_keep_every_bit_in_blocks_of_another_size(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvwatch_engine.memory.kv_cache._BATCH_BYTES", 2000)  # several batches
    old_spec, new_spec = (KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=size, dtype=dtype)
                          for size in (4, 6))  # fmt: skip
    old = KVCache(old_spec, 10)
    generator = torch.Generator().manual_seed(1)
    old.blocks.copy_(torch.randint(0, 256, old.blocks.shape, dtype=torch.uint8, generator=generator))
    before = old.blocks.clone()
    random = np.random.default_rng(2)
    sources = random.choice(np.arange(4, 40), 30, replace=False)
    destinations = random.choice(np.arange(6, 48), 30, replace=False)

    new = old.relaid(new_spec, 8, sources, destinations)

    assert torch.equal(old.blocks, before)
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        (sb, so), (db, do) = divmod(source, 4), divmod(destination, 6)
        kept, moved = old.data[sb, :, :, :, so], new.data[db, :, :, :, do]
        assert torch.equal(kept.contiguous().view(torch.uint8), moved.contiguous().view(torch.uint8))
        if old.scales is not None and new.scales is not None:
            kept, moved = old.scales[sb, :, :, :, so], new.scales[db, :, :, :, do]
            assert torch.equal(kept.contiguous().view(torch.uint8), moved.contiguous().view(torch.uint8))
    touched = set(destinations.tolist())
    untouched = [slot for slot in range(48) if slot not in touched]
    assert all(not new.data[slot // 6, :, :, :, slot % 6].float().any() for slot in untouched)
