"""`kvwatch serve`: the composition root. Engine, server and observatory in one process.

    main thread          API server (asyncio, uvicorn)
    kvwatch-engine       the step loop
    observatory thread   collector, ledger, metrics listener

Only this module knows all three. Torch and transformers are imported when the command runs, not before.
"""

import argparse
import asyncio
import contextlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import structlog

from kvwatch import __version__
from kvwatch.config import Resolved, add_flags, parse_bytes, resolve, setting, shown_settings
from kvwatch.errors import ConfigError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.logs import configure_logs
from kvwatch.observatory.part import Part
from kvwatch.observatory.plan import Built, Subject, plan_observatory
from kvwatch.observatory.settings import ObservatorySettings
from kvwatch.sockets import bind
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.adapter import DEFAULT_MAX_ADAPTERS, DEFAULT_MAX_RANK
from kvwatch_engine.contracts.cache import KVCacheSpec, KVDtype, KVGroup
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.settings import EngineSettings, PreemptionMode, VictimPolicy
from kvwatch_engine.contracts.tenant import tenant_salt
from kvwatch_engine.engine import Engine
from kvwatch_engine.live import LiveEngine, LiveJournal, RebuildLimits
from kvwatch_engine.memory.sizing import default_num_blocks, most_blocks_of_sequence, parse_watermark, watermark_ratio
from kvwatch_engine.memory.tiers.tiers import DEFAULT_TRANSFER_SECONDS, TierSettings
from kvwatch_engine.serve_admin import declared, tokenize_as_completions
from kvwatch_engine.serve_images import image_settings
from kvwatch_engine.serve_lora import adapter_options, allowing_series, lora_settings
from kvwatch_engine.serve_signals import DumpSignal, dump_on_signal
from kvwatch_engine.serve_tiers import served_groups, tier_settings, tiers_factory
from kvwatch_engine.threads import bound_spinning

if TYPE_CHECKING:
    from kvwatch_engine.model.loader import LoadedModel
    from kvwatch_engine.model.runner import ModelRunner
    from kvwatch_engine.server import OutputDispatcher

_STREAM_START_SECONDS = 5.0
"""What gRPC gets to begin before the server says that it is ready."""

logger = structlog.get_logger(__name__)


