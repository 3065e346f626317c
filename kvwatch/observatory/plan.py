"""From settings to an observatory with its parts: first checked, then built.

Checking comes before an engine is loaded: whoever mistyped a port should not wait for a model. gRPC, OpenTelemetry
and the recorder are imported only where the settings want them.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvwatch.config import parse_bytes
from kvwatch.control import (
    AdapterControl,
    EngineControl,
    LiveControl,
    OutsideSetting,
    PrefixControl,
    SettingKey,
    SettingValue,
)
from kvwatch.errors import ConfigError
from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import COMMON_LABELS, EngineIdentity
from kvwatch.exporters.otel.settings import OtelSettings, parse_endpoint, parse_headers
from kvwatch.exporters.prometheus.settings import series_settings
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.series import SeriesSettings
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.logs import LogLevel
from kvwatch.observatory.desk import DiagnosisDesk
from kvwatch.observatory.observatory import METRICS_SETTING, Observatory
from kvwatch.observatory.part import Part
from kvwatch.observatory.settings import FLIGHT_FOLDER, ObservatorySettings
from kvwatch.sockets import bind
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot

if TYPE_CHECKING:
    from kvwatch.admin.engines import DeclaredSetting
    from kvwatch.admin.part import AdminPart
    from kvwatch.admin.settings import AdminOptions
    from kvwatch.exporters.otel.part import OtelPart
    from kvwatch.exporters.otel.sampling import Sampler
    from kvwatch.recorder.part import RecorderPart, RecorderSettings
    from kvwatch.stream.access import StreamOptions
    from kvwatch.stream.server import StreamServer

OFF = "off"


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine that is to be watched."""

    log: EventLog
    control: EngineControl
    identity: EngineIdentity
    config: Mapping[str, str]
    """Its settings as text, without secrets, for the heads of recordings."""
    api: tuple[str, int | None] = ("", None)
    """Host and port of its API, for spans; none while unknown."""
    live: LiveControl | None = None
    """Looks into it and changes it; none for an engine of another project."""
    prefixes: PrefixControl | None = None
    """Pins and the reset of its prefix cache; none where that is not possible."""
    adapters: AdapterControl | None = None
    """Its LoRA adapters; none where that is not possible."""
    declared: "Sequence[DeclaredSetting]" = ()
    """Its settings with the source of each, for the admin API."""
    config_file: str | None = None
    """File that its settings come from; none if there is no such file."""
    tokenize: Callable[[str], list[int]] | None = None
    """Turns texts into tokens as its prompts are. Any thread."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels of all its series, by name."""
        return dict(zip(COMMON_LABELS, self.identity.labels, strict=True))


class TraceRatio:
    """The part of the traces that is exported, as a setting that can change live. Any thread."""

    def __init__(self, sampler: "Sampler") -> None:
        self._sampler = sampler

    def get(self) -> SettingValue:
        """Return the ratio."""
        return self._sampler.ratio

    def set(self, value: SettingValue) -> None:
        """Decide by this ratio, 0 to 1, from the next trace on."""
        assert isinstance(value, int | float), "its type was checked"
        self._sampler.ratio = float(value)


