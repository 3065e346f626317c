"""What telemetry is told of images in prompts, and who may read it."""

from dataclasses import replace

import numpy as np
import pytest
from builders import Recorder, make_core, make_request, run_until_idle

from kvwatch.recorder.schema import EventDecoder, EventEncoder, current_schema
from kvwatch.stream.codec import EventCodec, parse
from kvwatch.stream.descriptors import message_class
from kvwatch.telemetry.events import RequestQueued
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.image import PreparedImage, PromptImage

PIXELS = np.zeros((3, 2, 2), dtype=np.float32)
IMAGES = (PromptImage(1, 4, PreparedImage(b"cat", PIXELS)), PromptImage(7, 2, PreparedImage(b"dog", PIXELS)))


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_images_are_told_like_token_ids_only_when_asked_for(is_asked_for: bool) -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, emit_token_ids=is_asked_for)
    core.add(replace(make_request("r", range(10, 20), max_tokens=2), images=IMAGES), 0)
    run_until_idle(core)

    (queued,) = [event for event in recorder.drain() if isinstance(event, RequestQueued)]

    told = (queued.image_positions, queued.image_tokens, queued.image_hashes)
    assert told == (([1, 7], [4, 2], [b"cat", b"dog"]) if is_asked_for else ([], [], []))


QUEUED = RequestQueued("r", 10, 1, 0, image_positions=[1, 7], image_tokens=[4, 2], image_hashes=[b"cat", b"dog"])


@pytest.mark.parametrize("may_tell", [False, True])
def test_recordings_and_streams_hold_the_digests_of_images_only_for_those_who_may_read_token_ids(
    may_tell: bool,
) -> None:
    (recorded,) = EventDecoder(current_schema()).decode(EventEncoder(keep_token_ids=may_tell).encode([QUEUED]))
    codec = EventCodec(with_token_ids=may_tell)
    (envelope,) = parse(message_class("Update"), codec.encode(QUEUED)).events
    streamed = codec.decode(envelope)

    for event in (recorded, streamed):
        assert isinstance(event, RequestQueued)
        assert event.image_tokens == [4, 2]
        assert event.image_hashes == ([b"cat", b"dog"] if may_tell else [])
