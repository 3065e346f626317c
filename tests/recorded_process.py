"""A process of its own that runs an engine under load and records it, to be killed.

    python recorded_process.py MODE DIR SEED

MODE `parts` steps the engine and the recorder in turn, as fast as it can, so that a kill often falls into a write.
MODE `observatory` runs the real engine thread and the real observatory. Either prints a line `STEP SEQ DIGEST` now and
then, which is what the engine itself says of its state; the digest is of all of it.
"""

import hashlib
import random
import sys
import time
from pathlib import Path

import msgspec
from builders import NullModel, make_request, make_settings
from recording_stage import RecordingStage, make_headers, recorder_settings

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.logs import configure_logs
from kvwatch.observatory import Observatory
from kvwatch.recorder.part import RecorderPart
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.contracts.errors import EngineOverloaded
from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.engine import Engine


def digest(snapshot: EngineSnapshot) -> str:
    """Return a fingerprint of everything that events tell of a state."""
    state = [
        [(tier.tier, tier.ref_counts, tier.hashes, _filled(snapshot)) for tier in snapshot.tiers],
        sorted((each.request, each.sequence, each.block_ids) for each in snapshot.sequences),
        sorted((each.request, each.state, each.queued_ns) for each in snapshot.requests),
    ]
    return hashlib.sha256(msgspec.msgpack.encode(state)).hexdigest()[:16]


def _filled(snapshot: EngineSnapshot) -> list[int]:
    """Return filled slots of blocks that are not empty: what an empty block once held does not count."""
    tier = snapshot.tiers[0]
    return [
        filled if count or block_hash is not None else 0
        for count, block_hash, filled in zip(tier.ref_counts, tier.hashes, tier.filled_slots, strict=True)
    ]


def tell(snapshot: EngineSnapshot) -> None:
    sys.stdout.write(f"{snapshot.step} {snapshot.seq} {digest(snapshot)}\n")
    sys.stdout.flush()


def run_parts(folder: Path, seed: int) -> None:
    settings = recorder_settings(
        folder, flight_dir=folder, flight_bytes=256 * 1024, file_bytes=64 * 1024, record_bytes=2**20
    )
    stage = RecordingStage(settings, seed)
    while True:
        stage.run(7)
        stage.snapshots.clear()
        tell(stage.core.snapshot())


def run_observatory(folder: Path, seed: int) -> None:
    log = EventLog()
    model = NullModel()
    model.block_size = 4
    model.on_step = _pace
    engine = Engine(make_settings(max_queued_requests=64), model, log, lambda _: None)
    part = RecorderPart(recorder_settings(folder, flight_dir=folder), make_headers(log), lambda: observatory.mirror)
    observatory = Observatory(log, engine, EngineIdentity("test"), parts=[part])
    engine.start()
    observatory.start()
    chance, number = random.Random(seed), 0
    while True:
        for _ in range(4):
            number += 1
            prompt = [7] * chance.randrange(12) + [chance.randrange(4, 50) for _ in range(chance.randrange(1, 20))]
            try:
                engine.submit(make_request(f"r{number}", prompt, max_tokens=20, n=chance.choice([1, 2])))
            except EngineOverloaded:
                time.sleep(0.01)
        tell(engine.snapshot())


def _pace(_step: StepInput) -> None:
    time.sleep(0.001)  # a step of an engine is never free


if __name__ == "__main__":
    configure_logs()  # to stderr: stdout is for what the engine says
    {"parts": run_parts, "observatory": run_observatory}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
