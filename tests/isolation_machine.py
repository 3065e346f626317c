"""Who may share a block: block tables driven at random with salts, adapters and images, against a naive model.

The naive model has never heard of hashes. It writes into each slot everything that its K/V depends on: the keys of its
sequence, the tokens up to there, and what images stand behind them. Two sequences may share a block only if they
would write the same into it, and a new sequence must find every block that it would have written, while it is cached.
"""

from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.memory.block_hash import HashChain, MultimodalItem, root_hash, sequence_keys
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.prefix import Prefix

BLOCK_SIZE = 3
WORDS = ("", "a", "ab", "b")
"""Few, so that they meet; each may be a salt, a tenant and an adapter, and must then not be taken for another kind."""
Content = int
"""Number that stands for everything that one slot's K/V depends on."""


@dataclass(frozen=True)
class Keys:
    """What separates sequences besides their tokens."""

    salt: str
    tenant: str
    adapter: str
    images: tuple[MultimodalItem, ...]

    def chain(self) -> HashChain:
        keys = sequence_keys(
            BLOCK_SIZE, "weights", cache_salt=self.salt, tenant_salt=self.tenant, adapter=self.adapter.encode()
        )
        return HashChain(root_hash(keys), BLOCK_SIZE, self.images)

    def image_at(self, position: int) -> object:
        """Return what the model sees at a token in place of its embedding; None where it is the token."""
        for image in self.images:
            if image.position <= position < image.position + image.num_tokens:
                return image.content_hash, position - image.position, image.num_tokens
        return None


@dataclass
class Running:
    """A sequence with a block table."""

    keys: Keys
    tokens: list[int]
    computed: int
    chain: HashChain

    def slice(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]


@st.composite
def images(draw: st.DrawFn) -> tuple[MultimodalItem, ...]:
    """Return up to two images of few contents, one behind the other."""
    found: list[MultimodalItem] = []
    begin = 0
    for _ in range(draw(st.integers(0, 2))):
        position = begin + draw(st.integers(0, 4))
        num_tokens = draw(st.integers(1, 5))
        found.append(MultimodalItem(position, num_tokens, draw(st.sampled_from([b"cat", b"dog", b"c"]))))
        begin = position + num_tokens
    return tuple(found)


KEYS = st.builds(Keys, st.sampled_from(WORDS), st.sampled_from(WORDS), st.sampled_from(WORDS), images())
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=16)


