"""From settings to a model and an engine that has not started: part of the composition root of `kvwatch serve`.

Torch and transformers are imported when something is made, not before.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import structlog

from kvwatch.config import parse_bytes
from kvwatch.errors import ConfigError
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import KVCacheSpec, KVDtype, KVGroup
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.engine import Engine
from kvwatch_engine.memory.sizing import default_num_blocks, most_blocks_of_sequence, parse_watermark, watermark_ratio
from kvwatch_engine.memory.tiers.tiers import TierSettings
from kvwatch_engine.serve.asked import AskedModel
from kvwatch_engine.serve.settings import ServeSettings
from kvwatch_engine.serve.tiers import served_groups, tiers_factory

if TYPE_CHECKING:
    from kvwatch_engine.model.loader import LoadedModel
    from kvwatch_engine.model.runner import ModelRunner
    from kvwatch_engine.server import OutputDispatcher

logger = structlog.get_logger(__name__)


def load(settings: ServeSettings, asked: AskedModel, cache_dir: Path) -> "LoadedModel":
    """Load the model that was set.

    Args:
        settings: say which.
        asked: names, tokenizer and chat template that were set.
        cache_dir: keeps converted models.

    Raises:
        ModelError: it cannot be loaded.
    """
    from kvwatch_engine.model.devices import choose_device
    from kvwatch_engine.model.loader import load_model

    logger.info("loading", model=settings.model)
    model = load_model(
        settings.model,
        dtype=settings.dtype,
        served_name=asked.names[0] if asked.names else None,
        cache_dir=cache_dir,
        device=choose_device(settings.device),
        implementation=settings.model_impl,
        texts=asked.texts,
    )
    return replace(model, info=replace(model.info, further_names=asked.names[1:]))


def refuse_contradictions(settings: ServeSettings) -> None:
    """Refuse settings that contradict each other whatever the model is, before one is loaded for them.

    Raises:
        ConfigError: so.
    """
    if settings.num_blocks is not None and settings.kv_memory is not None:
        raise ConfigError("--num-blocks and --kv-memory both say how large the pool is; give one of them")
    if settings.max_batch_tokens < settings.max_num_seqs:
        raise ConfigError(
            f"--max-batch-tokens {settings.max_batch_tokens} is less than --max-num-seqs {settings.max_num_seqs}; "
            "each running sequence needs a token a step: raise one or lower the other"
        )
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise ConfigError(
            f"--prompt-lookup-min {settings.prompt_lookup_min} is more than --prompt-lookup-max "
            f"{settings.prompt_lookup_max}; raise the one or lower the other"
        )


def make_engine(
    settings: ServeSettings,
    tiers: TierSettings,
    model: "LoadedModel",
    log: EventLog,
    dispatcher: "OutputDispatcher",
) -> Engine:
    """Make an engine that has not started, with its pool, warmed up.

    Raises:
        ConfigError: settings contradict the model or the memory that there is.
    """
    logger.info("warming up", note="the first start compiles the kernels, later ones load them")
    runner, engine_settings = build_runner(settings, tiers, model)
    block_bytes = runner.kv_cache.spec.block_bytes
    return Engine(
        engine_settings,
        runner,
        log,
        dispatcher,
        block_bytes=block_bytes,
        memory_bytes={"weights": model.info.weights_bytes, "kv": engine_settings.num_blocks * block_bytes},
        memory=runner,
        make_tiers=tiers_factory(tiers, runner, model.info, log),
    )


def build_runner(
    settings: ServeSettings, tiers: TierSettings, model: "LoadedModel"
) -> "tuple[ModelRunner, EngineSettings]":
    """Allocate the pool's tensors, warm the model up, and return both with the engine's settings.

    Raises:
        ConfigError: settings contradict the model or the memory that there is.
    """
    from kvwatch_engine.memory.kv_cache import KVCache
    from kvwatch_engine.model.devices import free_bytes
    from kvwatch_engine.model.runner import ModelRunner

    spec = model.cache_spec(settings.block_size, settings.kv_dtype)
    groups = served_groups(tiers, model.info)
    engine_settings = make_engine_settings(settings, model.info, spec, groups, free_bytes(model.device))
    cache = KVCache(spec, engine_settings.num_blocks, model.device)
    if settings.claim_memory == "at-start":
        cache.claim()
    runner = ModelRunner(model, cache)
    runner.warm_up(engine_settings.max_batch_tokens, get_args(KVDtype) if settings.allow_rebuild else ())
    return runner, engine_settings


def make_engine_settings(
    settings: ServeSettings, model: ModelInfo, spec: KVCacheSpec, groups: tuple[KVGroup, ...], free_bytes: int
) -> EngineSettings:
    """Return the engine's settings for a model, filling in what was left open; `free_bytes` is what the pool may take.

    Raises:
        ConfigError: settings contradict the model or the memory that there is.
    """
    max_model_len = settings.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {model.max_position} tokens that the model was made for"
        )
    num_blocks = _num_blocks(settings, spec, groups, max_model_len, free_bytes)
    return EngineSettings(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        groups=groups,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_batch_tokens=settings.max_batch_tokens,
        max_prefill_chunk=settings.max_prefill_chunk,
        target_itl_seconds=settings.target_itl_seconds,
        max_step_seconds=settings.max_step_seconds,
        watermark_blocks=parse_watermark(settings.watermark, num_blocks - 1),
        watermark_ratio=watermark_ratio(settings.watermark),
        reserve_prompt=settings.reserve_prompt,
        priority_aging_seconds=settings.priority_aging_seconds,
        deadline_seconds=settings.deadline_seconds,
        preemption_mode=settings.preemption_mode,
        victim_policy=settings.victim_policy,
        protect_after_preemptions=settings.protect_after_preemptions,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        enable_prefix_cache=settings.prefix_cache,
        is_prefix_cache_strict=settings.strict_prefix_cache,
        max_pinned_ratio=settings.max_pinned_ratio,
        num_speculative_tokens=settings.num_speculative_tokens,
        prompt_lookup_min=settings.prompt_lookup_min,
        prompt_lookup_max=settings.prompt_lookup_max,
        weights_fingerprint=model.weights_fingerprint,
        kv_dtype=settings.kv_dtype,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        stall_seconds=settings.stall_seconds,
        emit_token_ids=settings.kv_events is not None,  # the wire demands them
    )


def _num_blocks(
    settings: ServeSettings, spec: KVCacheSpec, groups: Sequence[KVGroup], max_model_len: int, free_bytes: int
) -> int:
    if settings.num_blocks is not None:
        num_blocks = settings.num_blocks
    elif settings.kv_memory is not None:
        num_blocks = parse_bytes(settings.kv_memory, "--kv-memory") // spec.block_bytes
    else:
        max_chunk = min(settings.max_prefill_chunk or settings.max_batch_tokens, settings.max_batch_tokens)
        most = most_blocks_of_sequence([group.window for group in groups], spec.block_size, max_model_len, max_chunk)
        num_blocks = default_num_blocks(spec, most, settings.max_num_seqs, free_bytes)
    needed = num_blocks * spec.block_bytes
    if num_blocks < 2:
        raise ConfigError(f"--kv-memory {settings.kv_memory} is less than two blocks of {spec.block_bytes} bytes")
    if needed > free_bytes:
        raise ConfigError(
            f"a pool of {num_blocks} blocks takes {needed / 2**30:.1f} GiB, but {free_bytes / 2**30:.1f} GiB are free; "
            "lower --num-blocks or --kv-memory"
        )
    return num_blocks
