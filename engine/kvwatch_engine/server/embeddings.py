"""`/v1/embeddings`: refused by name.

The engine's steps bring tokens and their log-probabilities back, never hidden states, and a prompt whose beginning is
in the prefix cache has no hidden states of that beginning at all. So there is nothing to pool.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvwatch_engine.contracts.errors import RequestInvalid


def embedding_routes() -> list[Route]:
    """Return the route that says so."""

    async def refuse(_request: Request) -> Response:
        raise RequestInvalid(
            "this server generates text and computes no embeddings; send this to a server of an embedding model",
            code="unsupported",
        )

    return [Route("/v1/embeddings", refuse, methods=["POST"])]
