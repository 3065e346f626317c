"""Several KV groups over one pool: what a window gives back, which prefixes are hits, and that groups share nothing."""

from itertools import product
from random import Random

import pytest
from builders import LedgerFollower, emit_written, make_manager, snapshot_of

from kvwatch.telemetry.events import PoolRebuilt
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import NULL_BLOCK, BlockHash
from kvwatch_engine.contracts.cache import most_window_blocks
from kvwatch_engine.memory.block_hash import HashChain, hash_in_group, root_hash
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.group_tables import GroupTables
from kvwatch_engine.memory.prefix import Prefix, longest_prefix

A, B, FORK = Owner("a", 0), Owner("b", 0), Owner("a", 1)
SIZE = 4


class Stage:
    """A block manager with groups, followed by a ledger."""

    def __init__(self, *windows: int | None, num_blocks: int = 60, block_size: int = SIZE) -> None:
        self.log = EventLog()
        self.manager: BlockManager = make_manager(num_blocks, block_size, self.log, windows, max_chunk=8)
        self.pool = self.manager.pool
        self.ledger = LedgerFollower(self.log, lambda: snapshot_of(self.manager, self.log))

    def chain(self) -> HashChain:
        return HashChain(root_hash([]), self.manager.block_size)

    def compute(self, owner: Owner, start: int, end: int) -> bool:
        """Write tokens, each of which is its position; return whether there was room."""
        if self.manager.prepare_write(owner, start, end, "decode") is None:
            return False
        emit_written(self.log, self.manager, owner.request, self.manager.record_written(owner, start, end))
        self.manager.store_full(owner, self.chain(), end, range)
        self.manager.pass_windows(owner, end)
        self.check()
        return True

    def fill(self, owner: Owner, num_tokens: int) -> None:
        """Open a sequence without a hit and compute its tokens one by one."""
        assert self.manager.open(owner, Prefix(), 1)
        for position in range(num_tokens):
            assert self.compute(owner, position, position + 1)

    def hit(self, num_tokens: int) -> Prefix:
        num_blocks = num_tokens // self.manager.block_size
        return self.manager.find_prefix(self.chain().upto(num_blocks, range))

    def check(self) -> None:
        """The ledger knows what each group holds, and what of it is cached."""
        self.manager.check_integrity()
        self.ledger.catch_up()
        cached = [self.pool.groups[block] for block, _ in self.pool.cached()]
        told = {name: group.num_cached for name, group in self.ledger.ledger.pool("device").groups.items()}
        assert told == {str(group.number): cached.count(group.number) for group in self.manager.groups}


