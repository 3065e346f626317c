"""Device, host and disk at random: swaps, offloads, restores, aborts, delays, failures, with a ledger that follows."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from builders import ROOT, LedgerFollower, emit_written
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_faults import FaultyFiles
from tier_stage import BLOCK_SIZE, TierStage, content_of

from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.tiers import TransferKind, TransferOutcome
from kvwatch_engine.memory.block_hash import HashChain
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.memory.tiers.stores import Bytes


@dataclass
class Line:
    """A sequence as somebody sees it who has never heard of blocks."""

    tokens: list[int]
    computed: int = 0
    chain: HashChain = field(default_factory=lambda: HashChain(ROOT, BLOCK_SIZE))

    def slice(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]


@dataclass
class Customer:
    """A request: its sequences, and what it is waiting for."""

    lines: dict[Owner, Line]
    state: str = "running"
    first_index: int = 0
    num_hits: int = 0


class TierMachine(RuleBasedStateMachine):
    """The bytes of every block that anybody may read are what its tokens say, always."""

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None
        self.has_removed_files = False

    @initialize(
        num_blocks=st.integers(5, 14), host=st.integers(0, 8), disk=st.integers(0, 8), seconds=st.sampled_from([1, 100])
    )
    def start(self, num_blocks: int, host: int, disk: int, seconds: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvwatch-tiers-"))
        self.has_host, self.has_disk = host > 0, disk > 0 or host == 0
        self.stage = TierStage(
            num_blocks, host, disk if host else max(disk, 1), self.folder, transfer_seconds=float(seconds)
        )
        self.tiers, self.manager = self.stage.tiers, self.stage.manager
        self.ledger = LedgerFollower(self.stage.log, self.stage.snapshot)
        self.customers: dict[str, Customer] = {}
        self.contents: dict[BlockHash, list[int]] = {}
        self.counter = 0

    # ------------------------------------------------------------------ requests

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), computed=st.integers(1, 14))
    def admit(self, tokens: list[int], computed: int) -> None:
        name = f"r{self.counter}"
        self.counter += 1
        owner, line = Owner(name, 0), Line(tokens)
        limit = (len(tokens) - 1) // BLOCK_SIZE
        hashes = list(line.chain.upto(limit, line.slice)[:limit])
        prefix = self.manager.find_prefix(hashes)
        hits = self.tiers.find(hashes[len(prefix) :])
        if hits:
            self.tiers.claim(name, 0, hits)
        if not self.manager.open(owner, prefix, len(tokens)):
            if hits:
                self.tiers.end_claim(name, 0)
            return
        line.computed = len(prefix) * BLOCK_SIZE
        customer = self.customers[name] = Customer({owner: line}, first_index=len(prefix))
        customer.num_hits = sum(len(hit.hashes) for hit in hits)
        if hits:
            self.tiers.begin_restore(name, 0, len(prefix), hits)
            customer.state = "restoring"
        else:
            self._compute(owner, min(len(tokens), line.computed + computed))

    @precondition(lambda self: self._in_state("running"))
    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 5))
    def go_on(self, data: st.DataObject, token: int, count: int) -> None:
        customer = self.customers[self._any(data, "running")]
        owner = data.draw(st.sampled_from(sorted(customer.lines)))
        line = customer.lines[owner]
        if line.computed == len(line.tokens):
            line.tokens.extend([token] * count)
        self._compute(owner, min(len(line.tokens), line.computed + count))

    @precondition(lambda self: self._in_state("running"))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = self._any(data, "running")
        customer = self.customers[name]
        parent = data.draw(st.sampled_from(sorted(customer.lines)))
        source = customer.lines[parent]
        child = Owner(name, 1 + max(owner.sequence for owner in customer.lines))
        shared = self.manager.fork(parent, child, source.computed)
        chain = source.chain.fork(source.computed // BLOCK_SIZE)
        customer.lines[child] = Line(source.tokens[: source.computed], shared, chain)

    @precondition(lambda self: self._in_state("running"))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = self._any(data, "running")
        if self.tiers.can_take(name):
            assert self.has_host
            self.tiers.begin_out(name)
            self.customers[name].state = "going"

    @precondition(lambda self: self._in_state("swapped"))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        name = self._any(data, "swapped")
        needed, free = self.tiers.num_blocks_to_restore(name), self.manager.pool.num_free
        began = self.tiers.begin_in(name)
        assert began == (needed <= free)
        if began:
            assert self.manager.pool.num_free == free - needed
            self.customers[name].state = "coming"

    @precondition(lambda self: self.customers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finish or abort, whatever is going on."""
        name = data.draw(st.sampled_from(sorted(self.customers)))
        customer = self.customers.pop(name)
        if customer.state == "running":
            for owner in customer.lines:
                self.manager.release(owner, "finished")
        self.tiers.drop(name)

    # ------------------------------------------------------------------ time and mishaps

    @rule(num_jobs=st.integers(1, 4))
    def move(self, num_jobs: int) -> None:
        self.stage.carry_out(num_jobs)

    @rule()
    def poll(self) -> None:
        for outcome in self.tiers.poll():
            if outcome.request_id in self.customers:
                self._take(self.customers[outcome.request_id], outcome)

    @rule(seconds=st.sampled_from([0.01, 2]))
    def pass_time(self, seconds: float) -> None:
        self.stage.clock.advance(seconds)

    @rule(which=st.sampled_from(["device", "host", "writes", "reads"]), n=st.integers(0, 3), is_lasting=st.booleans())
    def let_fail(self, which: str, n: int, is_lasting: bool) -> None:
        files = self.stage.files
        assert isinstance(files, FaultyFiles)
        faults = {
            "device": self.stage.device_fault,
            "host": self.stage.host_fault,
            "writes": files.writes,
            "reads": files.reads,
        }
        faults[which].arm(n, is_lasting=is_lasting)

    @rule(data=st.data(), damage=st.sampled_from(["flip", "cut", "remove"]))
    def damage_a_file(self, data: st.DataObject, damage: str) -> None:
        assert self.folder is not None
        files = [path for path in sorted(self.folder.glob("blocks/*/*")) if path.stat().st_size]
        if not files:
            return
        path = files[data.draw(st.integers(0, len(files) - 1))]
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if damage == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        elif damage == "cut":
            path.write_bytes(content[:place])
        else:
            path.unlink()
            self.has_removed_files = True

    @rule()
    def clear(self) -> None:
        self.manager.pool.clear_cache()
        self.tiers.clear()
        assert self.tiers.find(list(self.contents)[:1]) == []

    # ------------------------------------------------------------------ truth

    @invariant()
    def everything_holds(self) -> None:
        if not self.folder:
            return
        self.stage.check_integrity()
        self.ledger.catch_up()
        for customer in self.customers.values():
            if customer.state == "running":
                for owner, line in customer.lines.items():
                    self._check_readable(owner, line)
        self._check_index(self.manager.pool.hashes, self.stage.memory)
        for state in self.tiers.states():
            if state.tier == "host":
                self._check_index(state.hashes, self.stage.host_memory)
            assert state.num_blocks >= 2

    def teardown(self) -> None:
        if not self.folder:
            return
        for name, customer in self.customers.items():
            if customer.state == "running":
                for owner in customer.lines:
                    self.manager.release(owner, "finished")
            self.tiers.drop(name)
        self.customers.clear()
        while self.tiers.num_in_flight:
            self.stage.carry_out()
            self.tiers.poll()
        self.everything_holds()
        pools = [self.manager.pool.to_state(), *self.tiers.states()]
        assert all(sum(state.ref_counts) == 0 for state in pools), "blocks leaked"
        self.tiers.close()
        shutil.rmtree(self.folder)

    # ------------------------------------------------------------------ parts

    def _in_state(self, state: str) -> list[str]:
        return sorted(name for name, customer in self.customers.items() if customer.state == state)

    def _any(self, data: st.DataObject, state: str) -> str:
        return data.draw(st.sampled_from(self._in_state(state)))

    def _compute(self, owner: Owner, end: int) -> None:
        """Write K/V as the model would: the whole content of each block that gets a token."""
        line = self.customers[owner.request].lines[owner]
        if end <= line.computed:
            return
        copies = self.manager.prepare_write(owner, line.computed, end, "decode")
        if copies is None:
            return
        for copy in copies:
            self.stage.memory[copy.destination] = self.stage.memory[copy.source]
        self.manager.record_written(owner, line.computed, end)
        table = self.manager.table(owner)
        for index in range(line.computed // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            self.stage.memory[table[index]] = content_of(line.tokens[: min(end, (index + 1) * BLOCK_SIZE)])
        line.computed = end
        self._report_written(owner)
        self.manager.store_full(owner, line.chain, end, line.slice)
        hashes = line.chain.upto(end // BLOCK_SIZE, line.slice)
        for index in range(end // BLOCK_SIZE):
            self.contents[hashes[index]] = line.tokens[: (index + 1) * BLOCK_SIZE]

    def _report_written(self, owner: Owner) -> None:
        emit_written(self.stage.log, self.manager, owner.request, self.manager.table(owner))

    def _take(self, customer: Customer, outcome: TransferOutcome) -> None:
        if outcome.kind is TransferKind.RESTORE:
            assert customer.state == "restoring"
            if outcome.is_given_up:
                assert not [owner for owner in self.manager.owners() if owner.request == outcome.request_id]
                self._recompute(outcome.request_id)
                return
            assert outcome.error != "missing" or self.has_removed_files, "it was claimed"
            assert outcome.num_blocks == customer.num_hits or outcome.error
            assert outcome.num_blocks <= customer.num_hits
            for line in customer.lines.values():
                line.computed = (customer.first_index + outcome.num_blocks) * BLOCK_SIZE
            customer.state = "running"
        elif outcome.error:
            assert customer.state in ("going", "coming")
            assert not [owner for owner in self.manager.owners() if owner.request == outcome.request_id]
            assert outcome.num_blocks == 0
            self._recompute(outcome.request_id)
        elif outcome.kind is TransferKind.SWAP_OUT:
            assert customer.state == "going"
            assert not [owner for owner in self.manager.owners() if owner.request == outcome.request_id]
            customer.state = "swapped"
        else:
            assert customer.state == "coming"
            customer.state = "running"

    def _recompute(self, name: str) -> None:
        """As a scheduler would, the first sequence alone, if there is room; under the same name."""
        self.tiers.drop(name)
        customer = self.customers.pop(name)
        owner = Owner(name, 0)
        if owner not in customer.lines:
            return
        line = Line(customer.lines[owner].tokens)
        limit = (len(line.tokens) - 1) // BLOCK_SIZE
        prefix = self.manager.find_prefix(line.chain.upto(limit, line.slice)[:limit])
        if self.manager.open(owner, prefix, len(line.tokens)):
            line.computed = len(prefix) * BLOCK_SIZE
            self.customers[name] = Customer({owner: line})

    def _check_readable(self, owner: Owner, line: Line) -> None:
        table = self.manager.table(owner)
        for index in range(-(-line.computed // BLOCK_SIZE)):
            expected = content_of(line.tokens[: min(line.computed, (index + 1) * BLOCK_SIZE)])
            assert np.array_equal(self.stage.memory[table[index]], expected), f"{owner} block {index}"

    def _check_index(self, hashes: Sequence[bytes | None], memory: Bytes) -> None:
        for block, content in enumerate(hashes):
            if content is not None:
                assert np.array_equal(memory[block], content_of(self.contents[BlockHash(content)])), f"block {block}"
