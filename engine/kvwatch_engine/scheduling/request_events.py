"""Events in the life of a request, filled in from what the engine knows of it."""

from kvwatch.telemetry.events import RequestAdmitted, RequestFinished, RequestQueued
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.memory.block_hash import salt_digest
from kvwatch_engine.scheduling.request import Request

_SEVERITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.LENGTH, FinishReason.STOP)


def queued_event(request: Request, *, tells_content: bool) -> RequestQueued:
    """Return the event of a request that has arrived; what its images are is told like token ids, when asked for."""
    origin, sampling = request.origin, request.sampling
    images = request.images if tells_content else ()
    return RequestQueued(
        request.request_id,
        request.num_prompt_tokens,
        sampling.n,
        request.queued_ns,
        origin.operation,
        origin.is_stream,
        origin.trace_parent,
        origin.trace_state,
        origin.tenant,
        origin.adapter,
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
        request.priority,
        salt_digest(request.cache_salt, request.tenant_salt),
        0 if sampling.beams is None else sampling.beams.width,
        [image.position for image in images],
        [image.num_tokens for image in images],
        [image.image.content_hash for image in images],
    )


def admitted_event(request: Request, block_size: int | None) -> RequestAdmitted:
    """Return the event of a request that has just started; `block_size` is None if its prompt was not looked up."""
    assert request.admitted_ns is not None, "it has started"
    hits, num_tokens = request.hits, request.num_prompt_tokens
    can_hit = 0 if block_size is None else (num_tokens - 1) // block_size * block_size
    return RequestAdmitted(
        request.request_id,
        num_tokens,
        0 if block_size is None else num_tokens,
        hits.device,
        0 if block_size is None else num_tokens - can_hit,
        request.admitted_ns - request.queued_ns,
        regretted_tokens=hits.regretted,
        host_hit_tokens=hits.of("host"),
        disk_hit_tokens=hits.of("disk"),
    )


def finished_event(request: Request) -> RequestFinished:
    """Return the event of a request that has ended."""
    reasons = [sequence.finish_reason for sequence in request.sequences if sequence.finish_reason is not None]
    admitted, first, last = request.admitted_ns, request.first_token_ns, request.last_token_ns
    return RequestFinished(
        request.request_id,
        next(reason for reason in _SEVERITY if reason in reasons).value,
        request.num_prompt_tokens,
        sum(len(sequence.output_token_ids) for sequence in request.sequences),
        request.num_cached_tokens,
        request.num_preemptions,
        request.peak_blocks if admitted is not None else None,
        None if admitted is None else admitted - request.queued_ns,
        None if first is None or admitted is None else first - admitted,
        None if first is None or last is None else last - first,
        None if last is None else last - request.queued_ns,
        request.num_recomputed_tokens,
        request.error,
        request.origin.tenant,
        request.origin.adapter,
        [reason.value for reason in reasons[: request.sampling.n]] if request.sampling.n > 1 else [],
        request.num_draft_tokens,
        request.num_accepted_draft_tokens,
    )
