"""KV events of our own engine, read by the source of foreign ones over TCP: what both say is resident is the same."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from builders import NullModel, make_request, make_settings
from subscription_stage import SubscriptionStage, wait_until

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.kv_events.part import KVEvents, KVEventsSettings
from kvwatch.observatory import Observatory
from kvwatch.sources.endpoints import Target
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.engine import Engine


@contextmanager
def publishing(hash_kind: str = "int", buffer_batches: int = 10_000) -> Iterator[tuple[Engine, KVEvents]]:
    model = NullModel()
    settings = make_settings(num_blocks=41, emit_token_ids=True)
    model.block_size = settings.block_size
    log = EventLog()
    engine = Engine(settings, model, log, lambda _: None)
    config = KVEventsSettings(
        live="tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0", mode="bind", hash_kind=hash_kind,  # type: ignore[arg-type]
        buffer_batches=buffer_batches,
    )  # fmt: skip
    part = KVEvents(config, log.clock)
    observatory = Observatory(log, engine, EngineIdentity("test"), parts=[part])
    engine.start()
    observatory.start()
    try:
        yield engine, part
    finally:
        observatory.stop()
        engine.stop()


def load(engine: Engine, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for index in range(count):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        try:
            num_tokens = rng.randrange(1, 12)
            engine.submit(make_request(f"{seed}-{index}", prompt, n=rng.choice([1, 2]), max_tokens=num_tokens))
        except (EngineOverloaded, RequestInvalid):
            continue
        if rng.random() < 0.3:
            time.sleep(0.002)


def resident(engine: Engine, hash_kind: str) -> set[bytes]:
    digests = [each for tier in engine.snapshot().tiers if tier.tier == "device" for each in tier.hashes]
    return {each[-8:] if hash_kind == "int" else each for each in digests if each is not None}


@pytest.mark.parametrize(("hash_kind", "buffer_batches"), [("int", 10_000), ("bytes", 10_000), ("int", 3)])
def test_who_joins_in_the_middle_of_a_load_knows_in_the_end_exactly_what_the_pool_holds(
    hash_kind: str, buffer_batches: int
) -> None:
    """Also when the publisher keeps so few batches that the replay begins with their sum."""
    with publishing(hash_kind, buffer_batches) as (engine, part):
        load(engine, 1, 30)
        with SubscriptionStage(Target(0, part.publisher.live_address, part.publisher.replay_address)) as stage:
            load(engine, 2, 60)
            wait_until(lambda: engine.num_live_requests == 0)
            wait_until(lambda: stage.hashes() == resident(engine, hash_kind))
            assert stage.mirror.is_whole
            assert (stage.mirror.drift_blocks, stage.reader.counts.resets) == (0, 0)
            assert not +stage.complaints.counts
