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
from typing import TYPE_CHECKING

import structlog

from kvwatch import __version__
from kvwatch.config import Resolved, add_flags, resolve, shown_settings
from kvwatch.errors import ConfigError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.logs import configure_logs
from kvwatch.observatory.part import Part
from kvwatch.observatory.plan import Built, Subject, plan_observatory
from kvwatch.sockets import bind
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import KVGroup
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.tenant import tenant_salt
from kvwatch_engine.engine import Engine
from kvwatch_engine.huge_pages import use_huge_pages
from kvwatch_engine.live import LiveEngine, LiveJournal, RebuildLimits
from kvwatch_engine.serve.admin import declared, tokenize_as_completions
from kvwatch_engine.serve.api import api_limits
from kvwatch_engine.serve.asked import asked_model
from kvwatch_engine.serve.engine import load, make_engine, refuse_contradictions
from kvwatch_engine.serve.lora import adapter_options, allowing_series, lora_settings
from kvwatch_engine.serve.settings import ServeSettings
from kvwatch_engine.serve.signals import DumpSignal, dump_on_signal
from kvwatch_engine.serve.tiers import tier_settings
from kvwatch_engine.threads import bound_spinning, bound_turns

if TYPE_CHECKING:
    pass

_STREAM_START_SECONDS = 5.0
"""What gRPC gets to begin before the server says that it is ready."""

logger = structlog.get_logger(__name__)


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
    cache_dir = settings.cache_folder()
    # Numbers, ports and files first: whoever mistyped one should not wait for a model.
    refuse_contradictions(settings)
    loras = lora_settings(settings)
    plan = plan_observatory(allowing_series(settings, loras), f"{settings.engine_name}.{settings.dp_rank}", cache_dir)
    tiers = tier_settings(settings)
    limits = api_limits(settings)
    asked = asked_model(settings, loras)
    log = EventLog()
    kv_events = make_kv_events(settings, log.clock)
    _prepare_process()
    with bind(_join(settings.host, settings.port), "--host and --port") as bound:
        from kvwatch.http_protocol import BoundedRequestProtocol
        from kvwatch_engine.server import OutputDispatcher, ServerSettings, create_app
        from kvwatch_engine.server.adapter_desk import AdapterDesk
        from kvwatch_engine.server.api_keys import ApiKeys
        from kvwatch_engine.server.runtime import make_server, serve_until_signal

        api_keys = ApiKeys(settings.api_key_file) if settings.api_key_file is not None else None
        model = load(settings, asked, cache_dir)
        limits.bound_image_cache(model)
        dispatcher = OutputDispatcher()
        engine = make_engine(settings, tiers, model, log, dispatcher)
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
            tokenize=tokenize_as_completions(model.info),
        )
        built = plan.build(subject, further=kv_events, has_vllm_aliases=settings.vllm_aliases)
        for key, outside in built.outside.items():
            control.attach(key, outside)
        app = create_app(
            engine,
            dispatcher,
            model.info,
            limits.limit(
                ServerSettings(
                    drain_seconds=settings.drain_seconds,
                    log_prompts=settings.log_prompts,
                    tool_parser=settings.tool_parser,
                )
            ),
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
        architecture=model.architecture,
        implementation=model.implementation,
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


def _prepare_process() -> None:
    """Set what torch and the interpreter read of their surroundings, before torch is imported."""
    bound_spinning()
    bound_turns()
    use_huge_pages()