class ServeSettings(ObservatorySettings, frozen=True, kw_only=True):
    """Settings of `kvwatch serve`; docs/configuration.md is derived from this class."""

    model: Annotated[str, setting("Model: `embedded`, a Hugging Face folder or hub name, or a .gguf file.")] = (
        "embedded"
    )
    cache_dir: Annotated[str | None, setting("Folder of converted models; default: ~/.cache/kvwatch.")] = None
    served_model_name: Annotated[str | None, setting("Name under which the API offers the model.")] = None
    host: Annotated[str, setting("Address of the API.")] = "127.0.0.1"
    port: Annotated[int, setting("Port of the API; 0 takes a free one.", minimum=0, maximum=65_535)] = 8000
    api_key_file: Annotated[
        str | None, setting("TOML file of API keys with their tenants; without it everybody may use the API.")
    ] = None
    block_size: Annotated[int, setting("Tokens in one block.", minimum=1, maximum=1024)] = 16
    num_blocks: Annotated[int | None, setting("Blocks of the pool, the null block included.", minimum=2)] = None
    kv_memory: Annotated[str | None, setting("Memory of the pool, such as 4GiB, instead of --num-blocks.")] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], setting("Type that the model computes in.")] = "auto"
    kv_dtype: Annotated[
        KVDtype, setting("Type of the cache: `auto` is the model's; int8 and fp8 hold two to four times the tokens.")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], setting("Where the model runs; auto: on a GPU if there is one, CUDA or ROCm.")
    ] = "auto"
    max_model_len: Annotated[int | None, setting("Longest sequence in tokens; default: the model's.", minimum=2)] = None
    max_num_seqs: Annotated[int, setting("Most sequences in one step.", minimum=1, maximum=4096)] = 64
    max_batch_tokens: Annotated[int, setting("Most tokens in one step.", minimum=1)] = 256
    max_prefill_chunk: Annotated[int | None, setting("Most tokens of one sequence in one step.", minimum=1)] = None
    max_queued_requests: Annotated[int, setting("Waiting requests beyond this get 429.", minimum=1)] = 1024
    max_queued_tokens: Annotated[int, setting("Waiting prompt tokens beyond this get 429.", minimum=1)] = 1_048_576
    watermark: Annotated[str, setting("Blocks kept free at admission: 0.02 is a ratio, 8 are blocks.")] = "0.02"
    reserve_prompt: Annotated[
        bool, setting("Admit a request only when all its tokens fit at once; else its first chunk is enough.")
    ] = True
    priority_aging_seconds: Annotated[
        float,
        setting("A request of priority p waits as if it had come p times so much later; 0: never ages.", minimum=0),
    ] = 30.0
    deadline_seconds: Annotated[
        float | None, setting("Requests end with an error after this time; they may ask for less.", minimum=0.001)
    ] = None
    preemption_mode: Annotated[
        PreemptionMode, setting("What becomes of K/V whose blocks are taken; auto: what is cheaper, as measured.")
    ] = "auto"
    victim_policy: Annotated[
        VictimPolicy, setting("Who yields when blocks are short; low priorities always come first.")
    ] = "newest"
    protect_after_preemptions: Annotated[
        int, setting("A request that was preempted so often yields last of its priority.", minimum=1)
    ] = 3
    host_memory: Annotated[
        str | None, setting("Host memory for swapped requests and evicted prefixes, such as 4GiB; default: none.")
    ] = None
    disk_dir: Annotated[
        str | None, setting("Folder for prefixes that the host or the device evicts; what is stale in it is removed.")
    ] = None
    disk_bytes: Annotated[str | None, setting("Most bytes in --disk-dir, such as 100GiB.")] = None
    swap_bandwidth: Annotated[
        str | None, setting("Limit of the link to the device a second, such as 100MiB, to stand for a slower one.")
    ] = None
    transfer_seconds: Annotated[
        float, setting("A transfer between tiers that takes longer has failed: recompute.", minimum=0.01)
    ] = DEFAULT_TRANSFER_SECONDS
    prefix_cache: Annotated[bool, setting("Reuse the blocks of known prefixes.")] = True
    strict_prefix_cache: Annotated[
        bool, setting("Keep the token ids of stored blocks and compare them on a hit; not with tiers.")
    ] = False
    max_pinned_ratio: Annotated[
        float, setting("Part of the pool that pinned prefixes may take.", minimum=0, maximum=0.95)
    ] = 0.5
    lora: Annotated[
        tuple[str, ...], setting("LoRA adapter as NAME=DIR, in PEFT's format, served as model NAME; repeatable.")
    ] = ()
    lora_dir: Annotated[
        str | None, setting("Adapters may be loaded from beneath it through the API; default: none may.")
    ] = None
    max_loras: Annotated[int, setting("Most LoRA adapters in memory.", minimum=1, maximum=256)] = DEFAULT_MAX_ADAPTERS
    max_lora_rank: Annotated[int, setting("Highest rank of a LoRA adapter.", minimum=1, maximum=512)] = DEFAULT_MAX_RANK
    allow_rebuild: Annotated[
        bool,
        setting("Let block size and type of the cache be changed while requests run: steps stand still meanwhile."),
    ] = False
    max_rebuild_pause: Annotated[
        float, setting("Seconds for which steps may stand still for that, as estimated.", minimum=0.01, maximum=3600)
    ] = 10.0
    rebuild_cooldown: Annotated[float, setting("Seconds between two such changes.", minimum=0, maximum=86_400)] = 60.0
    max_images: Annotated[int, setting("Most images of one request, where the model takes images.", minimum=0)] = 8
    max_image_bytes: Annotated[str, setting("Most bytes of all images of one request, as files.")] = "10MiB"
    max_image_pixels: Annotated[int, setting("Most pixels of one image.", minimum=1)] = 16_777_216
    image_cache: Annotated[str, setting("Memory for encoded images, kept for requests that show them again.")] = (
        "256MiB"
    )
    drain_seconds: Annotated[
        float, setting("Time that requests get to finish on SIGTERM.", minimum=0, maximum=86_400)
    ] = 30.0
    stall_seconds: Annotated[float, setting("A step longer than this fails /health.", minimum=1, maximum=86_400)] = 30.0
    engine_name: Annotated[str, setting("Stable name of this engine in all metrics.")] = "kvwatch"
    dp_rank: Annotated[int, setting("Rank among data-parallel replicas.", minimum=0)] = 0
    vllm_aliases: Annotated[bool, setting("Offer metrics under vLLM's names as well.")] = False
    kv_events: Annotated[str | None, setting("Publish KV events, with token ids, such as tcp://*:5557.")] = None
    kv_events_replay: Annotated[str | None, setting("Answer replays of KV events, such as tcp://*:5657.")] = None
    kv_events_topic: Annotated[str, setting("Topic of KV events.")] = ""
    kv_events_hashes: Annotated[
        Literal["int", "bytes"], setting("Hashes of KV events: 64-bit integers or digests.")
    ] = "int"
    kv_events_socket: Annotated[
        Literal["auto", "bind", "connect"], setting("Whether --kv-events is bound; auto: if it has *, :: or 0.0.0.0.")
    ] = "auto"
    log_prompts: Annotated[bool, setting("Write prompt texts to the log.")] = False