class IsolationMachine(RuleBasedStateMachine):
    """Open, go on, fork, join, release, clear."""

    @initialize(num_blocks=st.integers(6, 40))
    def start(self, num_blocks: int) -> None:
        log = EventLog()
        self.pool = BlockPool(num_blocks, log)
        self.manager = BlockManager(self.pool, BLOCK_SIZE, log)
        self.running: dict[Owner, Running] = {}
        self.history: list[tuple[Keys, list[int]]] = []
        self.memory: dict[int, Content] = {}
        self.numbers: dict[tuple[object, ...], Content] = {}
        self.num_opened = 0

    # ------------------------------------------------------------------ rules

    @rule(keys=KEYS, tokens=TOKENS)
    def open_new(self, keys: Keys, tokens: list[int]) -> None:
        self._open(keys, tokens)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def open_the_same_again(self, data: st.DataObject, more: list[int]) -> None:
        """A sequence that agrees with an earlier one in every key."""
        keys, tokens = data.draw(st.sampled_from(self.history))
        self._open(keys, [*tokens, *more])

    @precondition(lambda self: self.history)
    @rule(data=st.data(), other=KEYS, which=st.sampled_from(["salt", "tenant", "adapter", "images"]))
    def open_with_one_other_key(self, data: st.DataObject, other: Keys, which: str) -> None:
        """A sequence that differs from an earlier one in one key alone, if at all."""
        keys, tokens = data.draw(st.sampled_from(self.history))
        fields = {name: getattr(keys, name) for name in ("salt", "tenant", "adapter", "images")}
        self._open(Keys(**{**fields, which: getattr(other, which)}), tokens)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), by=st.integers(1, 2))
    def open_with_images_elsewhere(self, data: st.DataObject, by: int) -> None:
        """The same tokens and images, a little later: mostly in the same blocks."""
        keys, tokens = data.draw(st.sampled_from(self.history))
        moved = tuple(MultimodalItem(each.position + by, each.num_tokens, each.content_hash) for each in keys.images)
        self._open(replace(keys, images=moved), tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def go_on(self, data: st.DataObject, tokens: list[int]) -> None:
        owner = self._any(data)
        self.running[owner].tokens += tokens
        self._compute(owner)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), back=st.integers(0, 4))
    def fork(self, data: st.DataObject, back: int) -> None:
        parent = self._any(data)
        source = self.running[parent]
        num_tokens = max(0, source.computed - back)
        child = Owner(parent.request, 1 + max(o.sequence for o in self.running if o.request == parent.request))
        shared = self.manager.fork(parent, child, num_tokens)
        chain = source.chain.fork(num_tokens // BLOCK_SIZE)
        self.running[child] = Running(source.keys, source.tokens[:num_tokens], shared, chain)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ways=st.lists(st.integers(0, 1), min_size=2, max_size=10))
    def fork_part_and_join(self, data: st.DataObject, ways: list[int]) -> None:
        """A beam goes its own way, and then on from the sequence that it came from."""
        parent = self._any(data)
        source = self.running[parent]
        if source.computed != len(source.tokens):
            return
        half = len(ways) // 2
        child = Owner(parent.request, 1 + max(o.sequence for o in self.running if o.request == parent.request))
        shared = self.manager.fork(parent, child, source.computed)
        chain = source.chain.fork(source.computed // BLOCK_SIZE)
        self.running[child] = branch = Running(source.keys, [*source.tokens, *ways[half : 2 * half]], shared, chain)
        source.tokens += ways[:half]
        self._compute(parent)
        self._compute(child)
        if source.computed == branch.computed == len(source.tokens):
            self.manager.join(parent, child, source.computed)
            branch.tokens, branch.chain = list(source.tokens), source.chain.fork(source.computed // BLOCK_SIZE)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self._any(data)
        self.manager.release(owner, "finished")
        del self.running[owner]

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()

    # ------------------------------------------------------------------ invariants

    @invariant()
    def whoever_shares_a_block_agrees_in_everything(self) -> None:
        """Each sequence reads from its blocks exactly what it would have written there itself."""
        for owner, running in getattr(self, "running", {}).items():
            table = self.manager.table(owner)
            slots = (table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(running.computed))
            assert [self.memory[slot] for slot in slots] == self._contents(running)[: running.computed]

    @invariant()
    def tables_are_sound(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    # ------------------------------------------------------------------ parts

    def _any(self, data: st.DataObject) -> Owner:
        return data.draw(st.sampled_from(sorted(self.running)))

    def _contents(self, running: Running) -> list[Content]:
        """Return what the K/V of each token depends on: keys, and all tokens and images up to it."""
        keys = running.keys
        last = self._number(keys.salt, keys.tenant, keys.adapter)
        return [last := self._number(last, t, keys.image_at(p)) for p, t in enumerate(running.tokens)]

    def _number(self, *what: object) -> Content:
        return self.numbers.setdefault(what, len(self.numbers))

    def _open(self, keys: Keys, tokens: list[int]) -> None:
        running = Running(keys, list(tokens), 0, keys.chain())
        num_full = len(tokens) // BLOCK_SIZE
        prefix = self.manager.find_prefix(running.chain.upto(num_full, running.slice)[:num_full])
        self._check_found(running, prefix)
        prefix = Prefix((prefix.groups[0][: (len(tokens) - 1) // BLOCK_SIZE],))
        owner = Owner(f"r{self.num_opened}", 0)
        if not self.manager.open(owner, prefix, len(tokens)):
            return
        self.num_opened += 1
        running.computed = len(prefix) * BLOCK_SIZE
        self.running[owner] = running
        self.history.append((keys, list(tokens)))
        self._compute(owner)

    def _check_found(self, running: Running, prefix: Prefix) -> None:
        """The hit is the longest run of blocks that hold what this sequence would write, and that can be found."""
        held = {
            tuple(self.memory[block * BLOCK_SIZE + offset] for offset in range(BLOCK_SIZE))
            for block, content in enumerate(self.pool.hashes)
            if content is not None
        }
        mine, expected = self._contents(running), 0
        while (end := (expected + 1) * BLOCK_SIZE) <= len(mine) and tuple(mine[end - BLOCK_SIZE : end]) in held:
            expected += 1
        assert len(prefix) == expected

    def _compute(self, owner: Owner) -> None:
        """Write the K/V of what is missing; do nothing when blocks are short."""
        running = self.running[owner]
        start, end = running.computed, len(running.tokens)
        if end <= start:
            return
        copies = self.manager.prepare_write(owner, start, end, "decode")
        if copies is None:
            return
        for copy in copies:
            for offset in range(BLOCK_SIZE):
                slot = copy.source * BLOCK_SIZE + offset
                if slot in self.memory:
                    self.memory[copy.destination * BLOCK_SIZE + offset] = self.memory[slot]
        table = self.manager.table(owner)
        contents = self._contents(running)
        for position in range(start, end):
            slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            self.memory[slot] = contents[position]
        self.manager.record_written(owner, start, end)
        running.computed = end
        self.manager.store_full(owner, running.chain, end, running.slice)
