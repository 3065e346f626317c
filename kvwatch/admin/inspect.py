"""`GET blocks`, `requests`, `prefixes`: what the engine answers between two steps. Pages are asked for by cursor."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from kvwatch.admin import problems
from kvwatch.admin.engines import EngineQuery, given
from kvwatch.admin.operation import PREFIX, Answer, Call, Operation
from kvwatch.admin.problems import Problem
from kvwatch.control import (
    MAX_PAGE,
    BlockPage,
    BlockQuery,
    PrefixOrder,
    PrefixTop,
    RequestInfo,
    RequestPage,
    RequestQuery,
)
from kvwatch.control.inspection import BlockStateName, RequestStateName

MAX_CURSOR = 2**53 - 1

Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE, description="Most entries of the page.")]
Cursor = Annotated[int, Meta(ge=0, le=MAX_CURSOR, description="`next_cursor` of the page before; 0 for the first.")]
RequestId = Annotated[str, Meta(min_length=1, max_length=512)]


class BlocksQuery(EngineQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which blocks are wanted; every condition must hold."""

    state: Annotated[BlockStateName | UnsetType, Meta(description="Blocks in this state.")] = UNSET
    request: Annotated[RequestId | UnsetType, Meta(description="Blocks that this request holds.")] = UNSET
    hash: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")] | UnsetType,
        Meta(description="Blocks whose hash begins with these hexadecimal digits."),
    ] = UNSET
    min_age_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | UnsetType, Meta(description="Blocks allocated at least so long ago.")
    ] = UNSET
    cursor: Cursor = 0
    limit: Limit = 100


class RequestsQuery(EngineQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which live requests are wanted."""

    state: Annotated[RequestStateName | UnsetType, Meta(description="Requests in this state.")] = UNSET
    cursor: Cursor = 0
    limit: Limit = 100


class PrefixesQuery(EngineQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prefixes are wanted."""

    by: Annotated[PrefixOrder, Meta(description="What is largest first.")] = "blocks"
    limit: Limit = 20


async def get_blocks(call: Call[BlocksQuery, None]) -> Answer:
    """Show a page of blocks."""
    query = call.query
    live = call.site.engines.find(query).require_live()
    wanted = BlockQuery(
        state=given(query.state),
        request=given(query.request),
        hash_prefix=given(query.hash),
        min_age_seconds=given(query.min_age_seconds),
        cursor=query.cursor,
        limit=query.limit,
    )
    return Answer(await call.site.looks.look(live.inspect_blocks, wanted))


async def get_requests(call: Call[RequestsQuery, None]) -> Answer:
    """Show a page of requests."""
    query = call.query
    live = call.site.engines.find(query).require_live()
    wanted = RequestQuery(state=given(query.state), cursor=query.cursor, limit=query.limit)
    return Answer(await call.site.looks.look(live.inspect_requests, wanted))


async def get_request(call: Call[EngineQuery, None]) -> Answer:
    """Show one request."""
    live = call.site.engines.find(call.query).require_live()
    request = call.path["request"]
    page = await call.site.looks.look(live.inspect_requests, RequestQuery(request=request, limit=1))
    if not page.requests:
        raise Problem(
            problems.NOT_FOUND, f"request {request!r} is not live; GET {PREFIX}/requests lists those that are"
        )
    return Answer(page.requests[0])


async def get_prefixes(call: Call[PrefixesQuery, None]) -> Answer:
    """Show the largest branches of the prefix tree."""
    live = call.site.engines.find(call.query).require_live()
    return Answer(await call.site.looks.look(live.inspect_prefixes, call.query.by, call.query.limit))


OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/blocks", name="listBlocks", tag="read",
        brief="Blocks of the device pool with owners, reference counts, age, idle time and hits.",
        query=BlocksQuery, answer=BlockPage, handler=get_blocks,
    ),
    Operation(
        method="GET", path=f"{PREFIX}/requests", name="listRequests", tag="read",
        brief="Live requests: state, why they wait and since when, blocks, preemptions and in whose favour, timings.",
        query=RequestsQuery, answer=RequestPage, handler=get_requests,
        links={
            name: {"operationId": name, "parameters": {"request": "$response.body#/requests/0/request"}}
            for name in ("getRequest", "abortRequest")
        },
    ),
    Operation(
        method="GET", path=f"{PREFIX}/requests/{{request}}", name="getRequest", tag="read",
        brief="One live request.", query=EngineQuery, answer=RequestInfo, handler=get_request,
    ),
    Operation(
        method="GET", path=f"{PREFIX}/prefixes", name="listPrefixes", tag="read",
        brief="The largest branches of the tree of known prefixes.",
        query=PrefixesQuery, answer=PrefixTop, handler=get_prefixes,
    ),
)  # fmt: skip
