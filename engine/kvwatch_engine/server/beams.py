"""From a request's fields to the engine's `BeamParams`: what a search may be asked for, and what not beside it."""

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.protocol.request import GenerationFields
from kvwatch_engine.server.settings import ServerSettings

MAX_LENGTH_PENALTY = 10.0

_ONLY_BEAMS: dict[str, tuple[object, ...]] = {"beam_width": (), "length_penalty": (1,), "early_stopping": (False,)}
"""Fields that mean nothing without a search, and values of them that ask for nothing."""

_ONLY_DRAWS: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "stop": ("", []),
}
"""Fields that mean nothing in a search, and values of them that change nothing."""


def beam_params(request: GenerationFields, n: int, settings: ServerSettings) -> BeamParams | None:
    """Return how to search, None for a request that draws.

    Args:
        request: the decoded body.
        n: choices that it asks for.
        settings: the server's limits.

    Raises:
        RequestInvalid: a value is out of range, or does not go together with the others.
    """
    if not request.use_beam_search:
        _refuse_others(request, _ONLY_BEAMS, "needs use_beam_search to be true; add that, or remove {}")
        return None
    _refuse_others(request, _ONLY_DRAWS, "has no meaning in a beam search; remove it, or use_beam_search")
    width = n if request.beam_width is None else request.beam_width
    if not n <= width <= settings.max_n:
        raise RequestInvalid(
            f"beam_width is {shorten(str(width), 20)}, it must be at least n ({n}) and at most {settings.max_n}",
            param="beam_width",
        )
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    if not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:  # NaN is within nothing
        limit = f"{-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise RequestInvalid(f"length_penalty is {penalty:.6g}, it must be {limit}", param="length_penalty")
    return BeamParams(width=width, length_penalty=penalty, early_stopping=request.early_stopping or False)


def _refuse_others(request: GenerationFields, fields: dict[str, tuple[object, ...]], why: str) -> None:
    for name, harmless in fields.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise RequestInvalid(f"{name} {why.format(name)}", param=name)
