"""A running sidecar: sources bring ranks, each of which gets a ledger and parts of its own.

Imported when the command runs. See `kvwatch.sidecar` for its settings.
"""

import asyncio
import os
import resource
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import structlog

from kvwatch import __version__
from kvwatch.config import shown_settings
from kvwatch.errors import ConfigError
from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.insight.diagnosis import DiagnosisReport, EngineDiagnosis, Observation, Reading, diagnose
from kvwatch.ledger.pace import BESIDE_SECONDS, pause
from kvwatch.ledger.view import Sample
from kvwatch.observatory.desk import DiagnosisDesk
from kvwatch.observatory.fleet import Fleet, LabelledSample
from kvwatch.observatory.part import Part
from kvwatch.observatory.plan import Live, ObservatoryPlan, Subject, plan_observatory, unless_off
from kvwatch.observatory.watch import Watch, WatchOptions
from kvwatch.sidecar import SidecarSettings
from kvwatch.sources.engines import EngineSpec, make_source, parse_engines
from kvwatch.sources.source import Rank, Source
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.clock import Clock, SystemClock

if TYPE_CHECKING:
    from kvwatch.admin.engines import AdminEngines
    from kvwatch.admin.part import AdminPart
    from kvwatch.admin.reach import UnreachedEngine
    from kvwatch.exporters.kv_events.part import KVEvents
    from kvwatch.recorder.part import RecorderPart, RecorderSettings
    from kvwatch.stream.engines import StreamedEngines
    from kvwatch.stream.server import TelemetryServer

logger = structlog.get_logger(__name__)

WANTED_FILES = 65_536


