"""What is asked of an engine about its prefix cache: pins and the reset. Values only.

A pinned prefix stays: its blocks are cached or used, and never evicted, until it is unpinned. Pins are held in the
device's pool only, and end with the engine.
"""

import msgspec


class PrefixScope(msgspec.Struct, frozen=True, kw_only=True):
    """Whose prefix it is: requests that differ in any of these share no block."""

    cache_salt: str = ""
    """`cache_salt` of the requests; empty for those without."""
    tenant: str = ""
    """Tenant of their API key; empty for requests of no tenant."""


class PinnedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that is pinned, or has just been unpinned."""

    pin: str
    """Names this pin."""
    num_tokens: int
    """Tokens that stay: those of the full blocks."""
    num_blocks: int
    actor: str
    """Who pinned it."""
    reason: str
    """Why, in the words of whoever asked."""
    pinned_unix_ns: int
    """Unix time at which it was pinned."""


class PrefixReset(msgspec.Struct, frozen=True, kw_only=True):
    """What a reset of the prefix cache did."""

    num_cleared: dict[str, int]
    """Cached blocks that lost their content and are empty, by tier."""
    num_unpinned: int
    """Pins that ended."""
    num_in_use: int
    """Blocks that live requests held at the reset and still hold. Nobody can find them any more; each becomes empty
    when it is released."""
    is_complete: bool
    """Whether none is left of what the cache held: nothing is in use, and nothing is on its way between tiers."""
