"""The flight recorder's ring: what a killed process leaves behind is whole frames, the newest ones, in order."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_stage import make_headers

from kvwatch.errors import RecordingError
from kvwatch.recorder.frames import FrameKind, Span, open_body
from kvwatch.recorder.ring import RING_SUFFIX, FlightRing, read_ring, remove_old_rings, ring_path
from kvwatch.telemetry.log import EventLog

HEADER = make_headers(EventLog(8)).make()
AREA = 64 * 1024


def make_ring(folder: Path, num_bytes: int = AREA) -> FlightRing:
    return FlightRing(ring_path(folder, "test"), num_bytes, HEADER)


def write(ring: FlightRing, number: int, chance: random.Random) -> bytes:
    """Write a frame that cannot be compressed away; return its body."""
    body = number.to_bytes(4, "little") + chance.randbytes(chance.choice([0, 3, 40, 500, 5000, 20_000]))
    assert ring.write(FrameKind.EVENTS, body, Span(number, number + 1)) > 0
    return body


def bodies(image: bytes) -> list[bytes]:
    _, slots = read_ring(image)
    return [open_body(image[slot.offset : slot.offset + slot.info.size], slot.info) for slot in slots]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_frames=st.integers(0, 120))
def test_the_newest_frames_are_there_in_order(
    seed: int, num_frames: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    ring = make_ring(tmp_path_factory.mktemp("ring"))
    written = [write(ring, number, chance) for number in range(num_frames)]

    found = bodies(ring.path.read_bytes())
    ring.close()

    assert found == written[len(written) - len(found) :]
    # A wrap leaves less than a frame unused at the end of the area, and the newest frame overwrites a part of another.
    size = sum(len(body) + 100 for body in found)
    assert len(found) == num_frames or size > AREA - 2 * 21_000


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), num_frames=st.integers(1, 60), data=st.data())
def test_a_write_that_was_torn_anywhere_costs_that_frame_and_those_it_overwrote(
    seed: int, num_frames: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    ring = make_ring(tmp_path_factory.mktemp("ring"))
    written = [write(ring, number, chance) for number in range(num_frames)]
    before = ring.image()
    written.append(write(ring, num_frames, chance))
    after = ring.image()
    ring.close()
    changed = [place for place in range(0, len(after), 64) if after[place : place + 64] != before[place : place + 64]]
    pages = data.draw(st.lists(st.sampled_from(changed), unique=True))
    torn = bytearray(before)
    for place in pages:  # any part of it may have arrived, in any order
        torn[place : place + 64] = after[place : place + 64]

    found = bodies(bytes(torn))

    end = len(written) if found and found[-1] == written[-1] else len(written) - 1
    assert found == written[end - len(found) : end]
    assert not pages or torn == after or found[-1:] != written[-1:]
    # The frames that the torn one did not touch are all there.
    untouched = [body for body in bodies(after)[:-1] if body in written]
    assert found[: len(untouched)] == untouched or found[-len(untouched) :] == untouched


def test_a_frame_that_is_too_large_is_refused_and_the_others_stay(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    chance = random.Random(0)
    first = write(ring, 0, chance)

    assert ring.write(FrameKind.STATE, chance.randbytes(AREA // 2), Span(1, 1)) == 0
    second = write(ring, 1, chance)

    assert bodies(ring.image()) == [first, second]
    ring.close()


def test_the_whole_ring_is_taken_from_the_disk_at_once(tmp_path: Path) -> None:
    ring = make_ring(tmp_path, 2**20)

    found = ring.path.stat()
    ring.close()

    assert found.st_blocks * 512 >= 2**20
    assert found.st_size < 2**20 + 64 * 1024


@pytest.mark.parametrize("size", [0, 100, 4096, 5000, 30_000])
def test_a_file_that_is_cut_while_in_use_does_not_end_the_process(tmp_path: Path, size: int) -> None:
    """A rotation of logs copies and truncates; the next access to a mapped file would then be a SIGBUS."""
    chance = random.Random(1)
    ring = make_ring(tmp_path)
    for number in range(40):
        write(ring, number, chance)
    was_spoiled = ring.is_spoiled

    os.truncate(ring.path, size)

    assert (was_spoiled, ring.is_spoiled) == (False, True)
    assert len(ring.image()) == size
    for number in range(40, 120):  # several rounds: to the end of what is gone
        write(ring, number, chance)
    if size < 4096:
        assert ring.is_spoiled, "there is no header"
    ring.close()


@pytest.mark.parametrize("cut", [0, 10, 4095, 4096, 5000])
def test_a_ring_without_its_begin_is_a_named_error(tmp_path: Path, cut: int) -> None:
    ring = make_ring(tmp_path)
    image = ring.image()
    ring.close()

    with pytest.raises(RecordingError):
        read_ring(image[:cut])
    with pytest.raises(RecordingError):
        read_ring(bytes(len(image)))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_ring_with_damage_anywhere_gives_whole_frames_or_a_named_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(3)
    ring = make_ring(tmp_path_factory.mktemp("ring"))
    written = [write(ring, number, chance) for number in range(30)]
    image = bytearray(ring.image())
    ring.close()
    for _ in range(data.draw(st.integers(1, 20))):
        image[data.draw(st.integers(0, len(image) - 1))] ^= 0x55

    try:
        found = bodies(bytes(image))
    except RecordingError:
        return
    assert found == [body for body in written if body in found]


def test_rings_named_while_the_clock_was_ahead_go_before_those_that_came_after(tmp_path: Path) -> None:
    ahead = [tmp_path / f"test-2{year}0101T000000.000000Z-1{RING_SUFFIX}" for year in (990, 991, 992)]
    for path in ahead:
        path.write_text("")
    ring = make_ring(tmp_path)
    ring.close()

    remove_old_rings(tmp_path, "test", kept=2)

    assert sorted(tmp_path.iterdir()) == sorted([ring.path, ahead[2]])


def test_rings_of_ended_processes_are_kept_but_not_for_ever_and_those_in_use_always(tmp_path: Path) -> None:
    rings = [make_ring(tmp_path) for _ in range(6)]
    foreign = tmp_path / f"other-20260101T000000.000000Z-1{RING_SUFFIX}"
    foreign.write_text("")
    for ring in rings[1:]:
        ring.close()

    remove_old_rings(tmp_path, "test", kept=2)

    assert sorted(tmp_path.iterdir()) == sorted([foreign, rings[0].path, rings[4].path, rings[5].path])
    rings[0].close()
