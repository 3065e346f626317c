"""The end of an engine: nobody waits for ever for a request that will not go on. Engine thread only."""

from collections.abc import Iterable
from typing import Final

from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, SequenceOutput
from kvwatch_engine.core import EngineCore

ENGINE_FAILED: Final = "EngineFailed"
"""Class of the error that ends all requests when the engine itself is defective."""


def end_requests(core: EngineCore, arriving: Iterable[GenerationRequest], *, has_failed: bool) -> list[SequenceOutput]:
    """End every request and return what their callers are told.

    Args:
        core: the engine, whose live requests end.
        arriving: requests that were accepted and will not be taken in any more.
        has_failed: whether the engine ends by a defect of its own.
    """
    reason, error, error_type = FinishReason.ABORT, "", ""
    if has_failed:
        reason, error, error_type = FinishReason.ERROR, "the engine has failed", ENGINE_FAILED
    outputs = [
        SequenceOutput(request_id=request.request_id, sequence=index, finish_reason=reason, error=error)
        for request in arriving
        for index in range(request.sampling.n)
    ]
    for request_id in core.live_request_ids():
        outputs += core.abort(request_id, reason, error, error_type)
    return outputs