class ServeCommand:
    """The command `serve`."""

    name = "serve"
    help = "serve a model: OpenAI-compatible API, metrics, everything in one process"
    settings = ServeSettings

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add one flag for each setting."""
        add_flags(parser, ServeSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Serve until SIGTERM or SIGINT."""
        resolved = resolve(ServeSettings, args)
        settings = resolved.settings
        configure_logs(settings.log_format, settings.log_level, log_prompts=settings.log_prompts)
        with dump_on_signal() as dumps:
            serve(resolved, dumps)
        return 0


COMMAND = ServeCommand()


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of a running server."""

    model: ModelInfo
    engine: Engine
    built: Built


def serve(resolved: Resolved[ServeSettings], dumps: DumpSignal) -> None:
    """Load the model, then serve until a signal comes. Main thread only.

    Args:
        resolved: What was set, and where.
        dumps: Is told the recorder that SIGUSR2 asks.

    Raises:
        ConfigError: a setting is wrong, or two contradict each other.
        ModelError: the model cannot be loaded.
        AdapterError: a LoRA adapter cannot be loaded.
        ExporterError: a port is taken.
    """
    settings = resolved.settings
    started = time.monotonic()
    _raise_open_files_limit()
    from kvwatch_engine.model.sources import default_cache_dir

    cache_dir = Path(settings.cache_dir) if settings.cache_dir else default_cache_dir()
    # Ports and files first: whoever mistyped one should not wait for a model.
    loras = lora_settings(settings)
    plan = plan_observatory(allowing_series(settings, loras), f"{settings.engine_name}.{settings.dp_rank}", cache_dir)
    tiers = tier_settings(settings)
    images = image_settings(settings)
    log = EventLog()
    kv_events = make_kv_events(settings, log.clock)
    bound_spinning()  # before torch is imported
    with bind(_join(settings.host, settings.port), "--host and --port") as bound:
        from kvwatch.http_protocol import BoundedRequestProtocol
        from kvwatch_engine.server import OutputDispatcher, ServerSettings, create_app
        from kvwatch_engine.server.adapter_desk import AdapterDesk
        from kvwatch_engine.server.api_keys import ApiKeys
        from kvwatch_engine.server.runtime import make_server, serve_until_signal

        api_keys = ApiKeys(settings.api_key_file) if settings.api_key_file is not None else None
        model = _load_model(settings, cache_dir)
        images.bound_cache(model)
        dispatcher = OutputDispatcher()
        engine = _make_engine(settings, tiers, model, log, dispatcher)
        rebuilds = RebuildLimits(settings.max_rebuild_pause, settings.rebuild_cooldown)
        journal = _take_journal(settings, cache_dir)
        control = LiveEngine(
            engine,
            rebuilds if settings.allow_rebuild else None,
            salt_of=api_keys.salt_of if api_keys is not None else tenant_salt,
            journal=journal,
        )
        adapters = AdapterDesk()
        subject = Subject(
            log,
            control,
            EngineIdentity(settings.engine_name, settings.dp_rank, model.info.name),
            config=shown_settings(settings),
            api=(settings.host, settings.port or None),
            live=control,
            prefixes=control,
            adapters=adapters,
            declared=declared(resolved),
            config_file=resolved.path,
            tokenize=tokenize_as_completions(model.info.folder),
        )
        built = plan.build(subject, further=kv_events, has_vllm_aliases=settings.vllm_aliases)
        for key, outside in built.outside.items():
            control.attach(key, outside)
        app = create_app(
            engine,
            dispatcher,
            model.info,
            images.limit(ServerSettings(drain_seconds=settings.drain_seconds, log_prompts=settings.log_prompts)),
            metrics_app=built.observatory.metrics_app,
            api_keys=api_keys,
            lora=adapter_options(settings, loras, model.adapters),
        )
        serving = Serving(model.info, engine, built)

        def on_ready() -> None:
            adapters.open(app.state.adapters)
            _announce(settings, serving, bound.getsockname()[1], time.monotonic() - started)

        try:
            engine.start()
            built.observatory.start()
            if built.stream is not None:
                built.stream.is_serving.wait(_STREAM_START_SECONDS)
            dumps.attach(built.recorder)
            until_signal = serve_until_signal(
                make_server(app, BoundedRequestProtocol),
                bound,
                engine,
                app.state.drain,
                settings.drain_seconds,
                on_ready,
            )
            asyncio.run(until_signal)
        finally:
            engine.stop()
            built.observatory.stop()
            logger.info("stopped")


def _take_journal(settings: ServeSettings, cache_dir: Path) -> LiveJournal | None:
    """Say what the last server at this address had changed live; return where that is noted. None at any free port."""
    if settings.port == 0:
        return None
    server = f"{settings.engine_name}.{settings.dp_rank}.{_join(settings.host, settings.port)}"
    journal = LiveJournal(cache_dir, server)
    journal.take()
    return journal


def _load_model(settings: ServeSettings, cache_dir: Path) -> "LoadedModel":
    from kvwatch_engine.model.devices import choose_device
    from kvwatch_engine.model.loader import load_model

    logger.info("loading", model=settings.model)
    return load_model(
        settings.model,
        dtype=settings.dtype,
        served_name=settings.served_model_name,
        cache_dir=cache_dir,
        device=choose_device(settings.device),
    )


def _make_engine(
    settings: ServeSettings,
    tiers: TierSettings,
    model: "LoadedModel",
    log: EventLog,
    dispatcher: "OutputDispatcher",
) -> Engine:
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
        ConfigError: settings contradict each other or the model.
    """
    from kvwatch_engine.memory.kv_cache import KVCache
    from kvwatch_engine.model.devices import free_bytes
    from kvwatch_engine.model.runner import ModelRunner

    spec = model.cache_spec(settings.block_size, settings.kv_dtype)
    groups = served_groups(tiers, model.info)
    engine_settings = make_engine_settings(settings, model.info, spec, groups, free_bytes(model.device))
    runner = ModelRunner(model, KVCache(spec, engine_settings.num_blocks, model.device))
    runner.warm_up(engine_settings.max_batch_tokens)
    return runner, engine_settings


