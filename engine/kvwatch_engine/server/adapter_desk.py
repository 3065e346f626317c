"""Loads and unloads adapters for callers on other threads, such as the admin API: `AdapterControl`."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kvwatch.control import AdapterInfo
from kvwatch.errors import ChangeRefused, ControlError
from kvwatch_engine.server.adapters import Adapters
from kvwatch_engine.server.errors import ApiError

_TIMEOUT_SECONDS: Final = 60.0

T = TypeVar("T")


class AdapterDesk:
    """Implements `AdapterControl`. Any thread but the server's, and only while the server serves."""

    def __init__(self) -> None:
        self._adapters: Adapters | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, adapters: Adapters | None) -> None:
        """Begin to answer; on the server's loop, as soon as it serves. None for a model without a place for any."""
        self._adapters = adapters
        self._loop = asyncio.get_running_loop()

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters that requests may name."""

        async def read(adapters: Adapters) -> list[AdapterInfo]:
            return [AdapterInfo(name=each.name, rank=each.rank, num_bytes=each.num_bytes) for each in adapters.served()]

        return self._ask(read)

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter and serve it."""

        async def load(adapters: Adapters) -> AdapterInfo:
            each = await adapters.load(name, path, replace=replace)
            return AdapterInfo(name=each.name, rank=each.rank, num_bytes=each.num_bytes)

        return self._ask(load)

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more."""

        async def unload(adapters: Adapters) -> None:
            adapters.unload(name)

        self._ask(unload)

    def _ask(self, question: Callable[[Adapters], Coroutine[Any, Any, T]]) -> T:
        loop, adapters = self._loop, self._adapters
        if loop is None or loop.is_closed():
            raise ControlError("the server does not serve; ask again when it does")
        if adapters is None:
            raise ChangeRefused("this model has no place for LoRA adapters")
        try:
            return asyncio.run_coroutine_threadsafe(question(adapters), loop).result(_TIMEOUT_SECONDS)
        except ApiError as error:
            raise ChangeRefused(str(error)) from error
        except TimeoutError as error:
            raise ControlError(f"the server did not answer within {_TIMEOUT_SECONDS:g} s") from error
