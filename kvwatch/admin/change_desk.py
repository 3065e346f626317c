"""Changes settings of engines, one change of an engine at a time, and lets them revert when their time is over.

    If-Match ──▶ audit: begun ──▶ apply ──▶ audit: done ──▶ expiry ──▶ apply the declared values

What is live and not declared always has an expiry; what was declared has none. Knows no request and no route.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from kvwatch.admin import problems
from kvwatch.admin.audit import AuditEntry, AuditTrail, utc
from kvwatch.admin.declared_file import DeclaredFile, PreparedFile
from kvwatch.admin.engines import AdminEngine, AdminEngines
from kvwatch.admin.problems import Problem
from kvwatch.admin.threads import off_loop
from kvwatch.control import ChangeOutcome, LiveControl, SettingValue
from kvwatch.errors import ChangeConflict, ChangeFailed, ChangeRefused, ConfigError, ControlError
from kvwatch.ledger.pace import next_tick
from kvwatch.telemetry.clock import Clock

ACTION = "config"
OWN_NAME = "kvwatch"
RETRY_SECONDS = 30.0
"""Pause after a value could not be reverted."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """A live value that ends."""

    value: SettingValue
    until_ns: int
    """Monotonic time."""
    expires_at: str
    audit: int
    """The change that brought it."""
    is_asked: bool = True
    """Whether somebody asked for it; else it came with another value, and ends as that does."""
    retry_ns: int = 0
    """Monotonic time before which it is left alone, since it could not be reverted."""

    def is_due(self, now_ns: int) -> bool:
        """Whether it is to be reverted now."""
        return self.until_ns <= now_ns and self.retry_ns <= now_ns


@dataclass(slots=True)
class _Desk:
    """What is kept for one engine."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    leases: dict[str, Lease] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedChange:
    """What somebody wants."""

    entry: AuditEntry
    """Who, why."""
    changes: Mapping[str, SettingValue]
    expires_in: float
    """Seconds."""
    is_persistent: bool = False
    expected_version: int | None = None