def make_engine_settings(
    settings: ServeSettings, model: ModelInfo, spec: KVCacheSpec, groups: tuple[KVGroup, ...], free_bytes: int
) -> EngineSettings:
    """Return the engine's settings for a model, filling in what was left open; `free_bytes` is what the pool may take.

    Raises:
        ConfigError: settings contradict each other or the model.
    """
    if settings.num_blocks is not None and settings.kv_memory is not None:
        raise ConfigError("--num-blocks and --kv-memory both say how large the pool is; give one of them")
    if settings.max_batch_tokens < settings.max_num_seqs:
        raise ConfigError(
            f"--max-batch-tokens {settings.max_batch_tokens} is less than --max-num-seqs {settings.max_num_seqs}; "
            "each running sequence needs a token a step: raise one or lower the other"
        )
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
        weights_fingerprint=model.weights_fingerprint,
        kv_dtype=settings.kv_dtype,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        stall_seconds=settings.stall_seconds,
        emit_token_ids=settings.kv_events is not None,  # the wire demands them
    )


def make_kv_events(settings: ServeSettings, clock: Clock) -> list[Part]:
    """Return the publisher of KV events, or nothing if none are published.

    Raises:
        ConfigError: an endpoint is malformed, out of range, or collides with another.
        ExporterError: an endpoint is taken or cannot be used.
    """
    if settings.kv_events is None:
        if settings.kv_events_replay is not None:
            raise ConfigError("--kv-events-replay replays what --kv-events publishes; give both or neither")
        return []
    from kvwatch.exporters.kv_events.part import KVEvents, KVEventsSettings  # ZeroMQ only when it is used

    found = KVEventsSettings(
        live=settings.kv_events,
        replay=settings.kv_events_replay,
        topic=settings.kv_events_topic,
        hash_kind=settings.kv_events_hashes,
        mode=settings.kv_events_socket,
        dp_rank=settings.dp_rank,
    )
    publisher = KVEvents(found, clock)
    publisher.check()
    return [publisher]


