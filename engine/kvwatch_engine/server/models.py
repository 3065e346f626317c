"""What is served, and under which names: the model and its LoRA adapters. `/v1/models` lists it."""

import time
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvwatch_engine.contracts.adapter import Adapter
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.request import EngineClient
from kvwatch_engine.server.errors import UnknownModel
from kvwatch_engine.server.protocol.reply import Model, ModelList


class _Served(NamedTuple):
    adapter: Adapter
    created: int


class ServedModels:
    """Names of the base model, of which it may have several, and of adapters. Event loop only, once it runs."""

    def __init__(self, engine: EngineClient, model: ModelInfo) -> None:
        self._engine = engine
        self.base = model
        self._created = int(time.time())
        self._adapters: dict[str, _Served] = {}

    @property
    def num_adapters(self) -> int:
        """Adapters that requests may name."""
        return len(self._adapters)

    def adapters(self) -> list[Adapter]:
        """Return the adapters that requests may name, in the order of their names."""
        return [self._adapters[name].adapter for name in sorted(self._adapters)]

    def find(self, name: str) -> Adapter | None:
        """Return the adapter that is served under a name, None for the base model.

        Raises:
            UnknownModel: nothing is.
        """
        if self.is_base(name):
            return None
        served = self._adapters.get(name)
        if served is None:
            raise UnknownModel(name, self.base.name)
        return served.adapter

    def is_base(self, name: str) -> bool:
        """Whether the base model is served under a name."""
        return name in self.base.names

    def is_taken(self, name: str) -> bool:
        """Whether something is served under a name."""
        return self.is_base(name) or name in self._adapters

    def add(self, adapter: Adapter) -> Adapter | None:
        """Serve an adapter under its name from now on; return the one that it takes the place of."""
        assert not self.is_base(adapter.name), "an adapter cannot hide its base model"
        before = self._adapters.get(adapter.name)
        self._adapters[adapter.name] = _Served(adapter, int(time.time()))
        return None if before is None else before.adapter

    def remove(self, name: str) -> Adapter | None:
        """Serve an adapter no more; return it, None if there is none of this name."""
        served = self._adapters.pop(name, None)
        return None if served is None else served.adapter

    def card(self, name: str) -> Model:
        """Return what is told of a name.

        Raises:
            UnknownModel: nothing is served under it.
        """
        is_base = self.find(name) is None
        return Model(
            id=name,
            created=self._created if is_base else self._adapters[name].created,
            max_model_len=self._engine.max_model_len,
            parent=None if is_base else self.base.name,
            input_modalities=["text"] if self.base.images is None else ["text", "image"],
        )

    def cards(self) -> list[Model]:
        """Return what is told of everything that is served, the base model first."""
        return [self.card(name) for name in (*self.base.names, *self._adapters)]


def model_routes(models: ServedModels) -> list[Route]:
    """Return the routes that list models."""

    async def list_models(_request: Request) -> Response:
        return json_response(ModelList(data=models.cards()))

    async def show_model(request: Request) -> Response:
        return json_response(models.card(request.path_params["name"]))

    # Names of models may hold slashes.
    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model)]


def json_response(body: msgspec.Struct) -> Response:
    """Return a body as JSON."""
    return Response(msgspec.json.encode(body), media_type="application/json")
