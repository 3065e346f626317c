"""What the pool tells of several blocks at once."""

from builders import FakeClock, make_pool

from kvwatch.telemetry.events import BlocksAllocated, BlocksDuplicated, BlocksEvicted, BlocksStored
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_pool import BlockPool, Owner, StoredRun

A, B = Owner("a", 0), Owner("b", 0)
SECOND = 1_000_000_000


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def put(pool: BlockPool, owner: Owner, *numbers: int) -> None:
    """Let a sequence compute and store blocks with this content, and end."""
    blocks = pool.allocate(len(numbers), owner, "prefill")
    assert blocks is not None
    pool.store(blocks, [name(number) for number in numbers], None, StoredRun(owner, 0))
    pool.release(blocks[::-1], owner, "finished")


def test_each_of_many_evicted_blocks_has_its_own_age_whenever_it_is_read_and_by_whom() -> None:
    clock = FakeClock()
    log = EventLog(clock=clock)
    pool = make_pool(6, log)
    start = log.now_ns
    put(pool, A, 1, 2)
    log.now_ns = start + 2 * SECOND
    put(pool, B, 3, 4, 5)
    log.now_ns = start + 3 * SECOND
    first, second = log.subscribe("first"), log.subscribe("second")

    pool.allocate(4, A, "prefill")
    log.now_ns = start + 9 * SECOND
    pool.allocate(1, A, "decode")

    for cursor in (first, second):
        evicted = [event for event in cursor.read() if isinstance(event, BlocksEvicted)]
        assert [event.hashes for event in evicted] == [[name(2), name(1), name(5), name(4)], [name(3)]]
        assert [event.ages_ns for event in evicted] == [[3 * SECOND, 3 * SECOND, SECOND, SECOND], [7 * SECOND]]
        assert [event.idles_ns for event in evicted] == [event.ages_ns for event in evicted]
        assert [event.hits for event in evicted] == [[0, 0, 0, 0], [0]]


def test_what_was_told_stays_as_it_was_whatever_becomes_of_the_blocks() -> None:
    log = EventLog()
    cursor = log.subscribe("test")
    pool = make_pool(4, log)
    put(pool, A, 1, 2)
    put(pool, B, 3, 4, 5)

    events = cursor.read()

    taken = [event.block_ids for event in events if isinstance(event, BlocksAllocated)]
    stored = [event.block_ids for event in events if isinstance(event, BlocksStored)]
    assert taken == stored
    assert [len(blocks) for blocks in taken] == [2, 3]
    assert sorted(taken[1]) == [1, 2, 3]


def test_runs_between_duplicates_are_told_one_by_one_with_what_is_before_each() -> None:
    log = EventLog()
    pool = make_pool(12, log)
    put(pool, A, 1, 4)
    cursor = log.subscribe("test")
    blocks = pool.allocate(5, B, "prefill")
    assert blocks is not None
    hashes = [name(number) for number in range(1, 6)]

    pool.store(blocks, hashes, name(9), StoredRun(B, 7, token_ids=[[number] for number in range(1, 6)]))

    _, first, second, duplicated = cursor.read()
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(duplicated, BlocksDuplicated)
    assert (first.hashes, first.block_ids, first.parent) == (hashes[1:3], blocks[1:3], hashes[0])
    assert (first.first_index, first.token_ids) == (8, [[2], [3]])
    assert (second.hashes, second.block_ids, second.parent) == (hashes[4:], blocks[4:], hashes[3])
    assert (second.first_index, second.token_ids) == (11, [[5]])
    assert (duplicated.block_ids, duplicated.originals) == (
        [blocks[0], blocks[3]],
        [pool.find(name(1)), pool.find(name(4))],
    )
