"""The OpenAI server with an observatory that exports to a collector: everything real but the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builders import NullModel, make_settings
from openai_server import MODEL, RunningServer, make_model_info, serve

from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.otel.part import OtelPart
from kvwatch.exporters.otel.settings import OtelSettings
from kvwatch.observatory import Observatory
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.engine import Engine
from kvwatch_engine.server import OutputDispatcher, ServerSettings, create_app


class ObservedServer:
    """A server under test and what exports its telemetry."""

    def __init__(self, server: RunningServer, observatory: Observatory, part: OtelPart) -> None:
        self.server = server
        self.observatory = observatory
        self.part = part

    def dropped(self) -> dict[str, float]:
        """What each sender has lost."""
        return {
            sample.labels[0]: sample.value
            for sample in self.part.samples()
            if sample.metric.name == "telemetry_dropped"
        }


@contextmanager
def observed_server(
    folder: Path, model: NullModel, endpoint: str, engine_settings: dict[str, object] | None = None, **otel: object
) -> Iterator[ObservedServer]:
    """Serve the arithmetic model; export quickly. The observatory is stopped before the server."""
    values: dict[str, object] = {"batch_seconds": 0.02, "metrics_interval_seconds": 0.1, "export_timeout_seconds": 2.0}
    limits = make_settings(
        **{"vocab_size": model.vocab_size, "num_blocks": 257, "max_model_len": 512, **(engine_settings or {})}
    )
    model.block_size = limits.block_size
    log = EventLog()
    dispatcher = OutputDispatcher()
    engine = Engine(limits, model, log, dispatcher)
    identity = EngineIdentity("e", model_name=MODEL)
    exemplars = ExemplarStore()
    settings = OtelSettings(endpoint=endpoint, **{**values, **otel})  # type: ignore[arg-type]
    part = OtelPart(settings, identity, log.clock, lambda: observatory.samples(), exemplars)  # noqa: PLW0108 - not yet made
    observatory = Observatory(
        log,
        engine,
        identity,
        parts=[part],
        exemplars=exemplars,
        view_interval_seconds=0,
        render_interval_seconds=0,
    )
    app = create_app(
        engine, dispatcher, make_model_info(folder, model.vocab_size), ServerSettings(), observatory.metrics_app
    )
    with serve(engine, app, dispatcher, log) as running:
        observatory.start()
        try:
            yield ObservedServer(running, observatory, part)
        finally:
            observatory.stop()
