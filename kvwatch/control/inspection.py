"""What can be looked up in a running engine: blocks, requests, known prefixes. Values only.

Every answer is of one moment between two steps and costs bounded work: long lists come in pages. A page's `next_cursor`
asks for the rest, which is then that of a later moment.
"""

from typing import Final, Literal

import msgspec

MAX_PAGE: Final = 1000
"""Most entries of one page."""
MAX_SCAN: Final = 16_384
"""Most blocks looked at for one page: a page may therefore hold fewer entries than asked for, or none, and go on."""

BlockStateName = Literal["used", "cached", "empty"]
RequestStateName = Literal["waiting", "running", "swapped"]
PrefixOrder = Literal["blocks", "hits", "tokens"]


class BlockQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which blocks of the device pool are wanted; every condition that is given must hold."""

    state: BlockStateName | None = None
    request: str | None = None
    """Blocks in a block table of this request."""
    hash_prefix: str | None = None
    """Blocks whose hash begins with these hexadecimal digits."""
    min_age_seconds: float | None = None
    """Blocks allocated at least so long ago."""
    cursor: int = 0
    """Block to go on with; 0 at first."""
    limit: int = 100
    """Most entries; at most `MAX_PAGE`."""


class BlockOwner(msgspec.Struct, frozen=True):
    """A sequence whose block table contains a block."""

    request: str
    sequence: int
    index: int
    """Place in the block table."""
    group: str = "0"


class BlockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One block."""

    block_id: int
    state: BlockStateName
    group: str | None
    """KV group that it belongs to; none while it is empty."""
    ref_count: int
    owners: list[BlockOwner]
    hash: str | None
    """Hexadecimal hash of its content; none when the prefix index does not know it."""
    filled_slots: int
    age_seconds: float | None
    """Time since it was allocated; none while it is empty."""
    idle_seconds: float | None
    """Time since its last owner released it; none while it is used or empty."""
    num_hits: int
    """Times that its content was found in the prefix index since it was allocated."""


class BlockPage(msgspec.Struct, frozen=True):
    """Blocks in the order of their ids."""

    blocks: list[BlockInfo]
    next_cursor: int | None
    """None after the last block."""


class RequestQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which live requests are wanted."""

    state: RequestStateName | None = None
    request: str | None = None
    cursor: int = 0
    """Arrival number to go on with; 0 at first."""
    limit: int = 100
    """Most entries; at most `MAX_PAGE`."""


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One live request. Times are durations in seconds up to the moment of the answer."""

    request: str
    arrival: int
    """Its number in the order of arrival."""
    state: RequestStateName
    priority: int
    tenant: str
    adapter: str
    wait_reason: str
    """Why it waits: `blocks`, `sequences`, `tokens`, `paused` or `transfer`; empty while it runs or is new."""
    waiting_seconds: float | None
    """Time since it waits for this reason; none while it runs."""
    num_sequences: int
    """Sequences that have not ended."""
    num_prompt_tokens: int
    num_generated_tokens: int
    """Over all its sequences."""
    num_computed_tokens: int
    """Tokens of its live sequences whose K/V is in the pool; shared ones count for each."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache when it was admitted."""
    num_blocks: int
    """Distinct blocks that it holds."""
    num_shared_blocks: int
    """Those of them that another block table contains too, its own or another request's."""
    num_foreign_blocks: int
    """Those of them that another request holds too: they would stay used if this one ended."""
    num_saved_blocks: int
    """Blocks that its sequences save by sharing among themselves: table entries less distinct blocks."""
    peak_blocks: int
    num_preemptions: int
    preempted_for: list[str]
    """Requests in whose favour it was preempted, the last ones, newest last."""
    num_recomputed_tokens: int
    age_seconds: float
    """Time since it was queued."""
    queue_seconds: float | None
    """Time from queue to first admission; none before."""
    first_token_seconds: float | None
    """Time from queue to first token; none before."""


class RequestPage(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival."""

    requests: list[RequestInfo]
    next_cursor: int | None
    """None after the last request."""


class PrefixInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One branch of the tree of known prefixes, named by the hash of its first block."""

    hash: str
    group: str
    """KV group: a model with several keeps each prefix once in each, as far as a window does not leave it out."""
    num_blocks: int
    """Blocks below and including the first."""
    num_tokens: int
    num_hits: int
    """Hits of all these blocks since they were allocated."""
    num_used_blocks: int
    """Those of them that running requests hold now."""
    depth: int
    """Blocks on the longest path."""


class PrefixTop(msgspec.Struct, frozen=True):
    """The largest branches."""

    prefixes: list[PrefixInfo]
    num_prefixes: int
    """Branches that there are."""
    is_complete: bool
    """Whether all known blocks were looked at; of a large pool only the first `MAX_SCAN` are."""
