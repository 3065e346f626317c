"""A rebuild that fails or is killed at any point ends in the old or in the new configuration, never in between."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_load import BLOCK_SIZE, NUM_BLOCKS, LiveLoad, Texts
from tiny_models import make_tiny_model

from kvwatch.errors import ChangeFailed
from kvwatch.telemetry.events import ConfigChanged, PoolRebuilt
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers import tiers
from kvwatch_engine.memory.tiers.file_system import FileSystem
from kvwatch_engine.memory.tiers.folder import BlockFolder
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

TESTS = Path(__file__).parent.parent
PHASES = ["swaps", "victims", "tiers", "memory"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def undisturbed(model: LoadedModel) -> Texts:
    load = LiveLoad(model)
    load.run()
    return load.texts


def block_sizes(load: LiveLoad) -> set[int]:
    """Return the block sizes that the parts of an engine go by: one, unless it is in between."""
    core = load.core
    runner = core.memory
    assert isinstance(runner, ModelRunner)
    assert runner.kv_cache.num_blocks == core.settings.num_blocks == core.manager.pool.num_blocks
    assert core.block_bytes == runner.kv_cache.spec.block_bytes
    chains = {each.chain.block_size for request in core.scheduler.lifecycle.requests() for each in request.sequences}
    tiers_now = core.tiers
    assert isinstance(tiers_now, tiers.MemoryTiers)
    return {
        core.settings.block_size, core.manager.block_size, runner.kv_cache.spec.block_size,
        load.ledger.ledger.limits.block_size_tokens, tiers_now.block_size, *chains,
    }  # fmt: skip


def raising(*_args: Any, **_options: Any) -> Any:
    raise OSError("made to fail")


class FailsOnce:
    """Fails the n-th time that it is called, then does what it stands for."""

    def __init__(self, number: int, real: Callable[..., Any]) -> None:
        self._left = number
        self._real = real

    def __get__(self, instance: object, _owner: type) -> Callable[..., Any]:
        return lambda *args, **options: self(instance, *args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise MemoryError("made to fail")
        return self._real(*args, **options)


FAULTS: dict[str, tuple[object, str, int]] = {
    "memory of the new cache": (KVCache, "__init__", 1),
    "first batch of slots": (KVCache, "_bits", 1),
    "last batch of slots": (KVCache, "_bits", 2),
    "binding the model to it": (ModelRunner, "rebind", 1),
    "compiling for it": (ModelRunner, "_warm_up_layout", 1),
    "memory of the host tier": (tiers, "TierPool", 1),
    "pool of the disk tier": (tiers, "TierPool", 2),
    "opening the folder": (BlockFolder, "open", 1),
    "locking the folder": (FileSystem, "lock", 1),
    "staging memory": (tiers, "StagingRing", 1),
}


@pytest.mark.parametrize("what", [*PHASES, *FAULTS])
def test_whatever_fails_leaves_the_old_configuration_and_every_text(
    model: LoadedModel, undisturbed: Texts, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LiveLoad(model, tmp_path)
    load.reach_full_load()

    with monkeypatch.context() as patch:
        if what in FAULTS:
            place, name, number = FAULTS[what]
            patch.setattr(place, name, FailsOnce(number, getattr(place, name)))
        else:
            load.on_phase = lambda phase: raising() if phase == what else None
        with pytest.raises(ChangeFailed, match="it is as it was"):
            load.change({"block_size": 32})

    assert block_sizes(load) == {BLOCK_SIZE}
    assert load.core.settings.num_blocks == NUM_BLOCKS
    assert [event.outcome for event in load.events if isinstance(event, PoolRebuilt)] == ["failed"]
    assert not [event for event in load.events if isinstance(event, ConfigChanged)]
    load.on_phase = lambda _phase: None
    load.change({"block_size": 8})  # what failed once can be tried again
    assert block_sizes(load) == {8}
    load.run()
    assert load.texts == undisturbed
    assert set(load.reasons.values()) == {FinishReason.LENGTH}
    load.core.close()


def run_victim(folder: Path, disk: Path, phase: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return subprocess.run(
        [sys.executable, str(TESTS / "rebuild_victim.py"), str(folder), str(disk), phase],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("phases", [["memory"], pytest.param([*PHASES, "told"], marks=pytest.mark.slow)])
def test_a_process_that_is_killed_at_any_point_comes_back_with_what_was_declared(
    folder: Path, undisturbed: Texts, tmp_path: Path, phases: list[str]
) -> None:
    """What outlives it is the disk tier, which must never give it a block of the other size."""
    for phase in phases:
        killed = run_victim(folder, tmp_path, phase)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    after = run_victim(folder, tmp_path, "none")
    assert after.returncode == 0, after.stderr
    found = json.loads(after.stdout.splitlines()[-1])

    assert found["block_sizes"] == [BLOCK_SIZE, 32, 32]
    assert found["texts"] == {f"{name} {number}": tokens for (name, number), tokens in undisturbed.items()}
