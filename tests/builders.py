"""One-line setup for tests: real parts, made small. No mocks of our own classes."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from kvwatch.ledger.ledger import Ledger
from kvwatch.telemetry.events import StepScheduled
from kvwatch.telemetry.events.block import GROUPS
from kvwatch.telemetry.log import EventLog, GapError
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, GroupState, TierState
from kvwatch_engine.contracts.cache import BlockLayout, KVDtype, KVGroup
from kvwatch_engine.contracts.errors import GuideFailed
from kvwatch_engine.contracts.request import GenerationRequest, PromptLogprobs
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import (
    Candidates,
    Int64Array,
    OperationTimes,
    SampleRow,
    ScoredSpan,
    StepInput,
    StepResult,
)
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_hash import root_hash
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool
from kvwatch_engine.memory.pins import PrefixPins

ROOT = root_hash([])
_GROUP_BITS = 32


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self.now_ns = start_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return 1_700_000_000_000_000_000 + self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def _operation_times(num_tokens: int) -> OperationTimes:
    """Return times that differ from operation to operation, though the clock stands still."""
    return OperationTimes(*(num_tokens * each for each in (70, 20, 5, 4, 3)))


class NullModel:
    """A `StepExecutor` whose tokens depend on (prompt, seed, position) only, computed by arithmetic instead of a model.

    It also keeps a naive copy of the paged cache (slot -> token and group) and checks on every step that each position
    that a sequence can see in each KV group can be read back through its block table: what a real attention kernel
    relies on.
    """

    def __init__(self, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size
        self.period = 0
        """Tokens after which an answer repeats itself, but for a slip now and then: so drafts are found. 0: never."""
        self.slots: dict[int, int] = {}
        self.slot_bytes = 16
        self.spare_bytes = 1 << 40
        """Memory beside that of the present pool."""
        self.block_size = 0
        self.windows: tuple[int | None, ...] = (None,)
        self.on_step: Callable[[StepInput], None] = lambda _step: None
        self.on_context: Callable[[int, list[int]], None] = lambda _row, _tokens: None
        """Is shown what each sequence's queries look back at, drafts aside."""

    def next_token(self, prompt: Sequence[int], seed: int, position: int) -> int:
        """Return the token that a sequence continues with."""
        if self.period:
            position = position % self.period + (position % 7 == 6)
        return (sum(prompt) * 31 + seed % 1009 + position * position * 7) % self.vocab_size

    def execute(self, step: StepInput) -> StepResult:
        self.on_step(step)
        self._copy_blocks(step)
        for number, group in enumerate(step.groups):
            for slot, token in zip(group.slot_mapping.tolist(), step.token_ids.tolist(), strict=True):
                self.slots[slot] = (number << _GROUP_BITS) + token
        for number in range(len(self.windows)):
            self._check_readable(step, number)
        candidates = {
            place: self.candidates(row) for place, row in enumerate(step.sample_rows) if row.num_candidates
        }  # fmt: skip
        errors: dict[int, str] = {}
        tokens = [
            candidates[place].token_ids[0] if place in candidates else self._sample(row, place, errors)
            for place, row in enumerate(step.sample_rows)
        ]
        return StepResult(
            token_ids=tokens, logprobs=[None] * len(tokens), forward_ns=0, sample_ns=0, errors=errors,
            candidates=candidates, scored=tuple(self.score(step, span) for span in step.scored),
            operations=None if step.adapters else _operation_times(step.num_tokens),
            logits_ns=11 * len(step.sample_rows),
        )  # fmt: skip

    def score(self, step: StepInput, span: ScoredSpan) -> PromptLogprobs:
        """Return log-probabilities that depend on each token, the one before it, and its position."""
        packed = np.arange(span.start, span.start + len(span.token_ids))
        token_ids = np.array(span.token_ids, dtype=np.int64)
        state = step.token_ids[packed] * 31 + token_ids * 7 + step.positions[packed] * 3
        top = np.arange(span.num_top)[None, :] + state[:, None]
        return PromptLogprobs(
            token_ids=token_ids, logprobs=-(state % 97) / 10, ranks=state % 11 + 1,
            top_token_ids=top % self.vocab_size, top_logprobs=-(top % 89) / 10,
        )  # fmt: skip

    def candidates(self, row: SampleRow) -> Candidates:
        """Return what a beam may continue with; the scores depend on its prompt and all of its tokens."""
        tokens = row.output_token_ids[: row.position]
        state = sum(row.prompt_token_ids) * 31 + sum((place + 3) * token for place, token in enumerate(tokens))
        scores = {
            token: -((state * 17 + token * token * 29 + token * 7) % 997) / 100
            for token in range(self.vocab_size)
            if token not in row.forbidden_token_ids
        }
        best = sorted(scores, key=lambda token: (-scores[token], token))[: row.num_candidates]
        return Candidates(best, [scores[token] for token in best])

    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        """Have the naive cache anew, as `BlockMemory`: what is not kept cannot be read any more."""
        kept = zip(sources.tolist(), destinations.tolist(), strict=True)
        self.slots = {
            destination * self.block_size + offset: self.slots[source * self.block_size + offset]
            for source, destination in kept
            for offset in range(self.block_size)
            if source * self.block_size + offset in self.slots
        }
        assert all(0 < slot < num_blocks * self.block_size for slot in self.slots)

    def layout(self, block_size: int, kv_dtype: KVDtype) -> BlockLayout:
        dtype = "float32" if kv_dtype == "auto" else kv_dtype
        return BlockLayout(block_size, kv_dtype, dtype, self.slot_bytes * block_size)

    def free_bytes(self) -> int:
        return self.spare_bytes

    def relay(self, layout: BlockLayout, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        """Have the naive cache anew in blocks of another size: what is not copied cannot be read any more."""
        pairs = zip(sources.tolist(), destinations.tolist(), strict=True)
        self.slots = {destination: self.slots[source] for source, destination in pairs}
        self.block_size = layout.block_size
        assert all(layout.block_size <= slot < num_blocks * layout.block_size for slot in self.slots)

    def replace(self, layout: BlockLayout, num_blocks: int) -> None:  # noqa: ARG002
        """Have the naive cache anew, and nothing in it."""
        self.slots = {}
        self.block_size = layout.block_size

    def _sample(self, row: SampleRow, place: int, errors: dict[int, str]) -> int:
        token = self.next_token(row.prompt_token_ids, row.seed, row.position)
        try:
            allowed = None if row.guide is None else row.guide.allowed()
        except GuideFailed as error:
            errors[place] = str(error)
            return -1
        while token in row.forbidden_token_ids or (allowed is not None and not allowed[token]):
            token = (token + 1) % self.vocab_size
        return token

    def _copy_blocks(self, step: StepInput) -> None:
        size = self.block_size
        for source, destination in zip(step.copy_sources.tolist(), step.copy_destinations.tolist(), strict=True):
            for offset in range(size):
                if source * size + offset in self.slots:
                    self.slots[destination * size + offset] = self.slots[source * size + offset]

    def _check_readable(self, step: StepInput, group: int) -> None:
        starts, size, window = step.query_starts.tolist(), self.block_size, self.windows[group]
        for row, context_len in enumerate(step.context_lens.tolist()):
            table = step.groups[group].block_tables[row].tolist()
            num_queries = starts[row + 1] - starts[row]
            first = 0 if window is None else max(0, context_len - num_queries - window + 1)
            read = [self.slots[table[p // size] * size + p % size] for p in range(first, context_len)]
            assert {each >> _GROUP_BITS for each in read} == {group}, "a group reads what it wrote itself"
            seen = [each - (group << _GROUP_BITS) for each in read]
            assert seen[len(seen) - num_queries :] == step.token_ids[starts[row] : starts[row + 1]].tolist()
            if first == 0:
                sampled = [index for index in step.sample_indices.tolist() if starts[row] <= index < starts[row + 1]]
                num_drafted = starts[row + 1] - 1 - min(sampled) if sampled else 0
                self.on_context(row, seen[: len(seen) - num_drafted])


def make_pool(num_blocks: int = 10, log: EventLog | None = None) -> BlockPool:
    return BlockPool(num_blocks, log or EventLog())


def make_manager(
    num_blocks: int = 10,
    block_size: int = 4,
    log: EventLog | None = None,
    windows: Sequence[int | None] = (None,),
    **more: int,
) -> BlockManager:
    log = log or EventLog()
    pool = BlockPool(num_blocks, log, num_groups=len(windows))
    return BlockManager(pool, block_size, log, windows=windows, **more)  # type: ignore[arg-type]


def make_groups(*windows: int | None) -> tuple[KVGroup, ...]:
    """Return KV groups of one layer each."""
    return tuple(KVGroup((layer,), window) for layer, window in enumerate(windows))


def make_settings(**overrides: object) -> EngineSettings:
    values: dict[str, object] = {
        "num_blocks": 41, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8, "max_batch_tokens": 32,
        "eos_token_ids": (3,), "vocab_size": 50, **overrides,
    }  # fmt: skip
    return EngineSettings(**values)  # type: ignore[arg-type]


def make_request(request_id: str, prompt: Sequence[int], **sampling: object) -> GenerationRequest:
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": 8, "seed": 0, **sampling}
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**values),  # type: ignore[arg-type]
    )


def make_core(
    model: NullModel | None = None,
    log: EventLog | None = None,
    *,
    make_tiers: Callable[[BlockManager], Tiers] | None = None,
    **settings: object,
) -> EngineCore:
    model = model or NullModel()
    core = EngineCore(make_settings(**settings), model, log or EventLog(), memory=model, make_tiers=make_tiers)
    model.block_size, model.windows = core.settings.block_size, core.settings.windows
    return core


def run_until_idle(core: EngineCore, max_steps: int = 2000) -> dict[tuple[str, int], list[int]]:
    """Step until nothing is live; return the tokens of each (request, sequence)."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return tokens
        for output in core.step():
            tokens.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
    raise AssertionError(f"requests are still live after {max_steps} steps")


class Recorder:
    """Reads everything that a log receives."""

    def __init__(self, log: EventLog) -> None:
        self._cursor = log.subscribe("recorder")
        self.events: list[Event] = []

    def drain(self) -> list[Event]:
        """Return all events so far."""
        while batch := self._cursor.read():
            self.events += batch
        return self.events


class LedgerFollower:
    """A ledger that follows an engine's events; one that fell behind heals itself with a snapshot."""

    def __init__(self, log: EventLog, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._cursor = log.subscribe("ledger")
        self._snapshot = snapshot
        self.ledger = Ledger()
        self.num_gaps = 0
        self.ledger.load(snapshot())

    def catch_up(self) -> None:
        """Apply everything that has happened; then the ledger must equal the engine exactly."""
        try:
            while events := self._cursor.read():
                for event in events:
                    self.ledger.apply(event)
        except GapError:
            snapshot = self._snapshot()
            self.ledger.load(snapshot)
            self._cursor.resume_at(snapshot.seq)
            self.num_gaps += 1
        assert_same_state(self.ledger.to_snapshot(), self._snapshot())


def assert_same_state(rebuilt: EngineSnapshot, engine: EngineSnapshot) -> None:
    """Compare everything that events tell: blocks, tables, requests. Exactly."""
    assert rebuilt.seq == engine.seq
    assert [_without_empty(tier) for tier in rebuilt.tiers] == [_without_empty(tier) for tier in engine.tiers]
    assert _tables(rebuilt) == _tables(engine)
    assert rebuilt.pins == engine.pins
    assert {t.transfer: t for t in rebuilt.transfers} == {t.transfer: t for t in engine.transfers}
    assert {r.request: (r.state, r.queued_ns) for r in rebuilt.requests} == {
        r.request: (r.state, r.queued_ns) for r in engine.requests
    }


def _tables(snapshot: EngineSnapshot) -> dict[tuple[str, str, int, str], list[int]]:
    return {(s.tier, s.request, s.sequence, s.group): s.block_ids for s in snapshot.sequences if s.block_ids}


def _without_empty(tier: TierState) -> TierState:
    """Return the columns without the groups that empty blocks once had: empty blocks belong to none."""
    is_empty = [not count and content is None for count, content in zip(tier.ref_counts, tier.hashes, strict=True)]
    groups = [0 if empty else group for empty, group in zip(is_empty, tier.block_groups, strict=False)]
    return structs.replace(tier, block_groups=groups)


def snapshot_of(manager: BlockManager, log: EventLog, pins: PrefixPins | None = None) -> EngineSnapshot:
    """Return the snapshot of a manager that belongs to no engine."""
    return EngineSnapshot(
        seq=log.head,
        step=log.step,
        time_ns=log.now_ns,
        block_size_tokens=manager.block_size,
        block_bytes=0,
        watermark_blocks=0,
        max_queued_requests=0,
        max_queued_tokens=0,
        tiers=[manager.pool.to_state()],
        sequences=manager.to_states(),
        requests=[],
        groups=[GroupState(GROUPS[each.number], 1, each.window) for each in manager.groups],
        pins=pins.to_states() if pins is not None else [],
    )


def emit_written(log: EventLog, manager: BlockManager, request: str, blocks: Sequence[int]) -> None:
    """Report written blocks as the scheduler does."""
    if log.active:
        filled = [manager.pool.filled_slots[block] for block in blocks]
        log.append(StepScheduled([request], [len(blocks)], len(blocks), 1, list(blocks), filled))