class Sidecar:
    """Watches the engines that it was given and no others. `start` and `stop` on one thread.

    Args:
        settings: What was set.
        make: Makes the source of an engine.

    Raises:
        ConfigError: a setting is malformed, or two contradict each other.
        ExporterError: the address of a listener cannot be had, or a folder cannot be written to.
    """

    def __init__(self, settings: SidecarSettings, make: Callable[[EngineSpec], Source] = make_source) -> None:
        specs = parse_engines(settings.engine)
        if settings.kv_events is not None and len(specs) > 1:
            raise ConfigError(
                f"--kv-events publishes one engine, but {len(specs)} are watched; start a sidecar for each"
            )
        if settings.kv_events is None and settings.kv_events_replay is not None:
            raise ConfigError("--kv-events-replay replays what --kv-events publishes; give both or neither")
        self._settings = settings
        self._plan: ObservatoryPlan = plan_observatory(settings, "sidecar", settings.cache_folder())
        if settings.kv_events is not None:
            _make_kv_events(settings, 0, SystemClock(), lambda: 0).check()
        self.sources: list[Source] = [make(spec) for spec in specs]
        """What reads each engine."""
        self._known: set[tuple[str, int]] = set()
        self._admin_engines, self.admin = _make_admin(self._plan)
        if self._admin_engines is not None:
            self._admin_engines.diagnoses = lambda: self.diagnoses().engines
            self._admin_engines.unreached = self._list_unreached
        self._engines, self.stream = _make_stream(self._plan, self.admin)
        self.recorders: list[RecorderPart] = []
        """One for each rank, if anything is recorded."""
        self.desks: list[DiagnosisDesk] = []
        """One for each rank: says what is the matter with it."""
        self.fleet = Fleet(
            metrics_listen=unless_off(settings.metrics_listen),
            runners=[*(self._runner(source) for source in self.sources), self._note_reaches],
            parts=[part for part in (self.stream, self.admin) if part is not None],
            more=self._unreached,
        )

    def start(self) -> None:
        """Begin to listen and to look for the engines; returns when both have begun, whether engines are there or not.

        Raises:
            ExporterError: an address cannot be bound.
        """
        self.fleet.start()

    def stop(self) -> None:
        """End within some seconds: sources first, then what follows them. Safe twice."""
        self.fleet.stop()

    def diagnoses(self) -> DiagnosisReport:
        """Return what is to be said now of every rank, and of engines that were never reached. Any thread."""
        unreached: dict[tuple[str, str, str], list[Sample]] = {}
        for labels, sample in self._unreached():
            unreached.setdefault(labels, []).append(sample)
        never = [
            EngineDiagnosis(
                engine, int(dp_rank), model, diagnose(Observation(Reading(0.0, samples), Reading(1.0, samples)))
            )
            for (engine, dp_rank, model), samples in unreached.items()
        ]
        return DiagnosisReport((*(desk.diagnosis() for desk in tuple(self.desks)), *never))

    def dump(self) -> None:
        """Have all flight recorders written out. Any thread, and signal handlers."""
        for recorder in tuple(self.recorders):
            recorder.trigger("signal")

    # ------------------------------------------------------------ the fleet's thread

    def _runner(self, source: Source) -> Callable[[asyncio.Event], "asyncio.Future[None]"]:
        def run(stop: asyncio.Event) -> "asyncio.Future[None]":
            return asyncio.ensure_future(source.run(stop, lambda rank: self._add(source, rank)))

        return run

    def _add(self, source: Source, rank: Rank) -> None:
        name = (source.name, rank.dp_rank)
        if name in self._known:
            logger.warning("a rank was told twice and is watched once", engine=source.name, dp_rank=rank.dp_rank)
            return
        self._known.add(name)

        def identity() -> EngineIdentity:
            return EngineIdentity(source.name, rank.dp_rank, source.model_name)

        subject = Subject(rank.log, rank.control, identity(), config=shown_settings(self._settings))
        epoch, exemplars = uuid.uuid4().hex, ExemplarStore(self._plan.series.thresholds)
        desk = DiagnosisDesk(lambda: watch.samples(), identity, rank.log.clock)  # noqa: PLW0108 - made below
        self.desks.append(desk)
        watch = Watch(
            rank.log,
            rank.control,
            identity,
            WatchOptions(
                period_seconds=BESIDE_SECONDS,
                parts=[desk, *self._make_parts(subject, rank, epoch, exemplars, lambda: watch)],
                series=self._plan.series,
                exemplars=exemplars,
                feeds=rank.feeds,
                samples=rank.samples,
                is_up=rank.is_up,
            ),
        )
        self.fleet.add(watch)
        if self._engines is not None:
            self._engines.add(rank.log, rank.control.snapshot, subject.labels, epoch)
        if self._admin_engines is not None:
            self._offer(rank, watch, subject.labels, epoch, desk)

    def _offer(self, rank: Rank, watch: Watch, labels: dict[str, str], epoch: str, desk: DiagnosisDesk) -> None:
        from kvwatch.admin.engines import AdminEngine

        assert self._admin_engines is not None
        self._admin_engines.add(
            AdminEngine(
                labels=labels,
                log=rank.log,
                view=watch.shown_view,
                control=rank.control,
                diagnose=desk.diagnosis,
                forward=rank.forward,
                why_not=rank.why_not,
                is_up=rank.is_up,
                epoch=epoch,
            )
        )

    def _make_parts(
        self, subject: Subject, rank: Rank, epoch: str, exemplars: ExemplarStore, watch: Callable[[], Watch]
    ) -> list[Part]:
        # The ledger of a foreign engine only counts: which hashes are resident its source knows.
        live = Live(watch, None if rank.feeds is None else rank.control.snapshot)
        recorder = self._plan.make_recorder(self._recorder_settings(subject), subject, epoch, live)
        if recorder is not None:
            self.recorders.append(recorder)
        otel = self._plan.make_otel(subject, exemplars, live, may_export_logs=len(self._known) == 1)
        kv_events = None
        if self._settings.kv_events is not None:
            kv_events = _make_kv_events(self._settings, rank.dp_rank, rank.log.clock, rank.block_size)
        return [part for part in (kv_events, recorder, otel) if part is not None]

    def _recorder_settings(self, subject: Subject) -> "RecorderSettings | None":
        found = self._plan.recorder
        if found is None:
            return None
        name = f"{subject.identity.engine}.{subject.identity.dp_rank}"
        return msgspec.structs.replace(
            found,
            stem=name,
            record_dir=found.record_dir / name if found.record_dir else None,
            flight_dir=found.flight_dir / name if found.flight_dir else None,
        )

    async def _note_reaches(self, stop: asyncio.Event) -> None:
        """Look once a second who is reached, so that the admin API can say since when."""
        engines = self._admin_engines
        while engines is not None and not stop.is_set():
            engines.look()
            await pause(stop)

    # ------------------------------------------------------------ engines that were never reached, on any thread

    def _waited_for(self) -> list[Source]:
        """Return the sources of which no rank is known."""
        reached = {name for name, _ in tuple(self._known)}
        return [source for source in self.sources if source.name not in reached]

    def _unreached(self) -> Iterator[LabelledSample]:
        """Tell the metrics of them."""
        for source in self._waited_for():
            labels = EngineIdentity(source.name, 0, source.model_name).labels
            yield labels, Sample(m.SOURCE_UP, (), 0)
            yield labels, Sample(m.SOURCE_COMPLETE, (), 0)

    def _list_unreached(self) -> "list[UnreachedEngine]":
        """Tell the admin API of them."""
        from kvwatch.admin.reach import UnreachedEngine

        return [UnreachedEngine(source.name, source.model_name) for source in self._waited_for()]


