"""What is asked of a server about its LoRA adapters. Any thread."""

from typing import Protocol

import msgspec


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that requests may name."""

    name: str
    rank: int
    num_bytes: int
    """Memory that its weights take."""


class AdapterControl(Protocol):
    """The adapters of a server that has a place for them."""

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters that requests may name, in the order of their names.

        Raises:
            ControlError: the server does not serve yet, or any more.
        """
        ...

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter from beneath the folder that the server was given for that, and serve it.

        Raises:
            ChangeRefused: loading is off, or name, path or files are bad; nothing was changed.
            ControlError: the server does not serve yet, or any more.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more; its requests that were accepted go on, and its weights are freed after them.

        Raises:
            ChangeRefused: loading is off, or there is no such adapter.
            ControlError: the server does not serve yet, or any more.
        """
        ...
