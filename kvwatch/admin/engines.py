"""The engines that the API speaks of, and which of them a caller means. Knows no HTTP beyond the problems it raises.

An engine's own process has one, and callers need not name it. A sidecar may have several, which appear one by one.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvwatch.admin import problems
from kvwatch.admin.problems import Problem
from kvwatch.admin.reach import Reach, ReachObserver, ReachState, UnreachedEngine
from kvwatch.control import AdapterControl, EngineControl, LiveControl, PrefixControl
from kvwatch.ledger.view import View
from kvwatch.telemetry.log import EventLog
from kvwatch.wire.control import CallReply, CallRequest

T = TypeVar("T")

MAX_NAMES = 8
"""Engines that an error lists."""

_LATER = {"Retry-After": "1"}


def given(value: T | UnsetType) -> T | None:
    """Return the value of a parameter; none if it was not given."""
    return None if value is UNSET else value


class EngineQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine is meant; what is left open must leave no choice."""

    engine: Annotated[str, Meta(description="Name of the engine, where several are watched.", max_length=256)] = ""
    dp_rank: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | UnsetType,
        Meta(description="Rank of the engine, where it has several."),
    ] = UNSET


class DeclaredSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as the process was started with."""

    key: str
    value: str
    """As text; a secret is hidden."""
    source: str
    """`flag`, `environment VARIABLE`, `file PATH` or `default`."""
    brief: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminEngine:
    """One engine that the API speaks of."""

    labels: Mapping[str, str]
    """Its labels in all metrics."""
    log: EventLog
    view: Callable[[], View]
    """Gives its newest view. Any thread."""
    control: EngineControl
    live: LiveControl | None = None
    """Looks into it and changes it; none for an engine of another project."""
    forward: Callable[[CallRequest], CallReply] | None = None
    """Has another process answer that the engine lives in; raises `ControlError`. Any thread."""
    why_not: str = "it tells its KV events and nothing else; kvwatch's own engine can"
    """Why it can neither be looked into nor changed, if it cannot."""
    prefixes: PrefixControl | None = None
    """Pins and the reset of its prefix cache."""
    adapters: AdapterControl | None = None
    """Its LoRA adapters."""
    tokenize: Callable[[str], list[int]] | None = None
    """Turns text into tokens as its prompts are. Any thread."""
    dump_flight: Callable[[str], Future[Path]] | None = None
    """Has its flight recorder written out, for a reason in one word. Any thread."""
    diagnose: Callable[[], msgspec.Struct] | None = None
    """Says what is the matter with it. Any thread."""
    declared: Sequence[DeclaredSetting] = ()
    """All settings of its process, for one in this process."""
    is_up: Callable[[], bool] = lambda: True
    """Whether it is reached. Any thread."""
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names this run of the engine and of its log."""

    @property
    def name(self) -> str:
        """Stable name, the label `engine`."""
        return self.labels.get("engine", "")

    @property
    def dp_rank(self) -> int:
        """The label `dp_rank`."""
        return int(self.labels.get("dp_rank", "0"))

    def require_live(self) -> LiveControl:
        """Return what looks into the engine and changes it.

        Raises:
            Problem: it is an engine of another project.
        """
        if self.live is None:
            raise Problem(
                problems.UNSUPPORTED,
                f"engine {self.name} can neither be looked into nor changed from here: {self.why_not}",
            )
        return self.live


class AdminEngines:
    """Engines by name and rank. The observatory's loop only, except that the first may be added before it runs.

    Args:
        unreached: Names those that are to be watched and of which no rank is known yet. Any thread.
    """

    def __init__(self, unreached: Callable[[], Sequence[UnreachedEngine]] = tuple) -> None:
        self._engines: dict[tuple[str, int], AdminEngine] = {}
        self._reaches: dict[tuple[str, int], ReachObserver] = {}
        self._began = Reach(ReachState.NEVER, time.time_ns())
        self.unreached = unreached
        self.diagnoses: Callable[[], Sequence[msgspec.Struct]] = self._own_diagnoses
        """Says what is the matter with each, one after the other; whoever knows of more engines may put another one in
        its place. Any thread."""

    def add(self, engine: AdminEngine) -> None:
        """Offer one more engine."""
        self._engines[engine.name, engine.dp_rank] = engine
        self._reaches[engine.name, engine.dp_rank] = ReachObserver(engine.is_up)

    def all(self) -> Sequence[AdminEngine]:
        """Return all that are known, in the order in which they appeared."""
        return tuple(self._engines.values())

    def reach(self, engine: AdminEngine | UnreachedEngine) -> Reach:
        """Return whether an engine is reached, and since when."""
        if isinstance(engine, UnreachedEngine):
            return self._began
        return self._reaches[engine.name, engine.dp_rank].look()

    def look(self) -> None:
        """Note who is reached now. Called as often as the times of changes are to be exact."""
        for each in self._reaches.values():
            each.look()

    def _own_diagnoses(self) -> Sequence[msgspec.Struct]:
        return [each.diagnose() for each in self.all() if each.diagnose is not None]

    def find(self, query: EngineQuery) -> AdminEngine:
        """Return the engine that is meant.

        Raises:
            Problem: there is no such engine, or several.
        """
        found = [
            each
            for each in self._engines.values()
            if query.engine in {"", each.name} and query.dp_rank in {UNSET, each.dp_rank}
        ]
        waited_for = [each.name for each in self.unreached()]
        if len(found) == 1 and (query.engine or not waited_for):  # else who is meant would change when others come
            return found[0]
        if query.engine in waited_for:
            detail = f"engine {query.engine} was not reached yet; try again later"
            raise Problem(problems.UNAVAILABLE, detail, _LATER)
        if not self._engines and not (query.engine and waited_for):
            raise Problem(problems.UNAVAILABLE, "no engine was reached yet; try again later", _LATER)
        known = [f"{each.name} (dp_rank {each.dp_rank})" for each in self._engines.values()]
        known += [f"{name} (not reached yet)" for name in waited_for]
        listed = ", ".join(known[:MAX_NAMES]) + (", ..." if len(known) > MAX_NAMES else "")
        if found:
            raise Problem(problems.SEVERAL_ENGINES, f"name one of them with engine and dp_rank: {listed}")
        raise Problem(problems.NOT_FOUND, f"no such engine is watched here; watched: {listed}")