def seen_blocks(num_computed: int, window: int, block_size: int) -> set[int]:
    """Return the blocks in which something lies that the next token sees, or in which it is written itself."""
    return {p // block_size for p in range(num_computed + 1) if p > num_computed - window}


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_a_block_is_given_back_when_no_later_token_sees_it_and_not_before(window: int, block_size: int) -> None:
    stage = Stage(None, window, block_size=block_size)
    assert stage.manager.open(A, Prefix(), 1)
    full, sliding = stage.manager.groups
    for num_computed in range(1, 25):
        assert stage.compute(A, num_computed - 1, num_computed)

        table = sliding.tables[A]
        held = {index for index, block in enumerate(table) if block != NULL_BLOCK}
        assert held == seen_blocks(num_computed, window, block_size) & set(range(len(table)))
        assert len(sliding.held(A)) == len(held) <= -(-window // block_size) + 2
        assert len(full.held(A)) == len(full.tables[A]) == -(-num_computed // block_size)
        assert stage.pool.num_used == len(full.held(A)) + len(held)

    stage.manager.release(A, "finished")
    stage.check()
    assert stage.pool.num_used == 0


@pytest.mark.parametrize(
    ("window", "chunk", "block_size"), list(product((1, 2, 3, 4, 5, 9), (1, 2, 3, 7), (1, 2, 3, 4)))
)
def test_the_most_that_a_window_holds_is_held_at_some_place_and_never_more(
    window: int, chunk: int, block_size: int
) -> None:
    """Over all places where a chunk can begin."""
    held = [
        len({p // block_size for p in range(max(0, start - window + 1), start + chunk)})
        for start in range(window + chunk + 2 * block_size)
    ]
    assert max(held) == most_window_blocks(window, chunk, block_size)


def test_a_request_is_measured_with_all_its_groups() -> None:
    manager = Stage(None, 5, 9).manager  # chunks of 8
    assert manager.most_blocks(100) == 25 + most_window_blocks(5, 8, SIZE) + most_window_blocks(9, 8, SIZE)
    assert manager.most_blocks(6) == 3 * 2
    assert manager.most_blocks(100, num_shared=41) == manager.most_blocks(100) - 10


def groups_of(*windows: int | None) -> list[GroupTables]:
    pool = BlockPool(2, EventLog(), num_groups=len(windows))
    return [GroupTables(pool, SIZE, number, window) for number, window in enumerate(windows)]


def can_serve(length: int, windows: tuple[int | None, ...], known: set[tuple[int, int]]) -> bool:
    """Whether each group has what the token behind so many blocks sees. `known` are pairs of group and block."""
    first_seen = [0 if window is None else max(0, length * SIZE - window + 1) for window in windows]
    return all(
        (number, position // SIZE) in known
        for number, first in enumerate(first_seen)
        for position in range(first, length * SIZE)
    )


@pytest.mark.parametrize(
    "windows", [(None,), (1,), (5,), (9,), (None, 5), (None, 4, 9), (5, 9), (2, 10), (None, None, 6)]
)
def test_the_hit_is_the_longest_prefix_of_which_every_group_has_what_it_sees(windows: tuple[int | None, ...]) -> None:
    rng = Random(7)
    hashes = HashChain(root_hash([]), SIZE).upto(6, range)
    groups, lengths = groups_of(*windows), set()
    for _ in range(600):
        share = rng.choice((0.5, 0.8, 0.95))
        known = {(n, i) for n in range(len(windows)) for i in range(len(hashes)) if rng.random() < share}
        names = {hash_in_group(hashes[index], number) for number, index in known}

        length = longest_prefix(hashes, groups, names.__contains__)

        assert length == max(n for n in range(len(hashes) + 1) if can_serve(n, windows, known))
        lengths.add(length)
    assert len(lengths) >= 6 or windows == (1,), "all kinds of hits were tried"


def test_a_window_hits_where_a_full_prefix_is_gone_and_a_full_group_does_not() -> None:
    stage = Stage(None, 5)
    stage.fill(A, 24)
    stage.manager.release(A, "finished")
    assert len(stage.hit(24)) == 6

    for content in stage.chain().upto(4, range)[:4]:
        block = stage.pool.find(hash_in_group(content, 1))
        assert block is not None
        stage.pool.forget(block)

    prefix = stage.hit(24)
    assert len(prefix) == 6
    assert [len([block for block in table if block]) for table in prefix.groups] == [6, 1]
    assert prefix.groups[1][:5] == [NULL_BLOCK] * 5
    assert len(stage.hit(16)) == 0, "block 3 of the window is gone"
    assert stage.manager.open(B, prefix, 25)
    assert stage.compute(B, 24, 25)

    gone = stage.pool.find(stage.chain().upto(2, range)[1])
    assert gone is not None
    stage.manager.release(B, "finished")
    stage.pool.forget(gone)
    assert len(stage.hit(24)) == 0, "of a prefix of one block the window's is gone, of longer ones the full group's"


def test_no_block_and_no_name_belongs_to_two_groups() -> None:
    stage = Stage(None, None, 9)
    stage.fill(A, 13)
    stage.manager.release(A, "finished")
    stage.fill(B, 3)

    prefix = stage.hit(12)

    assert len(prefix) == 3
    held = prefix.held()
    assert len(set(held)) == len(held) == 3 + 3 + 2
    assert [{stage.pool.groups[block] for block in table if block} for table in prefix.groups] == [{0}, {1}, {2}]
    names = [hash_in_group(BlockHash(b"x" * 32), number) for number in range(40)]
    assert len(set(names)) == len(names)


@pytest.fixture(params=range(1, 4))
def refused(request: pytest.FixtureRequest) -> Stage:
    """A pool that refuses its first, second or third allocation once, although it has room."""
    stage = Stage(None, None, 9)
    allocate, calls, number = stage.pool.allocate, iter(range(1, 1000)), request.param

    def refuse(*asked: object) -> object:
        return None if armed and next(calls) == number else allocate(*asked)  # type: ignore[arg-type]

    armed: list[bool] = []
    stage.fill(A, 6)
    stage.manager.fork(A, FORK, 6)
    armed.append(True)
    stage.pool.allocate = refuse  # type: ignore[method-assign, assignment]
    return stage


def test_a_write_gets_blocks_in_all_groups_or_in_none(refused: Stage) -> None:
    tables = [list(group.tables[FORK]) for group in refused.manager.groups]
    used = refused.pool.num_used

    assert not refused.compute(FORK, 6, 9)

    assert [group.tables[FORK] for group in refused.manager.groups] == tables
    assert refused.pool.num_used == used
    refused.check()
    assert refused.compute(FORK, 6, 9)
    assert all(
        set(group.tables[FORK][1:]).isdisjoint(group.tables[A][1:]) and group.tables[FORK][0] == group.tables[A][0]
        for group in refused.manager.groups
    )


def test_too_few_free_blocks_for_all_groups_change_nothing() -> None:
    """Not even what is cached in those that there are."""
    stage = Stage(None, 9, 9, num_blocks=9)
    stage.fill(B, 8)
    stage.manager.release(B, "finished")
    stage.fill(A, 8)
    assert stage.pool.num_free == stage.pool.num_cached == 2
    tables, known = [list(group.tables[A]) for group in stage.manager.groups], list(stage.pool.hashes)

    assert not stage.compute(A, 8, 9)
    assert not stage.manager.open(B, Prefix(), 4)

    assert [group.tables[A] for group in stage.manager.groups] == tables
    assert stage.pool.hashes == known
    assert stage.pool.num_free == 2
    stage.check()


def test_a_fork_shares_in_every_group_what_it_sees_and_nothing_that_is_gone() -> None:
    stage = Stage(None, 5)
    stage.fill(A, 18)
    full, sliding = stage.manager.groups

    assert stage.manager.fork(A, FORK, 18) == 18
    stage.check()
    assert full.tables[FORK] == full.tables[A]
    assert sliding.tables[FORK] == sliding.tables[A]
    assert sliding.tables[FORK][:3] == [NULL_BLOCK] * 3
    assert [stage.pool.ref_counts[block] for block in sliding.held(A)] == [2, 2]

    assert stage.compute(FORK, 18, 19)
    assert [group.tables[FORK][4] != group.tables[A][4] for group in (full, sliding)] == [True, True]

    assert stage.manager.fork(A, Owner("a", 2), 9) == 0, "the window of token 9 has been given back"
    stage.check()
    for owner in (A, FORK, Owner("a", 2)):
        stage.manager.release(owner, "finished")
    stage.check()
    assert stage.pool.num_used == 0


def test_who_joins_another_gives_up_its_own_in_every_group() -> None:
    stage = Stage(None, 5)
    stage.fill(A, 10)
    stage.manager.fork(A, FORK, 10)
    for position in range(10, 17):
        assert stage.compute(A, position, position + 1)
        assert stage.compute(FORK, position, position + 1)
    used = stage.pool.num_used

    stage.manager.join(A, FORK, 17)

    stage.check()
    assert [group.tables[FORK] for group in stage.manager.groups] == [group.tables[A] for group in stage.manager.groups]
    assert stage.pool.num_used == used - 3 - 2  # what only it had of tokens 8 to 16, and of those the window still sees
    assert [group.num_passed.get(FORK) for group in stage.manager.groups] == [None, 3]


def test_blocks_that_are_evicted_or_move_keep_their_groups() -> None:
    """The ledger, which follows, is told so as well."""
    stage = Stage(None, 5, num_blocks=30)
    stage.fill(A, 18)
    stage.fill(B, 11)
    stage.manager.release(A, "finished")
    cached = stage.pool.num_cached
    assert cached >= 8

    plan = stage.pool.plan_resize(12)
    assert plan is not None
    assert len(plan.moves) > 2
    assert 0 < plan.num_evictions < cached
    stage.manager.resize(plan)
    stage.log.append(PoolRebuilt(30, 12, "resized", 0, 0))
    stage.check()

    for position in range(11, 23):  # which takes the place of all that is cached
        assert stage.compute(B, position, position + 1)
    assert stage.pool.num_free < 5
