"""Loading and unloading LoRA adapters, at start and while requests run.

    load     read and check (on a thread) ─▶ the engine admits it ─▶ its name is served
    unload   its name is served no more ─▶ the engine retires it ─▶ its requests end ─▶ its weights are freed

Whoever asked for an adapter before it was unloaded gets an answer from it; whoever asks after that gets 404. An adapter
takes its place among the limit's until its weights are freed.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvwatch_engine.contracts.adapter import DEFAULT_MAX_ADAPTERS, Adapter, AdapterMemory, check_adapter_name
from kvwatch_engine.contracts.errors import AdapterError
from kvwatch_engine.contracts.request import EngineClient
from kvwatch_engine.server.access import caller_of
from kvwatch_engine.server.bodies import decode_body, read_body
from kvwatch_engine.server.errors import (
    AdapterExists,
    AdapterLoadingIsOff,
    AdapterRefused,
    AdminKeyNeeded,
    ApiError,
    UnknownModel,
    shorten,
)
from kvwatch_engine.server.models import ServedModels, json_response
from kvwatch_engine.server.protocol.adapters import AdapterUnloaded, LoadAdapterRequest, UnloadAdapterRequest
from kvwatch_engine.server.settings import ServerSettings

_MAX_PATH_CHARS = 4096

_log = structlog.get_logger("kvwatch.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """What may be loaded."""

    memory: AdapterMemory
    """Where weights are kept."""
    max_adapters: int = DEFAULT_MAX_ADAPTERS
    """Most adapters in memory."""
    at_start: tuple[tuple[str, Path], ...] = ()
    """Name and folder of adapters that are loaded before the server serves."""
    folder: Path | None = None
    """Adapters may be loaded from beneath it while the server runs; none allows that not at all."""


class Adapters:
    """The adapters of a server. Event loop only, once it runs; one is loaded at a time."""

    def __init__(self, engine: EngineClient, models: ServedModels, options: AdapterOptions) -> None:
        self._engine = engine
        self._models = models
        self._options = options
        self._num_held = 0
        """Adapters whose weights are in memory."""
        self._loading = asyncio.Lock()

    def load_at_start(self) -> None:
        """Load the adapters that are served from the start on; blocks.

        Raises:
            AdapterError: one cannot be loaded, its name is taken, or there are too many.
        """
        for name, folder in self._options.at_start:
            try:
                self._check(name, replace=False)
            except ApiError as error:
                raise AdapterError(str(error)) from error
            self._enter(self._options.memory.load(name, folder))

    def served(self) -> list[Adapter]:
        """Return the adapters that requests may name, in the order of their names."""
        return self._models.adapters()

    async def load(self, name: str, path: str, *, replace: bool) -> Adapter:
        """Load an adapter and serve it; return it.

        Args:
            name: name under which it is served.
            path: folder, absolute or from the allowed one on.
            replace: whether it may take the place of an adapter of the same name.

        Raises:
            AdapterLoadingIsOff: so.
            AdapterRefused: name, path or files are bad.
            AdapterExists: the name is taken, or there are too many.
        """
        root = self._options.folder
        if root is None:
            raise AdapterLoadingIsOff
        # Not given up half-way, whatever becomes of the request: what is loaded is either served or freed.
        return await asyncio.shield(asyncio.ensure_future(self._load(name, root, path, replace=replace)))

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Its requests that were accepted go on; its weights are freed after them.

        Raises:
            AdapterLoadingIsOff: so.
            UnknownModel: there is no such adapter.
        """
        if self._options.folder is None:
            raise AdapterLoadingIsOff
        adapter = self._models.remove(name)
        if adapter is None:
            raise UnknownModel(name, self._models.base.name, param="lora_name")
        self._retire(adapter)

    async def _load(self, name: str, root: Path, path: str, *, replace: bool) -> Adapter:
        async with self._loading:
            self._check(name, replace=replace)
            try:
                adapter = await asyncio.to_thread(_load_from, self._options.memory, name, root, path)
            except AdapterError as error:
                raise AdapterRefused(str(error), param="lora_path", code="lora_refused") from error
            self._enter(adapter)
            return adapter

    def _check(self, name: str, *, replace: bool) -> None:
        """Refuse what has no place, before anything is read.

        Raises:
            AdapterRefused: the name is none.
            AdapterExists: the name is taken, or there are too many.
        """
        try:
            check_adapter_name(name)
        except AdapterError as error:
            raise AdapterRefused(str(error), param="lora_name", code="lora_refused") from error
        if self._models.is_base(name) or (self._models.is_taken(name) and not replace):
            raise AdapterExists(
                f"something is served as {shorten(name)!r} already; unload it first, or choose another name",
                param="lora_name",
                code="lora_exists",
            )
        limit = self._options.max_adapters
        if self._num_held >= limit:
            leaving = self._num_held - self._models.num_adapters
            still = f", {leaving} of them until their last requests end" if leaving else ""
            raise AdapterExists(
                f"{self._num_held} adapters are in memory{still}, and the limit is {limit}; unload one, or raise "
                "--max-loras",
                code="lora_limit",
            )

    def _enter(self, adapter: Adapter) -> None:
        self._num_held += 1
        self._engine.adapters.admit(adapter)
        before = self._models.add(adapter)
        _log.info("adapter loaded", adapter=adapter.name, rank=adapter.rank, bytes=adapter.num_bytes)
        if before is not None:
            self._retire(before)

    def _retire(self, adapter: Adapter) -> None:
        loop = asyncio.get_running_loop()

        def free() -> None:
            self._options.memory.discard(adapter.load_id)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._freed, adapter)

        self._engine.adapters.retire(adapter.load_id, free)
        _log.info("adapter unloaded", adapter=adapter.name)

    def _freed(self, adapter: Adapter) -> None:
        self._num_held -= 1
        _log.info("adapter freed", adapter=adapter.name, bytes=adapter.num_bytes)