class Watched(Protocol):
    """An engine that is watched: `Observatory` of one engine, `Watch` of one among many."""

    @property
    def mirror(self) -> Mirror:
        """Its ledger and counters."""
        ...

    def samples(self) -> Iterable[Sample | HistogramSample]:
        """Return everything that the metrics page shows of it. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Live:
    """What parts read of the engine beside them. Made before that is watched, called when the parts run."""

    watched: Callable[[], Watched]
    state: Callable[[], EngineSnapshot] | None = None
    """Gives the state where the ledger does not know all of it, as of a foreign engine."""


@dataclass(frozen=True, slots=True)
class Built:
    """An observatory that was not started yet, and those of its parts that others speak to."""

    observatory: Observatory
    recorder: "RecorderPart | None"
    stream: "StreamServer | None"
    desk: DiagnosisDesk
    """Says what is the matter with the engine."""
    admin: "AdminPart | None" = None
    outside: Mapping[SettingKey, OutsideSetting] = field(default_factory=dict)
    """Settings of the observatory and the process that can change live."""


@dataclass(frozen=True, slots=True)
class ObservatoryPlan:
    """Checked settings; nothing is open yet. Made by `plan_observatory`."""

    settings: ObservatorySettings
    series: SeriesSettings
    stream: "StreamOptions | None"
    recorder: "RecorderSettings | None"
    admin: "AdminOptions | None"

    def build(self, subject: Subject, *, further: Sequence[Part] = (), has_vllm_aliases: bool = False) -> Built:
        """Make the observatory of one engine.

        Args:
            subject: The engine.
            further: Parts that only this engine has.
            has_vllm_aliases: Whether the metrics page offers vLLM's names too.

        Raises:
            ConfigError: a file that a setting names cannot be used.
        """
        exemplars = ExemplarStore(self.series.thresholds)
        epoch = uuid.uuid4().hex
        live = Live(lambda: observatory)
        recorder = self.make_recorder(self.recorder, subject, epoch, live)
        otel = self.make_otel(subject, exemplars, live)
        desk = DiagnosisDesk(
            lambda: live.watched().samples(), lambda: subject.identity, subject.log.clock,
            is_known=lambda: bool(observatory.view.gauges),
        )  # fmt: skip
        admin = self._make_admin(subject, epoch, lambda: observatory.view, desk, recorder)
        stream = self._make_stream(subject, epoch, admin)
        observatory = Observatory(
            subject.log,
            subject.control,
            subject.identity,
            metrics_listen=unless_off(self.settings.metrics_listen),
            parts=[*further, desk, *(part for part in (recorder, stream, otel, admin) if part is not None)],
            series=self.series,
            exemplars=exemplars,
            has_vllm_aliases=has_vllm_aliases,
        )
        outside: dict[SettingKey, OutsideSetting] = {"log_level": LogLevel()}
        if otel is not None:
            outside["trace_ratio"] = TraceRatio(otel.sampler)
        return Built(observatory, recorder, stream, desk, admin, outside)

    @staticmethod
    def make_recorder(
        settings: "RecorderSettings | None", subject: Subject, epoch: str, live: Live
    ) -> "RecorderPart | None":
        """Return what records an engine; none if there are no settings."""
        if settings is None:
            return None
        from kvwatch.recorder.header import HeaderSource
        from kvwatch.recorder.part import RecorderPart

        headers = HeaderSource(
            subject.log.clock,
            epoch=epoch,
            identity=subject.labels,
            config=dict(subject.config),
            has_token_ids=settings.keep_token_ids,
        )
        return RecorderPart(settings, headers, lambda: live.watched().mirror, take_state=live.state)

    def _make_stream(self, subject: Subject, epoch: str, admin: "AdminPart | None") -> "StreamServer | None":
        if self.stream is None:
            return None
        from kvwatch.stream.server import StreamServer

        services = () if admin is None else (admin.grpc_service(),)
        return StreamServer(subject.log, subject.control, self.stream, subject.labels, epoch, services)

    def _make_admin(
        self,
        subject: Subject,
        epoch: str,
        view: Callable[[], View],
        desk: DiagnosisDesk,
        recorder: "RecorderPart | None",
    ) -> "AdminPart | None":
        if self.admin is None:
            return None
        from kvwatch.admin.engines import AdminEngine, AdminEngines
        from kvwatch.admin.part import AdminPart

        engines = AdminEngines()
        engines.add(
            AdminEngine(
                labels=subject.labels,
                log=subject.log,
                view=view,
                control=subject.control,
                live=subject.live,
                prefixes=subject.prefixes,
                adapters=subject.adapters,
                tokenize=subject.tokenize,
                dump_flight=None if recorder is None else recorder.trigger,
                diagnose=desk.diagnosis,
                declared=subject.declared,
                epoch=epoch,
            )
        )
        may_persist = self.settings.admin_persist
        options = replace(self.admin, config_file=subject.config_file if may_persist else None)
        return AdminPart(options, engines)

    def make_otel(
        self, subject: Subject, exemplars: ExemplarStore, live: Live, *, may_export_logs: bool = True
    ) -> "OtelPart | None":
        """Return what exports an engine's traces and metrics over OTLP; none if that is not wanted.

        Log lines are the whole process's: only one of its engines may export them.
        """
        settings = self.settings
        if settings.otlp_endpoint is None:
            return None
        from kvwatch.exporters.otel.part import OtelPart

        host, port = subject.api
        told = OtelSettings(
            endpoint=settings.otlp_endpoint,
            protocol=settings.otlp_protocol,
            headers=settings.otlp_headers or "",
            trace_ratio=settings.trace_ratio,
            slow_seconds=settings.trace_slow_seconds,
            export_logs=settings.otlp_logs and may_export_logs,
            server_address=host,
            server_port=port,
        )
        return OtelPart(told, subject.identity, subject.log.clock, lambda: live.watched().samples(), exemplars)


def plan_observatory(settings: ObservatorySettings, stem: str, cache_dir: Path) -> ObservatoryPlan:
    """Check settings. What has to be opened to see that it can be is closed again.

    Args:
        settings: What was set.
        stem: Names the engine in the names of recordings.
        cache_dir: Folder in which the flight recorder lies unless the settings say otherwise.

    Raises:
        ConfigError: a setting is malformed, or two contradict each other.
        ExporterError: the address of a listener cannot be had, or a folder cannot be written to.
    """
    listen = unless_off(settings.metrics_listen)
    if listen is not None:
        bind(listen, METRICS_SETTING).close()
    thresholds = {"--slo-ttft": settings.slo_ttft, "--slo-itl": settings.slo_itl, "--slo-e2e": settings.slo_e2e}
    series = series_settings(settings.metrics_tenants, settings.metrics_loras, thresholds)
    if settings.otlp_endpoint is not None:
        parse_endpoint(settings.otlp_endpoint, settings.otlp_protocol)
        parse_headers(settings.otlp_headers or "")
    return ObservatoryPlan(
        settings,
        series,
        _stream_options(settings),
        _recorder_settings(settings, stem, cache_dir),
        _admin_options(settings),
    )


def _stream_options(settings: ObservatorySettings) -> "StreamOptions | None":
    listen = unless_off(settings.grpc_listen)
    if listen is None:
        return None
    from kvwatch.stream.access import StreamOptions, check_options

    options = StreamOptions(
        listen=listen,
        token_file=settings.grpc_token_file,
        certificate=settings.grpc_cert,
        key=settings.grpc_key,
    )
    check_options(options)
    return options


def _admin_options(settings: ObservatorySettings) -> "AdminOptions | None":
    listen = unless_off(settings.admin_listen)
    if listen is None:
        return None
    from kvwatch.admin.settings import AdminOptions, check_options, parse_hosts

    options = AdminOptions(
        listen=listen,
        token_file=settings.admin_token_file,
        hosts=parse_hosts(settings.admin_hosts),
        audit_file=settings.admin_audit_file,
    )
    check_options(options)
    return options


def _recorder_settings(settings: ObservatorySettings, stem: str, cache_dir: Path) -> "RecorderSettings | None":
    if settings.record_dir == "":
        raise ConfigError("--record-dir is empty; name a folder, or leave it out to record nothing")
    if settings.record_dir is None and settings.flight_dir == OFF:
        return None
    from kvwatch.recorder.part import RecorderSettings, check_folders, check_settings

    flight_dir = cache_dir / FLIGHT_FOLDER
    if settings.flight_dir is not None:
        flight_dir = _folder(settings.flight_dir, "--flight-dir")
    found = RecorderSettings(
        stem=stem,
        record_dir=None if settings.record_dir is None else _folder(settings.record_dir, "--record-dir"),
        record_bytes=parse_bytes(settings.record_bytes, "--record-bytes"),
        file_bytes=parse_bytes(settings.record_file_bytes, "--record-file-bytes"),
        flight_dir=None if settings.flight_dir == OFF else flight_dir,
        is_flight_dir_asked_for=settings.flight_dir is not None,
        flight_bytes=parse_bytes(settings.flight_bytes, "--flight-bytes"),
        flight_seconds=settings.flight_seconds,
        slow_step_seconds=settings.flight_slow_step,
        keep_token_ids=settings.record_token_ids,
    )
    check_settings(found)
    check_folders(found)
    return found


def _folder(text: str, flag: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{flag}: the ~ of {text!r} names nobody here; write the folder in full") from error


def unless_off(listen: str) -> str | None:
    """Return the address to listen on, or none."""
    return None if listen == OFF else listen