def _raise_open_files_limit() -> None:
    """Allow as many connections as the system does: the usual soft limit of 1,024 files is a few idle clients away."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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


def _announce(settings: ServeSettings, serving: Serving, port: int, seconds: float) -> None:
    model, engine = serving.model, serving.engine.settings
    metrics, stream, admin = serving.built.observatory.metrics_address, serving.built.stream, serving.built.admin
    capacity = engine.num_blocks - 1
    logger.info(
        "ready",
        version=__version__,
        api=f"http://{_join(settings.host, port)}/v1",
        metrics=f"http://{_join(*metrics)}/metrics" if metrics else "off",
        admin=f"http://{_join(*admin.address)}/admin/v1" if admin is not None and admin.address is not None else "off",
        grpc=_join(*stream.address) if stream is not None and stream.address is not None else "off",
        model=model.name,
        dtype=model.dtype,
        dtype_reason=model.dtype_reason,
        kv_dtype=settings.kv_dtype,
        blocks=capacity,
        block_size=engine.block_size,
        kv_groups=_shown_groups(engine.groups),
        token_capacity=capacity * engine.block_size // len(engine.groups),
        max_model_len=serving.engine.max_model_len,
        seconds=round(seconds, 1),
    )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _shown_groups(groups: Sequence[KVGroup]) -> str:
    """Return what the start message says of KV groups, such as `0: 3 layers, all tokens; 1: 3 layers, window 512`."""
    return "; ".join(
        f"{number}: {len(group.layers)} layers, {'all tokens' if group.window is None else f'window {group.window}'}"
        for number, group in enumerate(groups)
    )