def _load_from(memory: AdapterMemory, name: str, root: Path, path: str) -> Adapter:
    return memory.load(name, folder_beneath(root, path))


def folder_beneath(root: Path, path: str) -> Path:
    """Return the folder that a path names, links resolved.

    Raises:
        AdapterError: it is not beneath `root`, no folder, or one of its files leads out of `root`.
    """
    if not path or len(path) > _MAX_PATH_CHARS or "\0" in path:
        raise AdapterError("lora_path is no path; name a folder beneath the server's --lora-dir")
    try:
        base = root.resolve(strict=True)
        folder = (base / path).resolve(strict=True)
        is_within = folder != base and folder.is_relative_to(base) and folder.is_dir()
        if is_within and all(file.resolve().is_relative_to(base) for file in folder.iterdir()):
            return folder
    except (OSError, ValueError, RuntimeError):  # it is not there, cannot be read, or its links go round in a circle
        pass
    # What lies elsewhere, or whether anything does, is nobody's business.
    raise AdapterError("lora_path is no folder beneath the server's --lora-dir")


def adapter_routes(adapters: Adapters, models: ServedModels, settings: ServerSettings) -> list[Route]:
    """Return the routes that load and unload adapters; where keys are asked for, for callers with an admin's only."""

    async def load(request: Request) -> Response:
        _check_admin(request)
        body = decode_body(await read_body(request, settings), LoadAdapterRequest)
        await adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
        return json_response(models.card(body.lora_name))

    async def unload(request: Request) -> Response:
        _check_admin(request)
        body = decode_body(await read_body(request, settings), UnloadAdapterRequest)
        adapters.unload(body.lora_name)
        return json_response(AdapterUnloaded(id=body.lora_name))

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _check_admin(request: Request) -> None:
    """Refuse callers who may not change what is served.

    Raises:
        AdminKeyNeeded: so.
    """
    caller = caller_of(request.scope)
    if caller is not None and not caller.is_admin:
        raise AdminKeyNeeded
