"""A real model goes on, token for token, while its pool gets smaller and larger."""

import pytest
from builders import make_request, make_settings
from tiny_models import make_tiny_model

from kvwatch.errors import ChangeRefused
from kvwatch.telemetry.events import BlocksRelocated
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import KVDtype
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZE, NUM_BLOCKS = 8, 64
PROMPTS = {f"r{i}": [(11 * i + 7 * j + 3) % 500 for j in range(9 + 8 * i)] for i in range(5)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))), dtype="float32")


def make_engine(model: LoadedModel, kv_dtype: KVDtype) -> EngineCore:
    runner = ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE, kv_dtype), NUM_BLOCKS))
    settings = make_settings(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=256, max_batch_tokens=48, vocab_size=512,
        eos_token_ids=(),
    )  # fmt: skip
    core = EngineCore(settings, runner, EventLog(), memory=runner)
    for request_id, prompt in PROMPTS.items():
        n = 2 if request_id == "r2" else 1
        core.add(make_request(request_id, prompt, max_tokens=24, n=n, temperature=0.8, seed=5), 0)
    return core


def run(core: EngineCore, sizes: list[int]) -> dict[tuple[str, int], list[int]]:
    """Serve everything, with another size before every step; as small as it can be where `sizes` says 0."""
    tokens: dict[tuple[str, int], list[int]] = {}
    step = 0
    while core.has_work:
        if sizes:
            size = sizes[step % len(sizes)] or core.manager.pool.num_used + 1
            try:
                core.resize(core.prepare_resize(size))
            except ChangeRefused:
                assert size < 15, "for the longest request, whose worst case is larger"
        for output in core.step():
            tokens.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
        step += 1
    return tokens


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_texts_are_the_same_while_the_pool_changes(model: LoadedModel, kv_dtype: KVDtype) -> None:
    expected = run(make_engine(model, kv_dtype), [])
    core = make_engine(model, kv_dtype)
    cursor = core.log.subscribe("test")

    assert run(core, [NUM_BLOCKS, 0, 90]) == expected

    moved = sum(len(event.sources) for event in cursor.read(100_000) if isinstance(event, BlocksRelocated))
    assert moved > 10, "else nothing was shown"
    core.check_integrity()
    assert core.manager.pool.num_used == 0


def test_the_memory_is_that_of_the_new_size(model: LoadedModel) -> None:
    core = make_engine(model, "auto")
    runner = core._executor
    assert isinstance(runner, ModelRunner)

    core.resize(core.prepare_resize(40))

    assert runner.kv_cache.num_blocks == 40
    assert runner.kv_cache.blocks.shape[0] == 40
