"""Reading and forgetting kept responses: `/v1/responses/{id}` and the items that it answers."""

from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.access import caller_of
from kvwatch_engine.server.errors import ResponseNotFound, shorten
from kvwatch_engine.server.models import json_response
from kvwatch_engine.server.protocol.responses import ItemList, ResponseDeleted
from kvwatch_engine.server.responses.store import KeptResponse, ResponseStore, owner_of

_DEFAULT_ITEMS = 20
_MAX_ITEMS = 100


def response_routes(store: ResponseStore) -> list[Route]:
    """Return the routes."""

    async def show_or_forget(request: Request) -> Response:
        found = _find(store, request)
        if request.method == "DELETE":
            store.remove(found.id, found.owner)
            return json_response(ResponseDeleted(id=found.id))
        if request.query_params.get("stream", "false") != "false":
            raise RequestInvalid(
                "stream is not supported for responses that have ended; remove it", param="stream", code="unsupported"
            )
        return Response(found.body, media_type="application/json")

    async def list_items(request: Request) -> Response:
        return json_response(_page(request, _find(store, request)))

    async def cancel(request: Request) -> Response:
        found = _find(store, request)
        raise RequestInvalid(
            f"the response {shorten(found.id)!r} has ended; only background responses can be cancelled, and this "
            "server has none: hang up to end one"
        )

    path = "/v1/responses/{response_id}"
    return [
        # One route: the refusal of another method names all that there are.
        Route(path, show_or_forget, methods=["GET", "DELETE"]),
        Route(f"{path}/input_items", list_items, methods=["GET"]),
        Route(f"{path}/cancel", cancel, methods=["POST"]),
    ]


def _find(store: ResponseStore, request: Request) -> KeptResponse:
    response_id = request.path_params["response_id"]
    found = store.find(response_id, owner_of(caller_of(request.scope)))
    if found is None:
        raise ResponseNotFound(response_id)
    return found


def _page(request: Request, response: KeptResponse) -> ItemList:
    """Return one page of the items that a response answers.

    Raises:
        RequestInvalid: a parameter of the query is out of its range, or names an item that is none of them.
    """
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestInvalid(f"order is {shorten(order)!r}; it may be asc or desc", param="order")
    limit = _limit(query.get("limit"))
    items = response.inputs()
    if order == "asc":
        items.reverse()
    ids = [item.id for item in items]
    begin = 0
    if after is not None:
        if after not in ids:
            raise RequestInvalid(f"after is {shorten(after)!r}, which is none of the items", param="after")
        begin = ids.index(after) + 1
    end = min(begin + limit, len(items))
    page = ids[begin:end]
    return ItemList(
        data=[Raw(item.body) for item in items[begin:end]],
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
        has_more=end < len(items),
    )


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_ITEMS
    if not (given.isascii() and given.isdigit() and len(given) <= 4 and 1 <= int(given) <= _MAX_ITEMS):
        raise RequestInvalid(f"limit is {shorten(given)!r}, it must be 1 to {_MAX_ITEMS}", param="limit")
    return int(given)
