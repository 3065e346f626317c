"""The whole server on a real model, however small: real weights, the real runner, real HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builders import make_settings
from openai_server import PATIENT, RunningServer, serve

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.engine import Engine
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.server import OutputDispatcher, ServerSettings, create_app


@contextmanager
def model_server(
    folder: Path, server_settings: ServerSettings | None = None, **engine_settings: object
) -> Iterator[RunningServer]:
    """Serve the model in `folder` under the name `model`, in float32."""
    model = load_model(str(folder), dtype="float32", served_name="model")
    values: dict[str, object] = {
        "num_blocks": 257, "block_size": 8, "max_model_len": model.info.max_position, "max_batch_tokens": 64,
        "vocab_size": model.info.vocab_size, "eos_token_ids": model.info.eos_token_ids, "groups": model.info.groups,
        **engine_settings,
    }  # fmt: skip
    limits = make_settings(**values)
    dispatcher = OutputDispatcher()
    runner = ModelRunner(model, KVCache(model.cache_spec(limits.block_size), limits.num_blocks))
    log = EventLog()
    engine = Engine(limits, runner, log, dispatcher)
    with serve(
        engine,
        create_app(engine, dispatcher, model.info, server_settings or ServerSettings(guidance=PATIENT)),
        dispatcher,
        log,
    ) as running:
        yield running
