"""An engine of a tiny model that takes images, without a server: prompts in, tokens out."""

from collections.abc import Sequence
from typing import Any

from builders import run_until_idle
from image_oracle import Oracle, Prompt

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.device import device_store
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZE = 4


def make_engine(model: LoadedModel, *, host_blocks: int = 0, **settings: Any) -> EngineCore:
    """Return an engine in float32, with a host tier of so many blocks if there are any."""
    values = {
        "block_size": BLOCK_SIZE, "num_blocks": 400, "max_model_len": 256, "max_num_seqs": 8, "max_batch_tokens": 256,
        "vocab_size": model.info.vocab_size, "weights_fingerprint": model.info.weights_fingerprint,
    }  # fmt: skip
    config = EngineSettings(**{**values, **settings})
    spec = model.cache_spec(config.block_size)
    log, runner = EventLog(), ModelRunner(model, KVCache(spec, config.num_blocks))

    def make_tiers(manager: BlockManager) -> MemoryTiers:
        identity = StoreIdentity(
            weights_fingerprint=config.weights_fingerprint, kv_dtype=spec.dtype, block_size=spec.block_size,
            num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        )  # fmt: skip
        machine = Machine(device_store(lambda: runner.kv_cache))
        limits = TierSettings(host_bytes=host_blocks * spec.block_bytes)
        return MemoryTiers(manager, limits, machine, identity, spec.block_bytes, log)

    return EngineCore(
        config, runner, log, memory=runner, block_bytes=spec.block_bytes,
        make_tiers=make_tiers if host_blocks else None,
    )  # fmt: skip


def answers(core: EngineCore, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Run prompts together; return their tokens."""
    for index, prompt in enumerate(prompts):
        core.add(prompt.request(str(index)), 0)
    tokens = run_until_idle(core, 100_000)
    core.check_integrity()
    assert core.manager.pool.num_used == 0
    return [tokens[str(index), 0] for index in range(len(prompts))]


def check(oracle: Oracle, prompts: Sequence[Prompt], found: Sequence[list[int]]) -> None:
    """Fail unless all answers are the reference's, near ties aside."""
    for prompt, answer in zip(prompts, found, strict=True):
        oracle.check(prompt, answer)


def cached_tokens(core: EngineCore, prompt: Prompt) -> int:
    """Run a prompt; return how many of its tokens were found in the prefix cache."""
    core.add(prompt.request("r"), 0)
    outputs = []
    while core.has_work:
        outputs += core.step()
    return max(output.num_cached_tokens for output in outputs)
