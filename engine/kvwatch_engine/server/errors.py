"""Every error of the API in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

    ApiError                  an error that belongs to HTTP, with its status
    ├── BodyTooLarge          413
    ├── BodyTimeout           408
    ├── UnsupportedMediaType  415
    ├── UnknownModel          404
    ├── ResponseNotFound      404
    ├── AdapterRefused        400
    ├── AdapterExists         409
    ├── AdapterLoadingIsOff   403
    ├── AdminKeyNeeded        403
    └── GenerationFailed      500, 503 when the server ended it, or 504 when its time was over
        └── GuideGaveUp       400
    ClientGone                nobody is left to answer

The engine's `RequestInvalid` becomes 400, or 404 when its model is gone; its `EngineOverloaded` 429 (queue full) or 503
(draining).
"""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvwatch.errors import KVWatchError
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.server.protocol.reply import Error, ErrorBody

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
MODEL_NOT_FOUND = "model_not_found"


class ClientGone(KVWatchError):
    """The client hung up, or does not read what it is sent; there is nobody to answer."""


class ApiError(KVWatchError):
    """An error with an HTTP status of its own."""

    status = 500
    type = INVALID_REQUEST

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BodyTooLarge(ApiError):
    """The body is longer than the limit."""

    status = 413


class BodyTimeout(ApiError):
    """The body did not arrive in time."""

    status = 408


class UnsupportedMediaType(ApiError):
    """The body is declared as something else than JSON."""

    status = 415


class UnknownModel(ApiError):
    """No model of this name is served."""

    status = 404

    def __init__(self, name: str, served: str, *, param: str = "model") -> None:
        super().__init__(
            f"the model {shorten(name)!r} is not served here; use {served!r} (see /v1/models)",
            param=param,
            code=MODEL_NOT_FOUND,
        )


class ResponseNotFound(ApiError):
    """No response of this id is kept that the caller may read."""

    status = 404

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"the response {shorten(response_id)!r} is not kept (any more): the oldest are dropped, those with "
            "store false never kept, and only the key that made one can read it",
            param="response_id",
        )


class AdapterRefused(ApiError):
    """A LoRA adapter cannot be loaded; nothing was changed."""

    status = 400


class AdapterExists(ApiError):
    """The name is in use, or there is no room for another adapter now."""

    status = 409


class AdapterLoadingIsOff(ApiError):
    """Adapters cannot be loaded while this server runs."""

    status = 403

    def __init__(self) -> None:
        super().__init__(
            "this server loads no adapters while it runs; start it with --lora-dir, or name them with --lora",
            code="lora_loading_off",
        )


class AdminKeyNeeded(ApiError):
    """The caller's key may use what is served, and not change it."""

    status = 403

    def __init__(self) -> None:
        super().__init__(
            "this API key may not load or unload adapters; use one that has admin = true in --api-key-file",
            code="admin_key_needed",
        )


class GenerationFailed(ApiError):
    """The engine could not finish the request."""

    type = SERVER_ERROR

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message, code=code)
        self.status = status


class GuideGaveUp(GenerationFailed):
    """The request's grammar took too much work on the way."""

    type = INVALID_REQUEST

    def __init__(self, message: str) -> None:
        super().__init__(message, status=400, code="invalid_grammar")


def shorten(text: str, limit: int = 64) -> str:
    """Return `text`, cut for use in a message: what a client sent is quoted, but never at length."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def error_response(
    status: int,
    message: str,
    kind: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return an error in OpenAI's shape."""
    body = msgspec.json.encode(ErrorBody(Error(message, kind, param, code)))
    return Response(body, status, headers, "application/json")


def on_api_error(_request: Request, error: Exception) -> Response:
    """Answer an `ApiError`."""
    assert isinstance(error, ApiError)
    # A body that was not read to its end cannot be followed by another request.
    headers = {"connection": "close"} if isinstance(error, BodyTooLarge | BodyTimeout) else None
    return error_response(error.status, str(error), error.type, param=error.param, code=error.code, headers=headers)


def on_invalid(_request: Request, error: Exception) -> Response:
    """Answer a request that can never run."""
    assert isinstance(error, RequestInvalid)
    status = 404 if error.code == MODEL_NOT_FOUND else 400
    return error_response(status, str(error), INVALID_REQUEST, param=error.param, code=error.code)


def on_overload(_request: Request, error: Exception) -> Response:
    """Answer a request that could run later."""
    assert isinstance(error, EngineOverloaded)
    status, kind = (429, "rate_limit_error") if error.reason == "queue_full" else (503, "service_unavailable")
    headers = {"retry-after": str(error.retry_after_seconds)}
    return error_response(status, str(error), kind, code=error.reason, headers=headers)


def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer the router's own errors: an unknown path (404) or a wrong method (405)."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"unknown path {shorten(request.url.path)!r}; docs/api.md lists the paths that exist"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed here; use {allowed}"
    else:
        message = error.detail
    return error_response(error.status_code, message, INVALID_REQUEST, headers=dict(error.headers or {}))


def internal_error() -> Response:
    """Return the answer to a defect of the server; the reason is in the log only."""
    return error_response(
        500, "the server failed to handle this request; its log says why under the x-request-id", SERVER_ERROR
    )