def run_until_signal(settings: SidecarSettings) -> None:
    """Watch until SIGTERM or SIGINT; a second one ends the process at once. Main thread only.

    Raises:
        ConfigError: a setting is malformed, or two contradict each other.
        ExporterError: the address of a listener cannot be had.
    """
    stop = threading.Event()

    def end(signum: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + signum)
        stop.set()

    _raise_file_limit()
    sidecar = Sidecar(settings)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, end)
    signal.signal(signal.SIGUSR2, lambda _signum, _frame: sidecar.dump())
    sidecar.start()
    try:
        metrics, stream, admin = sidecar.fleet.metrics_address, sidecar.stream, sidecar.admin
        logger.info(
            "ready",
            version=__version__,
            engines=[text.partition("=")[0] for text in settings.engine],
            metrics=f"http://{_join(*metrics)}/metrics" if metrics else "off",
            admin=f"http://{_join(*admin.address)}/admin/v1"
            if admin is not None and admin.address is not None
            else "off",
            grpc=_join(*stream.address) if stream is not None and stream.address is not None else "off",
        )
        stop.wait()
    finally:
        sidecar.stop()
        logger.info("stopped")


def _raise_file_limit() -> None:
    """Allow as many open files as the system lets: a rank of an engine takes four, and 1,024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _make_stream(
    plan: ObservatoryPlan, admin: "AdminPart | None"
) -> "tuple[StreamedEngines | None, TelemetryServer | None]":
    if plan.stream is None:
        return None, None
    from kvwatch.observatory.watch import always
    from kvwatch.stream.engines import StreamedEngines
    from kvwatch.stream.server import TelemetryServer

    engines = StreamedEngines(BESIDE_SECONDS)
    services = () if admin is None else (admin.grpc_service(),)
    return engines, TelemetryServer(plan.stream, engines, always, always, services)


def _make_admin(plan: ObservatoryPlan) -> "tuple[AdminEngines | None, AdminPart | None]":
    if plan.admin is None:
        return None, None
    from kvwatch.admin.engines import AdminEngines
    from kvwatch.admin.part import AdminPart

    engines = AdminEngines()
    return engines, AdminPart(plan.admin, engines)


def _make_kv_events(settings: SidecarSettings, dp_rank: int, clock: Clock, block_size: Callable[[], int]) -> "KVEvents":
    from kvwatch.exporters.kv_events.part import KVEvents, KVEventsSettings

    assert settings.kv_events is not None
    found = KVEventsSettings(
        live=settings.kv_events,
        replay=settings.kv_events_replay,
        topic=settings.kv_events_topic,
        hash_kind=settings.kv_events_hashes,
        mode=settings.kv_events_socket,
        dp_rank=dp_rank,
    )
    return KVEvents(found, clock, block_size=block_size)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
