"""The pool refuses blocks that it counts as free: whatever was begun for them is undone, and a ledger agrees."""

from builders import LedgerFollower, emit_written, make_manager, snapshot_of

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner, StoredRun
from kvwatch_engine.memory.prefix import Prefix

A, B, FORK = Owner("a", 0), Owner("b", 0), Owner("a", 1)


def followed_manager(num_blocks: int) -> tuple[BlockManager, LedgerFollower]:
    log = EventLog()
    manager = make_manager(num_blocks, 4, log)
    return manager, LedgerFollower(log, lambda: snapshot_of(manager, log))


def refuse(manager: BlockManager, number: int) -> None:
    """Let the pool refuse its `number`-th allocation from now on, once."""
    pool = manager.pool
    allocate, calls = pool.allocate, iter(range(1, 1000))
    pool.allocate = lambda *asked: None if next(calls) == number else allocate(*asked)  # type: ignore[method-assign]


def test_a_prefix_hit_is_given_back() -> None:
    manager, ledger = followed_manager(8)
    assert manager.open(A, Prefix(), 8)
    manager.pool.store(list(manager.table(A)), [BlockHash(b"1" * 32), BlockHash(b"2" * 32)], None, StoredRun(A, 0))
    prefix = Prefix((list(manager.table(A)),))
    manager.release(A, "finished")
    refuse(manager, 1)

    assert not manager.open(B, prefix, 12)

    manager.check_integrity()
    assert (manager.pool.num_used, manager.pool.num_cached) == (0, 2)
    assert list(manager.owners()) == []
    ledger.catch_up()
    assert manager.open(B, prefix, 12)


def test_blocks_for_copies_are_given_back_when_the_table_cannot_grow() -> None:
    """A write that begins in a shared block and ends in a new one takes both, or neither."""
    for number in (1, 2):
        manager, ledger = followed_manager(8)
        assert manager.open(A, Prefix(), 6)
        emit_written(manager.pool._log, manager, "a", manager.record_written(A, 0, 6))
        manager.fork(A, FORK, 6)
        table = list(manager.table(FORK))
        refuse(manager, number)

        assert manager.prepare_write(FORK, 6, 9, "prefill") is None

        manager.check_integrity()
        assert manager.table(FORK) == table == manager.table(A)
        assert manager.pool.num_used == 2

        copies = manager.prepare_write(FORK, 6, 9, "prefill")
        assert copies is not None
        assert [copy.source for copy in copies] == [table[1]]
        assert len(manager.table(FORK)) == 3
        manager.check_integrity()
        ledger.catch_up()
