"""LoRA adapters as everything but the model knows them: names, identities, and which tokens of a step use them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NewType, Protocol

from kvwatch_engine.contracts.errors import AdapterError

LoadId = NewType("LoadId", str)
"""Names one loading of an adapter, for all time: the same folder, loaded again, has another one."""

MAX_NAME_CHARS: Final = 128
DEFAULT_MAX_ADAPTERS: Final = 8
DEFAULT_MAX_RANK: Final = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that is in memory."""

    name: str
    """Name under which it is served."""
    load_id: LoadId
    """Part of every block hash of its requests: K/V computed with it is shared with nothing else."""
    rank: int
    """The highest rank of its modules."""
    num_bytes: int
    """Memory that its weights take."""
    fingerprint: str
    """Changes whenever a byte of its files does; the same files, loaded again, have the same."""


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Consecutive packed tokens of a step that are computed with one adapter."""

    load_id: LoadId
    start: int
    end: int


class AdapterMemory(Protocol):
    """Where the model keeps the weights of adapters. Any thread."""

    def load(self, name: str, folder: Path) -> Adapter:
        """Read an adapter's files; steps may use it from the return on.

        Raises:
            AdapterError: something is wrong with it; nothing was changed.
        """
        ...

    def discard(self, load_id: LoadId) -> None:
        """Free an adapter's weights; no step may use it any more. Unknown ids are ignored."""
        ...


class AdapterAdmission(Protocol):
    """Which adapters requests may use. Any thread."""

    def admit(self, adapter: Adapter) -> None:
        """Let requests use an adapter, whose weights are in memory."""
        ...

    def retire(self, load_id: LoadId, on_unused: Callable[[], None]) -> None:
        """Refuse new requests with an adapter; those that were accepted go on. Does not wait for them.

        Args:
            load_id: the adapter.
            on_unused: called once, on the engine thread, when the last request with it has ended; returns quickly.
        """
        ...


def check_adapter_name(name: str) -> None:
    """Refuse a name that could not stand in a path, a label or a log line as it is.

    Raises:
        AdapterError: so.
    """
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise AdapterError(
            f"{name[:MAX_NAME_CHARS]!r} is no name for an adapter; use 1 to {MAX_NAME_CHARS} letters, digits and "
            "_ . : / @ + -, the first one a letter, digit or _"
        )
