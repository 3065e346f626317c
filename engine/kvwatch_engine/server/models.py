"""`/v1/models`: the model that is served."""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.request import EngineClient
from kvwatch_engine.server.errors import UnknownModel
from kvwatch_engine.server.protocol.reply import Model, ModelList


def model_routes(engine: EngineClient, model: ModelInfo) -> list[Route]:
    """Return the routes that list models."""
    created = int(time.time())

    def card() -> Model:
        return Model(id=model.name, created=created, max_model_len=engine.max_model_len)

    async def list_models(_request: Request) -> Response:
        return _json(ModelList(data=[card()]))

    async def show_model(request: Request) -> Response:
        name: str = request.path_params["name"]
        if name != model.name:
            raise UnknownModel(name, model.name)
        return _json(card())

    # Names of models may hold slashes.
    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model)]


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