class ChangeDesk:
    """One for all engines of a listener. Its loop only.

    Args:
        engines: The engines.
        trail: Where changes are recorded.
        clock: Tells the time.
        file: Where values are declared for good; none where that is not allowed.
    """

    def __init__(
        self, engines: AdminEngines, trail: AuditTrail, clock: Clock, file: DeclaredFile | None = None
    ) -> None:
        self._engines = engines
        self._trail = trail
        self._clock = clock
        self._file = file
        self._has_leased = asyncio.Event()
        self._desks: defaultdict[tuple[str, int], _Desk] = defaultdict(_Desk)

    @asynccontextmanager
    async def turn(self, engine: AdminEngine) -> AsyncIterator[None]:
        """Hold up all other changes of an engine."""
        async with self._desks[engine.name, engine.dp_rank].lock:
            yield

    def expiries(self, engine: AdminEngine) -> dict[str, str]:
        """Return when live values revert, by key."""
        return {key: lease.expires_at for key, lease in self._desks[engine.name, engine.dp_rank].leases.items()}

    async def apply(self, engine: AdminEngine, wanted: WantedChange) -> tuple[AuditEntry, ChangeOutcome]:
        """Carry out a change. Inside a `turn`.

        Raises:
            Problem: it cannot be recorded, or must not be persisted.
            ControlError: the engine refused it, or it did not work.
        """
        live = engine.require_live()
        prepared = await self._prepare(engine, wanted) if wanted.is_persistent else None
        try:
            entry = await off_loop(self._trail.begin, wanted.entry)
            try:
                outcome = await self._apply(live, entry, wanted)
            except ControlError as error:
                self._refused(entry, error)
                raise
            except asyncio.CancelledError:
                # The engine may yet do it: an hour from now nobody must be left with a value that never ends.
                self._lease(engine, wanted.changes, wanted.expires_in, entry.id)
                raise
            ended = await self._end(engine, live, entry, wanted, outcome, prepared)
        finally:
            if prepared is not None:
                prepared.drop()
        return ended, outcome

    async def run(self, stop: asyncio.Event) -> None:
        """Revert what has expired until `stop` is set, then say what ends with this run."""
        while not stop.is_set():
            for engine in self._engines.all():
                try:
                    await self._revert_expired(engine)
                except Exception:
                    logger.exception("expired values could not be reverted", engine=engine.name)
            has_leases = any(desk.leases for desk in self._desks.values())
            await (next_tick() if has_leases else self._wait_for_a_lease(stop))
        for (name, dp_rank), desk in self._desks.items():
            if desk.leases:
                changes = {key: lease.value for key, lease in desk.leases.items()}
                self._trail.tell(
                    "live values end with this run, the declared ones will be in force",
                    engine=name, dp_rank=dp_rank, live=changes,
                )  # fmt: skip

    # ------------------------------------------------------------ inside

    async def _wait_for_a_lease(self, stop: asyncio.Event) -> None:
        """Wait until there may be something that expires, or `stop` is set."""
        self._has_leased.clear()
        waiting = {asyncio.ensure_future(each.wait()) for each in (stop, self._has_leased)}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()

    async def _prepare(self, engine: AdminEngine, wanted: WantedChange) -> PreparedFile:
        if self._file is None or not engine.declared:
            detail = (
                "this server may not change its configuration file: start it with --config FILE and --admin-persist, "
                "or take the lines of config/diff and declare them where the file comes from"
            )
            raise Problem(problems.CONFLICT, detail)
        sources = {each.key: each.source for each in engine.declared}
        for key in wanted.changes:
            source = sources.get(key, "default")
            if source == "flag" or source.startswith("environment"):
                raise Problem(problems.CONFLICT, f"{key} is set by {source}, which wins over the file; change it there")
        try:
            return await off_loop(self._file.prepare, wanted.changes)
        except ConfigError as error:
            raise Problem(problems.CONFLICT, str(error)) from error

    async def _apply(self, live: LiveControl, entry: AuditEntry, wanted: WantedChange) -> ChangeOutcome:
        def apply() -> ChangeOutcome:
            return live.apply(
                wanted.changes, actor=entry.actor, reason=entry.reason, expected_version=wanted.expected_version
            )

        return await off_loop(apply)

    def _refused(self, entry: AuditEntry, error: ControlError) -> None:
        outcome = "failed" if isinstance(error, ChangeFailed) else "refused"
        self._trail.end(msgspec.structs.replace(entry, outcome=outcome, message=str(error)))
        if isinstance(error, ChangeConflict):
            raise Problem(problems.STALE, str(error)) from error
        if isinstance(error, ChangeFailed):
            raise Problem(problems.FAILED, str(error)) from error

    async def _end(
        self,
        engine: AdminEngine,
        live: LiveControl,
        entry: AuditEntry,
        wanted: WantedChange,
        outcome: ChangeOutcome,
        prepared: PreparedFile | None,
    ) -> AuditEntry:
        message = ""
        is_declared = False
        changed = {str(each.key): each.new for each in outcome.changes}
        if prepared is not None:
            try:
                await off_loop(prepared.commit)
                keys = [*wanted.changes, *(key for key in changed if _is_nobodys(engine, key))]
                await off_loop(lambda: live.declare(keys, actor=entry.actor, reason=entry.reason))
                is_declared, message = True, "written to the configuration file"
            except (OSError, ControlError) as error:
                message = f"it is live, but could not be declared: {error}"
        expires_at = await self._renew_leases(engine, live, wanted, changed, entry.id, is_declared=is_declared)
        return self._trail.end(
            msgspec.structs.replace(
                entry, outcome="done", changes=list(outcome.changes), expires_at=expires_at, message=message
            )
        )

    async def _renew_leases(
        self,
        engine: AdminEngine,
        live: LiveControl,
        wanted: WantedChange,
        changed: Mapping[str, SettingValue],
        audit: int,
        *,
        is_declared: bool,
    ) -> str | None:
        """Let what is live and not declared have an end; return when what was asked for ends."""
        leases = self._desks[engine.name, engine.dp_rank].leases
        for key in wanted.changes:
            leases.pop(key, None)
        try:
            state = await off_loop(live.settings)
            drifted = {str(each.key) for each in state.settings if each.has_drifted}
        except ControlError:  # it has done it, and is busy: rather an end too many than none
            drifted = {*changed, *(() if is_declared else wanted.changes)}
        # Another block size brings another number of blocks: that ends with it, or when whoever asked for one said.
        for key in changed.keys() - wanted.changes.keys():
            lease = leases.pop(key, None)
            if lease is not None and lease.is_asked:
                leases[key] = replace(lease, value=changed[key])
            elif key in drifted:
                self._lease(engine, {key: changed[key]}, wanted.expires_in, audit, is_asked=False)
        kept = {key: value for key, value in wanted.changes.items() if key in drifted}
        return self._lease(engine, kept, wanted.expires_in, audit) if kept else None

    def _lease(
        self,
        engine: AdminEngine,
        values: Mapping[str, SettingValue],
        seconds: float,
        audit: int,
        *,
        is_asked: bool = True,
    ) -> str:
        until_ns = self._clock.monotonic_ns() + int(seconds * 1e9)
        expires_at = utc(self._clock.wall_ns() + int(seconds * 1e9))
        leases = self._desks[engine.name, engine.dp_rank].leases
        self._has_leased.set()
        leases |= {key: Lease(value, until_ns, expires_at, audit, is_asked) for key, value in values.items()}
        return expires_at

    async def _revert_expired(self, engine: AdminEngine) -> None:
        desk, now = self._desks[engine.name, engine.dp_rank], self._clock.monotonic_ns()
        if not any(lease.is_due(now) for lease in desk.leases.values()):
            return
        async with desk.lock:
            expired = {key: lease for key, lease in desk.leases.items() if lease.is_due(now)}
            if not expired:
                return
            try:
                await self._revert(engine, expired)
            except (ControlError, Problem) as error:
                retry_ns = now + int(RETRY_SECONDS * 1e9)
                # What the others do not need was reverted; it has no lease any more.
                kept = {key: lease for key, lease in desk.leases.items() if expired.get(key) == lease}
                desk.leases |= {key: replace(lease, retry_ns=retry_ns) for key, lease in kept.items()}
                logger.warning(
                    "values that have expired cannot be reverted yet", keys=list(kept), error=str(error),
                    again_seconds=RETRY_SECONDS,
                )  # fmt: skip

    async def _revert(self, engine: AdminEngine, expired: Mapping[str, Lease]) -> None:
        """Let declared values be in force again: all of them, or else those that do not need what is not possible.

        Raises:
            Problem: some could not be reverted.
            ControlError: likewise.
        """
        live = engine.require_live()
        state = await off_loop(live.settings)
        declared = {str(each.key): each.declared for each in state.settings if each.key in expired}
        try:
            await self._revert_to(engine, declared, expired)
        except (ChangeRefused, Problem) as error:
            is_failed = isinstance(error, Problem) and error.kind is problems.FAILED
            if not (is_failed or isinstance(error, ChangeRefused)):
                raise
            possible = await off_loop(lambda: _possible(live, declared, is_pool_kept=is_failed))
            if possible:
                await self._revert_to(engine, possible, {key: expired[key] for key in possible})
            raise

    async def _revert_to(
        self, engine: AdminEngine, declared: Mapping[str, SettingValue], expired: Mapping[str, Lease]
    ) -> None:
        numbers = sorted({lease.audit for lease in expired.values()})
        reason = f"the time of change {', '.join(map(str, numbers))} is over"
        entry = AuditEntry(
            id=0, time="", actor=OWN_NAME, address="", engine=engine.name, dp_rank=engine.dp_rank, action=ACTION,
            reason=reason, subject=" ".join(declared), reverts=numbers[0] if len(numbers) == 1 else None,
        )  # fmt: skip
        # What comes to differ from its declared value by that is over as well.
        await self.apply(engine, WantedChange(entry=entry, changes=declared, expires_in=0.0))


def _possible(live: LiveControl, wanted: Mapping[str, SettingValue], *, is_pool_kept: bool) -> dict[str, SettingValue]:
    """Return those of the values that can be in force now, together. Blocks.

    Args:
        live: the engine.
        wanted: the values.
        is_pool_kept: whether the pool must stay as it is, since it could not be changed.
    """
    chosen: dict[str, SettingValue] = {}
    left = dict(wanted)
    while True:  # one may be possible only after another
        before = len(chosen)
        for key in list(left):
            preview = live.preview({**chosen, key: left[key]})
            if preview.is_possible and not (is_pool_kept and preview.memory_bytes is not None):
                chosen[key] = left.pop(key)
        if len(chosen) == before or not left:
            return chosen


def _is_nobodys(engine: AdminEngine, key: str) -> bool:
    """Whether nobody has declared a value for a setting."""
    return any(each.key == key and each.source == "default" for each in engine.declared)
