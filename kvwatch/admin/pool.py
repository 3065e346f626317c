"""`GET pool` and `GET engines`: the ledger's view as an answer. Asks no engine; costs O(samples of the view)."""

from collections import defaultdict

import msgspec

from kvwatch.admin.audit import utc
from kvwatch.admin.engines import AdminEngine, EngineQuery
from kvwatch.admin.operation import PREFIX, Answer, Call, NoQuery, Operation
from kvwatch.admin.reach import Reach, ReachState, UnreachedEngine
from kvwatch.ledger.view import View
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric

EMPTY, USED, CACHED = "empty", "used", "cached"


class GroupPool(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one KV group in one tier."""

    group: str
    used: int
    cached: int
    shared: int | None
    """Used blocks in more than one block table."""
    saved_by_sharing: int | None
    """Table entries minus distinct used blocks."""
    token_capacity: int | None
    held_slots: int | None
    filled_slots: int | None
    waste_ratio: float | None


class TierPool(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one tier, the null block left out."""

    tier: str
    capacity: int
    empty: int
    used: int
    cached: int
    free: int | None
    """Blocks that can be allocated now."""
    equation: str
    """The law with its numbers."""
    is_lawful: bool
    """Whether the equation holds."""
    usage_ratio: float | None
    watermark: int | None
    orphaned: int | None
    in_transfer: int | None
    groups: list[GroupPool]


class IndexedBlocks(msgspec.Struct, frozen=True):
    """Resident hashes of an engine that does not tell its blocks."""

    tier: str
    group: str
    blocks: int


class PoolAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after one step."""

    engine: str
    dp_rank: int
    seq: int
    """Newest event that is contained."""
    step: int
    block_size_tokens: int | None
    block_bytes: int | None
    tiers: list[TierPool]
    """Empty for an engine that does not tell its blocks."""
    indexed: list[IndexedBlocks]


class EngineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that is watched."""

    engine: str
    dp_rank: int
    model_name: str
    state: ReachState
    """Whether it was never reached, is reached, or was lost."""
    since: str
    """When this state began, to a second or so."""
    is_up: bool
    """Whether it is reached."""
    is_alive: bool | None
    """Whether it makes progress; none while it is not reached."""
    is_ready: bool | None
    """Whether it takes requests; none while it is not reached."""
    can_change: bool
    """Whether it can be looked into and changed from here."""


class EnginesAnswer(msgspec.Struct, frozen=True):
    """All engines that are watched, or looked for."""

    engines: list[EngineSummary]


async def get_engines(call: Call[NoQuery, None]) -> Answer:
    """List the engines, those of which nothing is known yet at the end."""
    engines = call.site.engines
    reached = [_summary(each, engines.reach(each)) for each in engines.all()]
    waited_for = [_unreached(each, engines.reach(each)) for each in engines.unreached()]
    return Answer(EnginesAnswer([*reached, *waited_for]))


async def get_pool(call: Call[EngineQuery, None]) -> Answer:
    """Show the pool."""
    engine = call.site.engines.find(call.query)
    return Answer(pool_answer(engine, engine.view()))


def pool_answer(engine: AdminEngine, view: View) -> PoolAnswer:
    """Return what a view says of the pool."""
    found = _Gauges(view)
    return PoolAnswer(
        engine=engine.name,
        dp_rank=engine.dp_rank,
        seq=view.seq,
        step=view.step,
        block_size_tokens=found.whole(m.KV_BLOCK_SIZE_TOKENS),
        block_bytes=found.whole(m.KV_BLOCK_BYTES),
        tiers=[_tier(labels[0], found) for labels in found.labels(m.KV_BLOCK_CAPACITY)],
        indexed=[
            IndexedBlocks(tier, group, found.count(m.KV_INDEXED_BLOCKS, tier, group))
            for tier, group in found.labels(m.KV_INDEXED_BLOCKS)
        ],
    )


class _Gauges:
    """The gauges of a view by metric and labels."""

    def __init__(self, view: View) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for sample in view.gauges:
            self._values[sample.metric.name][sample.labels] = sample.value

    def labels(self, metric: Metric) -> list[tuple[str, ...]]:
        return list(self._values[metric.name])

    def value(self, metric: Metric, *labels: str) -> float | None:
        return self._values[metric.name].get(labels)

    def whole(self, metric: Metric, *labels: str) -> int | None:
        value = self.value(metric, *labels)
        return None if value is None else int(value)

    def count(self, metric: Metric, *labels: str) -> int:
        return self.whole(metric, *labels) or 0

    def blocks(self, tier: str) -> dict[tuple[str, str], int]:
        """Return the blocks of a tier by group and state."""
        return {
            (group, state): int(n)
            for (where, group, state), n in self._values[m.KV_BLOCKS.name].items()
            if where == tier
        }


def _tier(tier: str, found: _Gauges) -> TierPool:
    blocks = found.blocks(tier)
    empty, used, cached = (sum(n for (_, s), n in blocks.items() if s == state) for state in (EMPTY, USED, CACHED))
    groups = sorted({group for group, state in blocks if state != EMPTY})
    terms = [
        f"{n} {state}{f' (group {group})' if len(groups) > 1 and group else ''}" for (group, state), n in blocks.items()
    ]
    capacity = found.count(m.KV_BLOCK_CAPACITY, tier)
    is_lawful = capacity == empty + used + cached
    return TierPool(
        tier=tier,
        capacity=capacity,
        empty=empty,
        used=used,
        cached=cached,
        free=found.whole(m.KV_FREE_BLOCKS, tier),
        equation=f"capacity {capacity} {'=' if is_lawful else '!='} {' + '.join(terms)}",
        is_lawful=is_lawful,
        usage_ratio=found.value(m.KV_USAGE_RATIO, tier),
        watermark=found.whole(m.KV_WATERMARK_BLOCKS, tier),
        orphaned=found.whole(m.KV_ORPHANED_BLOCKS, tier),
        in_transfer=found.whole(m.KV_BLOCKS_IN_TRANSFER, tier),
        groups=[_group(tier, group, blocks, found) for group in groups],
    )


def _group(tier: str, group: str, blocks: dict[tuple[str, str], int], found: _Gauges) -> GroupPool:
    return GroupPool(
        group=group,
        used=blocks.get((group, USED), 0),
        cached=blocks.get((group, CACHED), 0),
        shared=found.whole(m.KV_SHARED_BLOCKS, tier, group),
        saved_by_sharing=found.whole(m.KV_SHARING_SAVED_BLOCKS, tier, group),
        token_capacity=found.whole(m.KV_TOKEN_CAPACITY, tier, group),
        held_slots=found.whole(m.KV_HELD_SLOTS, tier, group),
        filled_slots=found.whole(m.KV_FILLED_SLOTS, tier, group),
        waste_ratio=found.value(m.KV_WASTE_RATIO, tier, group),
    )


def _summary(engine: AdminEngine, reach: Reach) -> EngineSummary:
    is_up = reach.state is ReachState.REACHED
    return EngineSummary(
        engine=engine.name,
        dp_rank=engine.dp_rank,
        model_name=engine.labels.get("model_name", ""),
        state=reach.state,
        since=utc(reach.since_ns),
        is_up=is_up,
        is_alive=engine.control.is_alive() if is_up else None,
        is_ready=engine.control.is_ready() if is_up else None,
        can_change=engine.live is not None or engine.forward is not None,
    )


def _unreached(engine: UnreachedEngine, reach: Reach) -> EngineSummary:
    """Describe an engine as its metrics do: of its ranks the first is known to be missing."""
    return EngineSummary(
        engine=engine.name,
        dp_rank=0,
        model_name=engine.model_name,
        state=reach.state,
        since=utc(reach.since_ns),
        is_up=False,
        is_alive=None,
        is_ready=None,
        can_change=False,
    )


OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/engines", name="listEngines", tag="read",
        brief="Engines that are watched: which are reached, which never were, which were lost, and since when.",
        answer=EnginesAnswer, handler=get_engines,
    ),
    Operation(
        method="GET", path=f"{PREFIX}/pool", name="getPool", tag="read",
        brief="Blocks by tier, group and state, with the equation of the law.",
        query=EngineQuery, answer=PoolAnswer, handler=get_pool, is_answered_here=True,
    ),
)  # fmt: skip
