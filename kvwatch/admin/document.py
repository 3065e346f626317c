"""`GET /openapi.json`: the description of everything else."""

from starlette.responses import Response

from kvwatch.admin.operation import Call, NoQuery, Operation


async def get_document(call: Call[NoQuery, None]) -> Response:
    """Show the OpenAPI document."""
    response = Response(call.site.document, media_type="application/json")
    if call.is_head:
        response.body = b""  # its length was told
    return response


OPERATIONS = (
    Operation(
        method="GET", path="/openapi.json", name="getDocument", brief="The OpenAPI document of this API.", tag="read",
        answer=None, handler=get_document, is_described=False,
    ),
)  # fmt: skip
