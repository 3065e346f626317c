"""The desk looks by itself, and has an answer when somebody asks."""

import asyncio
import time
from pathlib import Path

from builders import FakeClock
from naive_engine import NaiveEngine
from sick_runs import Load, Patient

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.insight.diagnosis import Lookback
from kvwatch.observatory.desk import DiagnosisDesk
from kvwatch.observatory.plan import Subject, plan_observatory
from kvwatch.observatory.settings import ObservatorySettings
from kvwatch.telemetry.log import EventLog

IDENTITY = EngineIdentity("chat", 1, "tiny")


def desk_beside(patient: Patient, look_seconds: float = 0.5) -> DiagnosisDesk:
    return DiagnosisDesk(
        lambda: patient.look().samples, lambda: IDENTITY, patient.clock, Lookback(look_seconds, span_seconds=5)
    )


def test_one_look_is_not_enough_and_two_are() -> None:
    patient = Patient(Load(clients=16), max_num_seqs=2, watermark_blocks=16)
    patient.run(50)
    desk = desk_beside(patient)
    assert desk.diagnosis().diagnosis is None

    desk.look()
    patient.run(200)
    (told,) = desk.report().engines

    assert (told.engine, told.dp_rank, told.model_name) == ("chat", 1, "tiny")
    assert told.diagnosis is not None
    assert [each.rule for each in told.diagnosis.findings] == ["waiting_though_free"]


def test_what_is_over_is_forgotten() -> None:
    patient = Patient(Load(), watermark_blocks=16)
    desk = desk_beside(patient)
    patient.run(50)
    desk.look()
    patient.model.fails = True
    patient.step()
    patient.model.fails = False
    patient.run(100)
    desk.look()
    sick = desk.diagnosis().diagnosis
    for _ in range(20):
        patient.run(100)
        desk.look()
    well = desk.diagnosis().diagnosis

    assert sick is not None
    assert [each.rule for each in sick.findings] == ["engine_unwell"]
    assert well is not None
    assert well.is_healthy


def test_it_looks_as_soon_as_it_runs_and_ends_when_told() -> None:
    clock, looks = FakeClock(), 0

    def samples() -> tuple[()]:
        nonlocal looks
        looks += 1
        return ()

    async def live() -> None:
        stop = asyncio.Event()
        running = asyncio.ensure_future(DiagnosisDesk(samples, lambda: IDENTITY, clock).run(stop))
        while not looks:
            await asyncio.sleep(0.001)
        stop.set()
        await asyncio.wait_for(running, 60)

    asyncio.run(live())
    assert looks == 1


def test_it_does_not_look_before_the_engine_is_known() -> None:
    """What the first look lacked was called unknown to the source for the first minute."""
    asked, looks = 0, 0

    def is_known() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    def samples() -> tuple[()]:
        nonlocal looks
        looks += 1
        assert asked > 2
        return ()

    async def live() -> None:
        stop = asyncio.Event()
        desk = DiagnosisDesk(samples, lambda: IDENTITY, FakeClock(), is_known=is_known)
        running = asyncio.ensure_future(desk.run(stop))
        while not looks and not running.done():
            await asyncio.sleep(0.001)
        stop.set()
        await asyncio.wait_for(running, 60)

    asyncio.run(live())
    assert looks == 1


def test_an_observatory_has_a_desk_that_looks_at_its_engine(tmp_path: Path) -> None:
    log = EventLog(4096)
    engine = NaiveEngine(log)
    settings = ObservatorySettings(metrics_listen="off", grpc_listen="off", admin_listen="off", flight_dir="off")
    built = plan_observatory(settings, "chat", tmp_path).build(Subject(log, engine, IDENTITY, config={}))
    built.observatory.start()
    try:
        deadline = time.monotonic() + 60
        while (told := built.desk.diagnosis().diagnosis) is None or not built.observatory.view.gauges:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        built.observatory.stop()

    assert told.seconds > 0
