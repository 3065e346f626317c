"""Looks into an engine between two steps, in bounded time, and changes nothing. Engine thread only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvwatch.control import (
    MAX_PAGE,
    BlockInfo,
    BlockOwner,
    BlockPage,
    BlockQuery,
    PrefixInfo,
    PrefixOrder,
    PrefixTop,
    RequestInfo,
    RequestPage,
    RequestQuery,
)
from kvwatch.control.inspection import MAX_SCAN, BlockStateName, RequestStateName
from kvwatch.errors import ChangeRefused
from kvwatch.telemetry.events.block import GROUPS
from kvwatch_engine.contracts.block import NULL_BLOCK, BlockHash, BlockId
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.footprint import footprint
from kvwatch_engine.scheduling.request import Request, RequestState

_NS: Final = 1e-9
_STATES: Final[Mapping[RequestState, RequestStateName]] = {
    RequestState.WAITING: "waiting",
    RequestState.RUNNING: "running",
    RequestState.SWAPPED: "swapped",
}


def inspect_blocks(core: EngineCore, query: BlockQuery) -> BlockPage:
    """Return the blocks that a query asks for.

    Raises:
        ChangeRefused: the limit or the cursor is out of bounds.
    """
    _check_limit(query.limit)
    if query.cursor < 0:
        raise ChangeRefused(f"cursor {query.cursor} is no block; give that of the page before, or 0")
    now_ns = core.log.clock.monotonic_ns()
    candidates = _candidates(core.manager, query)
    found: list[BlockId] = []
    next_cursor: int | None = None
    for number, block in enumerate(candidates):
        if len(found) == query.limit or number == MAX_SCAN:
            next_cursor = block
            break
        if _matches(core.manager, block, query, now_ns):
            found.append(block)
    owners = _owners(core.manager, set(found))
    return BlockPage([_block_info(core.manager, block, owners[block], now_ns) for block in found], next_cursor)


def inspect_requests(core: EngineCore, query: RequestQuery) -> RequestPage:
    """Return the live requests that a query asks for.

    Raises:
        ChangeRefused: the limit is out of bounds.
    """
    _check_limit(query.limit)
    now_ns = core.log.clock.monotonic_ns()
    matching = [
        request
        for request in core.scheduler.lifecycle.requests()
        if request.arrival >= query.cursor
        and (query.state is None or request.state.value == query.state)
        and (query.request is None or request.request_id == query.request)
    ]
    matching.sort(key=lambda request: request.arrival)
    page, rest = matching[: query.limit], matching[query.limit :]
    return RequestPage(
        [_request_info(core.manager, request, now_ns) for request in page], rest[0].arrival if rest else None
    )


def inspect_prefixes(core: EngineCore, order: PrefixOrder, limit: int) -> PrefixTop:
    """Return the largest branches of the tree of known prefixes.

    Raises:
        ChangeRefused: the limit is out of bounds.
    """
    _check_limit(limit)
    pool, size = core.manager.pool, core.manager.block_size
    end = min(pool.num_blocks, MAX_SCAN)
    known = {content: BlockId(block) for block in range(end) if (content := pool.hashes[block]) is not None}
    branches: dict[BlockHash, _Branch] = {}
    places: dict[BlockHash, tuple[BlockHash, int]] = {}
    for content, block in known.items():
        root, depth = _place(core.manager, content, known, places)
        branch = branches.setdefault(root, _Branch(_group_of(core.manager, block)))
        branch.num_blocks += 1
        branch.num_hits += pool.history(block).num_hits
        branch.num_used += pool.ref_counts[block] > 0
        branch.depth = max(branch.depth, depth)
    keys = {"hits": lambda each: each[1].num_hits, "blocks": lambda each: each[1].num_blocks}
    top = sorted(branches.items(), key=keys.get(order, keys["blocks"]), reverse=True)[:limit]
    return PrefixTop([each.to_info(root, size) for root, each in top], len(branches), end == pool.num_blocks)


@dataclass(slots=True)
class _Branch:
    group: str
    num_blocks: int = 0
    num_hits: int = 0
    num_used: int = 0
    depth: int = 0

    def to_info(self, root: BlockHash, block_size: int) -> PrefixInfo:
        return PrefixInfo(
            hash=root.hex(),
            group=self.group,
            num_blocks=self.num_blocks,
            num_tokens=self.num_blocks * block_size,
            num_hits=self.num_hits,
            num_used_blocks=self.num_used,
            depth=self.depth,
        )


def _place(
    manager: BlockManager,
    content: BlockHash,
    known: dict[BlockHash, BlockId],
    places: dict[BlockHash, tuple[BlockHash, int]],
) -> tuple[BlockHash, int]:
    """Return the root of a block's branch and its depth from there, and note those of all blocks on the way."""
    path: list[BlockHash] = []
    at: BlockHash | None = content
    while at is not None and at in known and at not in places:
        path.append(at)
        at = manager.pool.parents[known[at]]
    root, depth = places[at] if at is not None and at in places else (path[-1], 0)
    for each in reversed(path):
        depth += 1
        places[each] = (root, depth)
    return places[content]


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_PAGE:
        raise ChangeRefused(f"a page of {limit} entries is not possible; ask for 1 to {MAX_PAGE}")


