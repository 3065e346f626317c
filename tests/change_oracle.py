"""What people change in a running engine: the part of the metrics' oracle for settings and for the pool. No events."""

from collections.abc import Callable
from typing import Any

from pool_oracle import Book, PoolWatch, around

from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.telemetry import metrics as m
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.changer import Changer
from kvwatch_engine.live.values import live_values
from kvwatch_engine.resize import PreparedResize


class ChangeWatch:
    """Watches one engine core, and who changes its settings. Attach it before anything happens."""

    def __init__(self, core: EngineCore, book: Book, pool: PoolWatch) -> None:
        self.core = core
        self.book = book
        self.pool = pool
        around(core, "prepare_resize", self._prepare_resize)
        around(core, "report_refused_resize", self._refuse_resize)
        around(core, "resize", self._resize)

    def watch(self, changer: Changer) -> None:
        """Note what somebody changes."""
        around(changer, "_carry_out", self._change)
        if changer._rebuilder is not None:
            around(changer._rebuilder, "carry_out", self._rebuild)

    def _prepare_resize(self, call: Callable[..., Any], num_blocks: int) -> Any:
        try:
            return call(num_blocks)
        except ChangeRefused:
            self.book.add(m.POOL_REBUILDS, 1, "refused")
            raise

    def _refuse_resize(self, call: Callable[..., Any], num_blocks: int, *why: str) -> None:
        self.book.add(m.POOL_REBUILDS, 1, "refused")
        call(num_blocks, *why)

    def _resize(self, call: Callable[..., Any], prepared: PreparedResize) -> None:
        self._change_pool("resized", call, prepared)
        self.pool.move(prepared.plan.moves)
        self.pool.restart()

    def _rebuild(self, call: Callable[..., Any], *plan: Any) -> Any:
        again = self._change_pool("rebuilt", call, *plan)
        self.pool.restart()
        return again

    def _change_pool(self, outcome: str, call: Callable[..., Any], *plan: Any) -> Any:
        started_ns = self.core.log.clock.monotonic_ns()
        try:
            result = call(*plan)
        except ChangeFailed:
            outcome = "failed"
            raise
        except ChangeRefused:
            outcome = ""  # transfers did not end: nothing was begun
            raise
        finally:
            if outcome:
                self.book.add(m.POOL_REBUILDS, 1, outcome)
                self.book.observe(m.POOL_REBUILD_SECONDS, self.core.log.clock.monotonic_ns() - started_ns)
        return result

    def _change(self, call: Callable[..., Any], *plan: Any) -> Any:
        before = live_values(self.core.settings)
        outcome = call(*plan)
        for key, setting in live_values(self.core.settings).items():
            if setting != before[key]:
                self.book.add(m.CONFIG_CHANGES, 1, key)
        return outcome
