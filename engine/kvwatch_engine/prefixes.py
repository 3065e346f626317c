"""Pins and the reset of an engine's prefix cache, between two steps. Engine thread only.

    pin     all of it is here? ──▶ room enough for all others? ──▶ pinned, and requests are measured by what is left
    reset   pins ended ──▶ every tier forgets ──▶ live requests go on, and store what nobody else can find

What would not fit is refused before anything changes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from kvwatch.control import PinnedPrefix, PrefixScope
from kvwatch.errors import ChangeRefused
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.tenant import tenant_salt
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_hash import HashChain, TokenSlice
from kvwatch_engine.memory.pins import Pin
from kvwatch_engine.resize import AcceptedRequest, check_worst_cases
from kvwatch_engine.scheduling.request import RequestState

logger = structlog.get_logger(__name__)

PreparedPin = tuple[EngineSettings, Callable[[], PinnedPrefix]]
"""Settings that are wanted, and what carries it out; valid until a request or a block changes."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What a reset did at once."""

    num_cleared: dict[str, int]
    """Cached blocks that became empty, by tier."""
    num_unpinned: int
    time_ns: int
    """Monotonic time of the reset: what was allocated until then holds content from before."""


class PrefixDesk:
    """Pins and resets; see the module."""

    def __init__(self, core: EngineCore, salt_of: Callable[[str], str] = tenant_salt) -> None:
        """Serve one engine; `salt_of` gives the salt of a tenant's blocks."""
        self._core = core
        self._salt_of = salt_of

    # ------------------------------------------------------------------ pins

    def pins(self) -> list[PinnedPrefix]:
        """Return all pins, the oldest first."""
        return [_told(pin) for pin in self._core.pins.all()]

    def prepare_pin(
        self,
        token_ids: Sequence[int],
        scope: PrefixScope,
        accepted: Iterable[AcceptedRequest],
        *,
        actor: str,
        reason: str,
    ) -> PreparedPin:
        """Find out whether the full blocks of a prefix can be pinned. Changes nothing.

        Args:
            token_ids: the prefix.
            scope: of whose requests.
            accepted: all requests that were accepted and have not ended: each must be able to end beside the pins.
            actor: who asks.
            reason: why.

        Raises:
            ChangeRefused: it cannot be.
        """
        core = self._core
        root = core.root_of(scope.cache_salt, self._salt_of(scope.tenant))
        chain = HashChain(root, core.settings.block_size)
        return self._prepare(chain, len(token_ids), lambda start, end: token_ids[start:end], accepted, actor, reason)

    def prepare_pin_of(
        self,
        request_id: str,
        num_tokens: int | None,
        accepted: Iterable[AcceptedRequest],
        *,
        actor: str,
        reason: str,
    ) -> PreparedPin:
        """Find out whether the prompt of a live request, or its beginning, can be pinned; as `prepare_pin`."""
        request = self._core.scheduler.lifecycle.find(request_id)
        if request is None:
            raise ChangeRefused(f"no request {request_id!r} is live; pin its prompt by its tokens")
        longest = request.num_prompt_tokens
        length = longest if num_tokens is None else num_tokens
        if not 1 <= length <= longest:
            raise ChangeRefused(
                f"the prompt of {request_id} has {longest} tokens, not {length}; ask for 1 to {longest}"
            )
        leader = request.sequences[0]
        return self._prepare(leader.chain.fork(0), length, leader.tokens, accepted, actor, reason)

    def prepare_unpin(self, name: str, *, actor: str, reason: str) -> PreparedPin:
        """Find a pin that is to end.

        Raises:
            ChangeRefused: there is none of this name.
        """
        pin = self._core.pins.find(name)
        if pin is None:
            raise ChangeRefused(f"there is no pin {name[:64]!r}; ask for the pins that there are")

        def carry_out() -> PinnedPrefix:
            self._core.pins.remove(pin, "asked", actor, reason)
            self._adopt()
            logger.info("prefix unpinned", pin=name, actor=actor, reason=reason)
            return _told(pin)

        return self._core.settings, carry_out  # who fits now fits afterwards

    # ------------------------------------------------------------------ reset

    def reset(self, *, unpin: bool, actor: str, reason: str) -> CacheReset:
        """Forget all content of the prefix cache in all tiers.

        Requests that hold blocks go on; from now on they share with nobody, since what they hold is from before.

        Raises:
            ChangeRefused: prefixes are pinned, and `unpin` is not set.
        """
        core = self._core
        if len(core.pins) and not unpin:
            raise ChangeRefused(
                f"{len(core.pins)} prefixes are pinned and would be lost; unpin them, or set `unpin` to end all"
            )
        num_unpinned = core.end_pins("reset", actor, reason)
        time_ns = core.log.clock.monotonic_ns()
        num_cleared = {"device": core.manager.pool.clear_cache("reset", actor, reason)}
        if core.tiers is not None:
            num_cleared |= core.tiers.clear()
        held = {owner.request for owner in core.manager.owners()}
        for request in core.scheduler.lifecycle.requests():
            if request.request_id in held or request.state is RequestState.SWAPPED:
                request.isolate()
        logger.info("prefix cache reset", actor=actor, reason=reason, num_unpinned=num_unpinned, **num_cleared)
        return CacheReset(num_cleared, num_unpinned, time_ns)

    def num_in_use(self, reset: CacheReset) -> int:
        """Return how many blocks of the device that were used at a reset still are. O(blocks)."""
        return self._core.manager.pool.num_held_since(reset.time_ns)

    # ------------------------------------------------------------------ parts

    def _prepare(
        self,
        chain: HashChain,
        num_tokens: int,
        tokens: TokenSlice,
        accepted: Iterable[AcceptedRequest],
        actor: str,
        reason: str,
    ) -> PreparedPin:
        core, size = self._core, self._core.settings.block_size
        num_blocks = num_tokens // size
        if num_blocks == 0:
            raise ChangeRefused(f"a prefix of {num_tokens} tokens fills no block of {size}; pin at least {size} tokens")
        hashes = self._held(chain.upto(num_blocks, tokens)[:num_blocks])
        wanted = replace(core.settings, num_pinned_blocks=core.pins.num_pinned_with(hashes))
        check_limits_of_pins(wanted)
        check_worst_cases(wanted, accepted)

        def carry_out() -> PinnedPrefix:
            pin = core.pins.add(hashes, num_blocks * size, actor, reason)
            self._adopt()
            logger.info("prefix pinned", pin=pin.name, blocks=len(hashes), actor=actor, reason=reason)
            return _told(pin)

        return wanted, carry_out

    def _held(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return what the blocks of a prefix hold, of all KV groups."""
        manager = self._core.manager
        if not manager.enable_prefix_cache:
            raise ChangeRefused("the prefix cache is off, so that nothing can be pinned; switch it on first")
        prefix = manager.find_prefix(hashes)
        if len(prefix) < len(hashes):
            raise ChangeRefused(
                f"{len(prefix)} of the {len(hashes)} full blocks of this prefix are cached; send a request that begins "
                "with it and pin it then, or pin less"
            )
        held = (manager.pool.hashes[block] for block in prefix.held())
        return [content for content in held if content is not None]

    def _adopt(self) -> None:
        core = self._core
        core.adopt(replace(core.settings, num_pinned_blocks=len(core.manager.pool.pinned)))


def check_limits_of_pins(wanted: EngineSettings) -> None:
    """Refuse pins that leave too little of the pool.

    Raises:
        ChangeRefused: so.
    """
    if wanted.num_pinned_blocks > wanted.max_pinned_blocks:
        raise ChangeRefused(
            f"{wanted.num_pinned_blocks} blocks would be pinned, but at most {wanted.max_pinned_blocks} of "
            f"{wanted.num_blocks - 1} may be; unpin others, pin less, or raise --max-pinned-ratio"
        )
    if wanted.watermark_blocks >= wanted.num_usable_blocks:
        raise ChangeRefused(
            f"{wanted.num_pinned_blocks} blocks would be pinned, and of the {wanted.num_usable_blocks} others the "
            f"watermark keeps {wanted.watermark_blocks} free; pin less, or lower the watermark"
        )


def _told(pin: Pin) -> PinnedPrefix:
    return PinnedPrefix(
        pin=pin.name,
        num_tokens=pin.num_tokens,
        num_blocks=len(pin.hashes),
        actor=pin.actor,
        reason=pin.reason,
        pinned_unix_ns=pin.pinned_unix_ns,
    )