def _candidates(manager: BlockManager, query: BlockQuery) -> Iterator[BlockId]:
    """Give the blocks that a query may mean, in order, from its cursor on."""
    first = max(query.cursor, NULL_BLOCK + 1)
    if query.request is None:
        return (BlockId(block) for block in range(first, manager.pool.num_blocks))
    held = {
        block
        for group in manager.groups
        for owner in group.tables
        if owner.request == query.request
        for block in group.held(owner)
    }
    return iter(sorted(block for block in held if block >= first))


def _state_of(manager: BlockManager, block: BlockId) -> BlockStateName:
    pool = manager.pool
    if pool.ref_counts[block]:
        return "used"
    return "empty" if pool.hashes[block] is None else "cached"


def _group_of(manager: BlockManager, block: BlockId) -> str:
    """Return the name of the group of a block that is not empty."""
    groups = manager.pool.groups
    return GROUPS[groups[block] if groups else 0]


def _matches(manager: BlockManager, block: BlockId, query: BlockQuery, now_ns: int) -> bool:
    state = _state_of(manager, block)
    if query.state is not None and state != query.state:
        return False
    if query.hash_prefix is not None:
        content = manager.pool.hashes[block]
        if content is None or not content.hex().startswith(query.hash_prefix.lower()):
            return False
    if query.min_age_seconds is None:
        return True
    age_ns = now_ns - manager.pool.history(block).allocated_ns
    return state != "empty" and age_ns * _NS >= query.min_age_seconds


def _owners(manager: BlockManager, blocks: set[BlockId]) -> dict[BlockId, list[BlockOwner]]:
    """Return whose tables contain these blocks. O(entries of all tables)."""
    found: dict[BlockId, list[BlockOwner]] = {block: [] for block in blocks}
    if not any(manager.pool.ref_counts[block] for block in blocks):
        return found
    for group in manager.groups:
        for owner, table in group.tables.items():
            for index, block in enumerate(table):
                if block in found:
                    found[block].append(BlockOwner(owner.request, owner.sequence, index, GROUPS[group.number]))
    return found


def _block_info(manager: BlockManager, block: BlockId, owners: list[BlockOwner], now_ns: int) -> BlockInfo:
    pool, state = manager.pool, _state_of(manager, block)
    history, content = pool.history(block), pool.hashes[block]
    return BlockInfo(
        block_id=block,
        state=state,
        group=None if state == "empty" else _group_of(manager, block),
        ref_count=pool.ref_counts[block],
        owners=owners,
        hash=None if content is None else content.hex(),
        filled_slots=0 if state == "empty" else pool.filled_slots[block],
        age_seconds=None if state == "empty" else (now_ns - history.allocated_ns) * _NS,
        idle_seconds=(now_ns - history.released_ns) * _NS if state == "cached" else None,
        num_hits=0 if state == "empty" else history.num_hits,
    )


def _request_info(manager: BlockManager, request: Request, now_ns: int) -> RequestInfo:
    live, is_running = request.live_sequences(), request.state is RequestState.RUNNING
    tables = [group.held(each.owner) for each in request.sequences for group in manager.groups]
    held = footprint(tables, manager.pool.ref_counts)
    return RequestInfo(
        request=request.request_id,
        arrival=request.arrival,
        state=_STATES[request.state],
        priority=request.priority,
        tenant=request.origin.tenant,
        adapter=request.origin.adapter,
        wait_reason=request.wait_reason.value if request.wait_reason else "",
        waiting_seconds=None if is_running else (now_ns - request.wait_since_ns) * _NS,
        num_sequences=len(live),
        num_prompt_tokens=request.num_prompt_tokens,
        num_generated_tokens=sum(len(each.output_token_ids) for each in request.sequences),
        num_computed_tokens=sum(each.num_computed for each in live),
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=held.num_blocks,
        num_shared_blocks=held.num_shared_blocks,
        num_foreign_blocks=held.num_foreign_blocks,
        num_saved_blocks=held.num_saved_blocks,
        peak_blocks=request.peak_blocks,
        num_preemptions=request.num_preemptions,
        preempted_for=list(request.preempted_for),
        num_recomputed_tokens=request.num_recomputed_tokens,
        age_seconds=(now_ns - request.queued_ns) * _NS,
        queue_seconds=_between(request.queued_ns, request.admitted_ns),
        first_token_seconds=_between(request.queued_ns, request.first_token_ns),
    )


def _between(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else (end_ns - start_ns) * _NS
