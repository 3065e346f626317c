"""The application: its routes, its middleware, and what they share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvwatch.telemetry.events.request import Operation
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.request import EngineClient
from kvwatch_engine.guidance import GuideCompiler
from kvwatch_engine.server.access import ApiKeyGuard
from kvwatch_engine.server.adapters import AdapterOptions, Adapters, adapter_routes
from kvwatch_engine.server.api_keys import ApiKeys
from kvwatch_engine.server.chat import ChatPlanner
from kvwatch_engine.server.completions import CompletionPlanner
from kvwatch_engine.server.dispatcher import OutputDispatcher
from kvwatch_engine.server.drain import Drain
from kvwatch_engine.server.embeddings import embedding_routes
from kvwatch_engine.server.endpoint import GenerationEndpoint
from kvwatch_engine.server.errors import ApiError, on_api_error, on_http_exception, on_invalid, on_overload
from kvwatch_engine.server.generation import Generations
from kvwatch_engine.server.health import health_routes
from kvwatch_engine.server.image_prompts import ImagePrompts
from kvwatch_engine.server.models import ServedModels, model_routes
from kvwatch_engine.server.openapi import document_route
from kvwatch_engine.server.prompts import PromptEncoder
from kvwatch_engine.server.request_log import RequestLog, noting
from kvwatch_engine.server.responses.planner import ResponsePlanner
from kvwatch_engine.server.responses.routes import response_routes
from kvwatch_engine.server.responses.store import ResponseStore
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.tokenization import Tokenization, tokenization_routes
from kvwatch_engine.server.tokenizer import Tokenizer
from kvwatch_engine.server.tools.prompting import ToolPrompting

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_RESPONSES = "/v1/responses"


def create_app(  # noqa: PLR0913 - by keyword
    engine: EngineClient,
    dispatcher: OutputDispatcher,
    model: ModelInfo,
    settings: ServerSettings,
    metrics_app: ASGIApp | None = None,
    api_keys: ApiKeys | None = None,
    lora: AdapterOptions | None = None,
) -> Starlette:
    """Return the OpenAI-compatible application. Loads the model's tokenizer, which takes a second or so.

    `app.state.drain` is the `Drain` with which the composition root stops it.

    Args:
        engine: runs the requests.
        dispatcher: the listener that was given to the engine.
        model: what is served.
        settings: limits and time-outs.
        metrics_app: answers `/metrics`.
        api_keys: who may use it; none for everybody.
        lora: LoRA adapters; none if the model has no place for any.

    Raises:
        ModelError: the model's tokenizer or image processor cannot be loaded.
        AdapterError: an adapter cannot be loaded.
    """
    tokenizer = Tokenizer.of_model(model)
    images = ImagePrompts.of_model(model, tokenizer, settings)
    prompts = PromptEncoder(
        tokenizer,
        settings,
        lambda: engine.max_model_len,
        images,
        ToolPrompting.of_template(tokenizer.chat_template, settings.tool_parser),
    )
    chat_settings = settings if images is None else settings.with_room_for_images()
    guides = GuideCompiler(tokenizer.to_json(), model.vocab_size, model.eos_token_ids, settings.guidance)
    drain = Drain(max(1, round(settings.drain_seconds)))
    generations = Generations(engine, dispatcher, model, tokenizer, settings)
    models = ServedModels(engine, model)
    chat = ChatPlanner(engine, models, tokenizer, prompts, guides, settings)
    completions = CompletionPlanner(engine, models, tokenizer, prompts, guides, settings)
    store = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
    responses = ResponsePlanner(engine, models, tokenizer, prompts, guides, settings, store)
    routes: list[BaseRoute] = [
        _post(_CHAT, GenerationEndpoint(chat, generations, drain, chat_settings)),
        _post(_COMPLETIONS, GenerationEndpoint(completions, generations, drain, settings)),
        _post(_RESPONSES, GenerationEndpoint(responses, generations, drain, chat_settings)),
        *response_routes(store),
        *embedding_routes(),
        *model_routes(models),
        *tokenization_routes(
            Tokenization(models, tokenizer, prompts, lambda: engine.max_model_len, settings.guidance), chat_settings
        ),
        *health_routes(engine, drain),
    ]
    adapters: Adapters | None = None
    if lora is not None:
        adapters = Adapters(engine, models, lora)
        adapters.load_at_start()
        routes += adapter_routes(adapters, models, settings)
    if metrics_app is not None:
        routes.append(Route("/metrics", _Application(metrics_app), methods=["GET"]))
    routes.append(document_route(routes, needs_key=api_keys is not None))

    middleware = [Middleware(RequestLog)]
    if api_keys is not None:
        operations: dict[str, Operation] = {
            _CHAT: chat.operation,
            _COMPLETIONS: completions.operation,
            _RESPONSES: responses.operation,
        }
        middleware.append(Middleware(ApiKeyGuard, keys=api_keys, engine=engine, operations=operations))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        prompts.close()
        await guides.close()

    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: noting(on_api_error),
            RequestInvalid: noting(on_invalid),
            EngineOverloaded: noting(on_overload),
            HTTPException: on_http_exception,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect is not in OpenAI's shape
    app.state.drain = drain
    app.state.adapters = adapters
    return app


def _post(path: str, endpoint: GenerationEndpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


class _Application:
    """An ASGI application as a route takes it: a plain function would be taken for one from request to response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        await self._app(scope, receive, send)
