"""Block pool and block tables against a naive model, driven at random, with a ledger that follows the events."""

from collections import Counter
from dataclasses import dataclass

from builders import ROOT, LedgerFollower, emit_written, make_manager, snapshot_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvwatch.telemetry.events import PoolRebuilt
from kvwatch.telemetry.events.block import ReleaseReason
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import NULL_BLOCK, BlockHash
from kvwatch_engine.memory.block_hash import HashChain, hash_in_group
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.memory.pins import PrefixPins

BLOCK_SIZE = 3
MAX_CHUNK = 12
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (None, 5), (4,), (None, 1, 7), (None, None)]
"""Windows of the KV groups: one group with full attention half of the time, since most models have no other."""
RELEASES: list[ReleaseReason] = ["finished", "aborted", "preempted"]


@dataclass
class NaiveSequence:
    """What a sequence looks like to somebody who has never heard of blocks: tokens, and how many are computed."""

    tokens: list[int]
    computed: int
    chain: HashChain

    def slice(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]


class BlockPoolMachine(RuleBasedStateMachine):
    """Allocate, append, fork, write shared, free, hit, evict, preempt, abort.

    The naive model keeps the tokens of every slot (`memory`) as if it were the cache itself. Reading a sequence back
    through its block table must give its tokens, always: sharing, copy-on-write and reuse must never break that.
    """

    @initialize(
        num_blocks=st.integers(4, 40),
        enable=st.booleans(),
        capacity=st.sampled_from([7, 1000]),
        closely=st.booleans(),
        windows=st.sampled_from(WINDOWS),
    )
    def start(
        self, num_blocks: int, enable: bool, capacity: int, closely: bool, windows: tuple[int | None, ...]
    ) -> None:
        self.windows = windows
        self.is_followed_closely = closely
        self.log = EventLog(capacity)  # with 7 the ledger loses events all the time and has to heal itself
        self.manager = make_manager(
            num_blocks, BLOCK_SIZE, self.log, windows, enable_prefix_cache=enable, max_chunk=MAX_CHUNK
        )
        self.pool = self.manager.pool
        self.pins = PrefixPins(self.pool, self.log)
        self.ledger = LedgerFollower(self.log, lambda: snapshot_of(self.manager, self.log, self.pins))
        self.sequences: dict[Owner, NaiveSequence] = {}
        self.memory: dict[int, tuple[int, int]] = {}  # group and token of each slot
        self.contents: dict[bytes, list[tuple[int, int]]] = {}  # of every block hash that was ever computed
        self.counter = 0

    # ------------------------------------------------------------------ rules

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), computed=st.integers(1, 20))
    def allocate(self, tokens: list[int], computed: int) -> None:
        """Admit a sequence: a hit on whatever is known, blocks for the rest, all or nothing."""
        owner = Owner(f"r{self.counter}", 0)
        self.counter += 1
        sequence = NaiveSequence(tokens, 0, HashChain(ROOT, BLOCK_SIZE))
        limit = (len(tokens) - 1) // BLOCK_SIZE
        prefix = self.manager.find_prefix(sequence.chain.upto(limit, sequence.slice)[:limit])
        missing = self.manager.num_blocks_missing(prefix, len(tokens))
        free_before = self.pool.num_free

        opened = self.manager.open(owner, prefix, len(tokens))

        assert opened == (missing <= free_before)
        if not opened:
            assert self.pool.num_free == free_before
            return
        if all(window is None for window in self.windows):  # else it takes the rest step by step
            assert self.pool.num_free == free_before - missing
        assert self.pool.num_free >= free_before - missing
        self.check_prefix(sequence, len(prefix), limit)
        sequence.computed = len(prefix) * BLOCK_SIZE
        self.sequences[owner] = sequence
        self._compute(owner, min(len(tokens), sequence.computed + computed))

    def check_prefix(self, sequence: NaiveSequence, length: int, limit: int) -> None:
        """No longer prefix could have been found: in some group something is missing that it would see."""
        known = {content for content in self.pool.hashes if content is not None}
        hashes = sequence.chain.upto(limit, sequence.slice)
        for longer in range(length + 1, limit + 1):
            seen = [
                hash_in_group(hashes[index], number) in known
                for number, window in enumerate(self.windows)
                for index in range(longer)
                if window is None or (index + 1) * BLOCK_SIZE > longer * BLOCK_SIZE - window + 1
            ]
            assert not all(seen), f"{longer} blocks could be had, {length} were found"

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 7))
    def append_or_write_shared(self, data: st.DataObject, token: int, count: int) -> None:
        """Compute what is missing, then grow: copies what is shared, takes new blocks at block borders."""
        owner = self._any_sequence(data)
        sequence = self.sequences[owner]
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.extend([token] * count)
        self._compute(owner, min(len(sequence.tokens), sequence.computed + count))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), upto=st.integers(0, 20))
    def fork(self, data: st.DataObject, upto: int) -> None:
        """Begin a second sequence on the blocks of the first, anywhere within what is computed."""
        parent = self._any_sequence(data)
        source = self.sequences[parent]
        num_tokens = min(upto, source.computed)
        child = Owner(parent.request, 1 + max(o.sequence for o in self.sequences if o.request == parent.request))

        shared = self.manager.fork(parent, child, num_tokens)

        assert num_tokens - BLOCK_SIZE < shared <= num_tokens or (shared == 0 and self.manager.has_windows)
        chain = source.chain.fork(num_tokens // BLOCK_SIZE)
        self.sequences[child] = NaiveSequence(source.tokens[:num_tokens], shared, chain)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), back=st.integers(0, 4), count=st.integers(1, 4))
    def fork_end_the_parent_and_go_on(self, data: st.DataObject, back: int, count: int) -> None:
        """The child becomes the only owner of blocks that may be full, and known to the prefix index."""
        parent = self._any_sequence(data)
        source = self.sequences[parent]
        num_tokens = max(0, source.computed - back)
        child = Owner(parent.request, 1 + max(o.sequence for o in self.sequences if o.request == parent.request))
        shared = self.manager.fork(parent, child, num_tokens)
        chain = source.chain.fork(num_tokens // BLOCK_SIZE)
        self.sequences[child] = NaiveSequence([*source.tokens[:num_tokens], *[1] * count], shared, chain)
        self.manager.release(parent, "finished")
        del self.sequences[parent]
        self._compute(child, min(num_tokens + count, shared + MAX_CHUNK))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 7))
    def fork_part_and_join(self, data: st.DataObject, count: int) -> None:
        """A beam goes its own way for a while, and then on from its parent: it holds what that one holds, no more."""
        parent = self._any_sequence(data)
        source = self.sequences[parent]
        self._compute(parent, len(source.tokens))
        if source.computed < len(source.tokens):
            return
        child = Owner(parent.request, 1 + max(o.sequence for o in self.sequences if o.request == parent.request))
        shared = self.manager.fork(parent, child, source.computed)
        chain = source.chain.fork(source.computed // BLOCK_SIZE)
        self.sequences[child] = branch = NaiveSequence([*source.tokens, *[1] * count], shared, chain)
        source.tokens += [0] * count
        self._compute(parent, len(source.tokens))
        self._compute(child, len(branch.tokens))
        if not source.computed == branch.computed == len(source.tokens):
            return  # blocks were short
        self.manager.join(parent, child, source.computed)
        assert all(group.tables[child] == group.tables[parent] for group in self.manager.groups)
        branch.tokens, branch.chain = list(source.tokens), source.chain.fork(source.computed // BLOCK_SIZE)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), reason=st.sampled_from(RELEASES))
    def release(self, data: st.DataObject, reason: ReleaseReason) -> None:
        """Finish, abort or preempt."""
        owner = self._any_sequence(data)
        alone = self.manager.num_blocks_freed_by([owner])
        free_before = self.pool.num_free

        self.manager.release(owner, reason)
        self.manager.release(owner, reason)  # a second time does nothing

        assert self.pool.num_free == free_before + alone
        del self.sequences[owner]

    @precondition(lambda self: any(self.pool.hashes))
    @rule(data=st.data(), count=st.integers(1, 4))
    def pin(self, data: st.DataObject, count: int) -> None:
        """Pinned content stays: free blocks get fewer by those that nobody used."""
        known = sorted(content for content in self.pool.hashes if content is not None)
        hashes = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=count, unique=True))
        idle = {content for content in hashes if content not in self.pool.pinned and not self._is_used(content)}
        used, cached, free = self.pool.num_used, self.pool.num_cached, self.pool.num_free
        self.pins.add(hashes, 0, "test", "")
        assert (self.pool.num_used, self.pool.num_cached) == (used, cached)
        assert self.pool.num_free == free - len(idle)

    @precondition(lambda self: len(self.pins) > 0)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.pins.all()))
        self.pins.remove(pin, "asked", "test", "")

    @invariant()
    def what_is_pinned_is_here(self) -> None:
        if hasattr(self, "pins"):
            pinned = {content for pin in self.pins.all() for content in pin.hashes}
            assert pinned == self.pool.pinned.keys()
            assert pinned <= set(self.pool.hashes)

    @rule()
    def clear_cache(self) -> None:
        cached = self.pool.num_cached
        self.pins.remove_all("reset", "test", "")
        assert self.pool.num_cached == cached

        assert self.pool.clear_cache() == cached

        assert self.pool.num_cached == 0

    @rule(num_blocks=st.integers(2, 28))
    def resize(self, num_blocks: int) -> None:
        """Shrink or grow; what is held stays, what is cached as far as it fits, least recently used evicted first."""
        used, cached = self.pool.num_used, self.pool.num_cached
        used += self.pool.num_idle_pinned
        cached -= self.pool.num_idle_pinned
        in_order = [self.pool.hashes[block] for block in self.pool._free.cached()]

        plan = self.pool.plan_resize(num_blocks)

        assert (plan is None) == (used > num_blocks - 1)
        if plan is None:
            return
        before = dict(self.memory)
        self.memory = {
            plan.place_of(block) * BLOCK_SIZE + offset: before[block * BLOCK_SIZE + offset]
            for block in plan.kept
            for offset in range(BLOCK_SIZE)
            if block * BLOCK_SIZE + offset in before
        }
        self.manager.resize(plan)
        if self.log.active:
            self.log.append(PoolRebuilt(0, num_blocks, "resized", 0, 0))
        assert (self.pool.num_blocks, self.pool.num_used + self.pool.num_idle_pinned) == (num_blocks, used)
        left = min(cached, num_blocks - 1 - used)
        assert [self.pool.hashes[block] for block in self.pool._free.cached()] == in_order[cached - left :]
        assert all(len(column) == num_blocks for column in (self.pool.ref_counts, self.pool.hashes))

    @rule()
    def ledger_catches_up(self) -> None:
        self.ledger.catch_up()

    @invariant()
    def ledger_equals_the_engine_after_every_rule(self) -> None:
        """Half of the time; else it only catches up now and then, and loses events if the log is short."""
        if getattr(self, "is_followed_closely", False):
            self.ledger.catch_up()

    # ------------------------------------------------------------------ invariants

    @invariant()
    def pool_and_tables_are_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.manager.check_integrity()
        assert self.pool.capacity == self.pool.num_empty + self.pool.num_cached + self.pool.num_used

    @invariant()
    def every_token_can_be_read_back(self) -> None:
        for owner, sequence in getattr(self, "sequences", {}).items():
            for group in self.manager.groups:
                table, window = group.tables[owner], group.window
                first = 0 if window is None else max(0, sequence.computed - window + 1)
                slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, sequence.computed)]
                expected = [(group.number, token) for token in sequence.tokens[first : sequence.computed]]
                assert [self.memory[slot] for slot in slots] == expected

    @invariant()
    def windows_bound_what_is_held(self) -> None:
        for owner in getattr(self, "sequences", ()):
            for group in self.manager.groups:
                if group.window is not None:
                    assert len(group.held(owner)) <= (group.window - 2) // BLOCK_SIZE + 2

    @invariant()
    def cached_blocks_hold_what_their_hash_says(self) -> None:
        """Whoever hits a hash later reads these tokens: nobody may have written over them."""
        if not hasattr(self, "pool"):
            return
        for block, content in enumerate(self.pool.hashes):
            if content is not None:
                held = [self.memory[block * BLOCK_SIZE + offset] for offset in range(BLOCK_SIZE)]
                assert self.contents[content] == held

    @invariant()
    def no_block_is_writable_by_two(self) -> None:
        if not hasattr(self, "pool"):
            return
        partial = Counter(
            group.tables[owner][s.computed // BLOCK_SIZE]
            for group in self.manager.groups
            for owner, s in self.sequences.items()
            if s.computed // BLOCK_SIZE < len(group.tables[owner])
        )
        partial.pop(NULL_BLOCK, None)
        for block, writers in partial.items():
            if writers > 1:
                assert self.pool.ref_counts[block] >= writers, "then prepare_write copies it first"

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for owner in list(self.sequences):
            self.manager.release(owner, "finished")
        self.ledger.catch_up()
        assert self.pool.num_used == 0
        assert self.pool.num_cached + self.pool.num_empty == self.pool.capacity

    # ------------------------------------------------------------------ parts

    def _is_used(self, content: BlockHash) -> bool:
        block = self.pool.find(content)
        return block is not None and self.pool.ref_counts[block] > 0

    def _any_sequence(self, data: st.DataObject) -> Owner:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    def _compute(self, owner: Owner, end: int) -> None:
        """Write the K/V of a sequence's next tokens, as a step would; do nothing when blocks are short."""
        sequence = self.sequences[owner]
        start = sequence.computed
        end = min(end, start + MAX_CHUNK)
        if end <= start:
            return
        needed = self.manager.num_blocks_to_write(owner, start, end)
        free_before = self.pool.num_free
        copies = self.manager.prepare_write(owner, start, end, "decode")
        assert (copies is None) == (needed > free_before)
        if copies is None:
            assert self.pool.num_free == free_before
            return
        for copy in copies:
            for offset in range(BLOCK_SIZE):
                slot = copy.source * BLOCK_SIZE + offset
                if slot in self.memory:
                    self.memory[copy.destination * BLOCK_SIZE + offset] = self.memory[slot]
        for group in self.manager.groups:
            for position in range(start, end):
                block = group.tables[owner][position // BLOCK_SIZE]
                assert self.pool.ref_counts[block] == 1, "a step writes to blocks of one owner only"
                assert self.pool.hashes[block] is None, "a step never writes to content that others may look up"
                self.memory[block * BLOCK_SIZE + position % BLOCK_SIZE] = (group.number, sequence.tokens[position])
        written = self.manager.record_written(owner, start, end)
        emit_written(self.log, self.manager, owner.request, written)
        sequence.computed = end
        self._remember_contents(sequence)
        self.manager.store_full(owner, sequence.chain, end, sequence.slice)
        self.manager.pass_windows(owner, end)

    def _remember_contents(self, sequence: NaiveSequence) -> None:
        chain = HashChain(ROOT, BLOCK_SIZE)
        num_full = sequence.computed // BLOCK_SIZE
        for index, content in enumerate(chain.upto(num_full, sequence.slice)):
            tokens = sequence.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            for number in range(len(self.windows)):
                self.contents[hash_in_group(content, number)] = [(number, token) for token in tokens]
