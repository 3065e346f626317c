"""Events in the life of a request: queued, admitted, first token, preempted, resumed, finished. Numbers 40 to 59."""

from typing import Annotated, Literal

import msgspec

from kvwatch.telemetry import metrics
from kvwatch.telemetry.schema import Event, amount_of, event, identity, instant, label, value

NS = 1e-9

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]
RejectionReason = Literal["queue_full", "too_long", "draining", "invalid", "unauthorized"]
PreemptionMode = Literal["recompute", "swap"]
PreemptionReason = Literal["blocks", "memory", "rebuild"]
WaitReason = Literal["blocks", "sequences", "tokens", "paused", "transfer"]
Operation = Literal["chat", "text_completion"]
"""What the caller asked for, in the words of OpenTelemetry's GenAI conventions."""


@event(40, "request.queued", "A request arrived and waits for admission.")
class RequestQueued(Event):
    """Carries what is known of the request from outside, so that nobody has to ask the server for it."""

    request: Annotated[str, identity(1, "Request id.")]
    prompt_tokens: Annotated[int, value(2, "Length of the prompt.", "tokens")]
    num_sequences: Annotated[int, value(3, "Sequences asked for (`n`).", "1")]
    queued_ns: Annotated[int, instant(4, "Monotonic time at which it arrived.")]
    operation: Annotated[Operation, label(5, "What was asked for.")] = "text_completion"
    is_stream: Annotated[bool, label(6, "Whether the answer is sent token by token.")] = False
    trace_parent: Annotated[str, identity(7, "W3C `traceparent` of the request; empty if it has none.")] = ""
    trace_state: Annotated[str, identity(8, "W3C `tracestate` of the request; empty if it has none.")] = ""
    tenant: Annotated[str, label(9, "On whose behalf; empty if nobody said.")] = ""
    adapter: Annotated[str, label(10, "LoRA adapter; empty for the base model.")] = ""
    max_tokens: Annotated[int, value(11, "Most tokens that each sequence may generate.", "tokens")] = 0
    temperature: Annotated[float, value(12, "Sampling temperature; 0 is greedy.", "1")] = 1.0
    top_p: Annotated[float, value(13, "Nucleus of the sampling; 1 is off.", "ratio")] = 1.0
    top_k: Annotated[int, value(14, "Most likely tokens that are sampled from; 0 is off.", "1")] = 0
    seed: Annotated[int | None, identity(15, "Seed that the caller gave.")] = None
    priority: Annotated[int, value(16, "Priority; 0 is served first.", "1")] = 0
    salt: Annotated[str, identity(17, "Digest of the cache salt, the same for equal salts; empty without one.")] = ""
    beam_width: Annotated[int, value(18, "Beams that hold blocks at once; 0 unless it is a beam search.", "1")] = 0
    image_positions: Annotated[
        list[int], value(19, "Where each image begins; empty unless the engine was told to give token ids.", "tokens")
    ] = msgspec.field(default_factory=list)
    image_tokens: Annotated[list[int], value(20, "Prompt tokens that stand for each of these images.", "tokens")] = (
        msgspec.field(default_factory=list)
    )
    image_hashes: Annotated[list[bytes], identity(21, "Digest of each of these images as the model sees it.")] = (
        msgspec.field(default_factory=list)
    )


@event(
    41, "request.rejected", "A request was refused before it was queued.",
    feeds=(metrics.REQUESTS_REJECTED.count(),),
)  # fmt: skip
class RequestRejected(Event):
    """It never held a block and is in no other metric."""

    request: Annotated[str, identity(1, "Request id.")]
    reason: Annotated[RejectionReason, label(2, "Why.")]
    operation: Annotated[Operation, label(3, "What was asked for.")] = "text_completion"
    trace_parent: Annotated[str, identity(4, "W3C `traceparent` of the request; empty if it has none.")] = ""
    trace_state: Annotated[str, identity(5, "W3C `tracestate` of the request; empty if it has none.")] = ""
    tenant: Annotated[str, label(6, "On whose behalf; empty if nobody said.")] = ""
    arrived_ns: Annotated[int, instant(7, "Monotonic time at which it arrived; 0 if that is not known.")] = 0
    refused_ns: Annotated[int, instant(8, "Monotonic time at which it was refused; 0 if that is not known.")] = 0


@event(
    42, "request.admitted", "A request got its first blocks and starts to run.",
    feeds=(
        metrics.PREFIX_CACHE_QUERIED_TOKENS.count(amount_of("queried_tokens")),
        metrics.PREFIX_CACHE_HIT_TOKENS.count(amount_of("hit_tokens")),
        metrics.PREFIX_CACHE_HIT_TOKENS.count(amount_of("host_hit_tokens"), tier="host"),
        metrics.PREFIX_CACHE_HIT_TOKENS.count(amount_of("disk_hit_tokens"), tier="disk"),
        metrics.PREFIX_CACHE_GRANULARITY_LOST_TOKENS.count(amount_of("granularity_lost_tokens")),
        metrics.PREFIX_CACHE_REGRETTED_TOKENS.count(amount_of("regretted_tokens")),
        metrics.PROMPT_TOKENS.count(amount_of("prompt_tokens")),
        metrics.QUEUE_SECONDS.observe(amount_of("queue_ns", NS)),
    ),
)  # fmt: skip
class RequestAdmitted(Event):
    """Once for each request, at its first admission; later ones are `RequestResumed`.

    A request with hits in tiers behind the device starts, and says so, when their blocks have arrived.
    """

    request: Annotated[str, identity(1, "Request id.")]
    prompt_tokens: Annotated[int, value(2, "Length of the prompt.", "tokens")]
    queried_tokens: Annotated[int, value(3, "Prompt tokens looked up; 0 with the prefix cache off.", "tokens")]
    hit_tokens: Annotated[int, value(4, "Of these, found on the device.", "tokens")]
    granularity_lost_tokens: Annotated[int, value(5, "Of these, in no block that could hit.", "tokens")]
    queue_ns: Annotated[int, value(6, "Time in the queue.", "ns")]
    tier: Annotated[Literal["device"], label(7, "Tier of the hits.")] = "device"
    regretted_tokens: Annotated[
        int, value(8, "Of the misses, those that would have hit, had their blocks not been evicted before.", "tokens")
    ] = 0
    host_hit_tokens: Annotated[int, value(9, "Further tokens that came from the host's memory.", "tokens")] = 0
    disk_hit_tokens: Annotated[int, value(10, "Further tokens that came from the disk.", "tokens")] = 0


@event(
    43, "request.first_token", "The first token of a request was generated.",
    feeds=(metrics.TIME_TO_FIRST_TOKEN.observe(amount_of("ttft_ns", NS)),),
)  # fmt: skip
class FirstToken(Event):
    """Once for each request, whatever its `n`."""

    request: Annotated[str, identity(1, "Request id.")]
    ttft_ns: Annotated[int, value(2, "Time since it was queued.", "ns")]


@event(
    44, "request.preempted", "A running request gives up its blocks and waits again.",
    feeds=(metrics.PREEMPTIONS.count(),),
)  # fmt: skip
class RequestPreempted(Event):
    """All its sequences stop together.

    With mode `recompute` its `BlocksReleased` events precede it; with `swap` they follow when its K/V has been moved,
    and until it runs again its state is `swapped`.
    """

    request: Annotated[str, identity(1, "Request that was preempted.")]
    mode: Annotated[PreemptionMode, label(2, "What happens to its K/V.")]
    reason: Annotated[
        PreemptionReason,
        label(3, "What was short: blocks, or memory for the step's workspace; or the pool was made anew."),
    ]
    num_blocks: Annotated[int, value(4, "Blocks that become free.", "blocks")]
    tokens_at_risk: Annotated[int, value(5, "Computed tokens that may have to be computed again.", "tokens")]
    beneficiary: Annotated[str, identity(6, "Request in whose favour; empty for nobody's.")]
    recompute_estimate_ns: Annotated[
        int | None, value(7, "Expected time to compute again what it loses; none before that was measured.", "ns")
    ] = None
    swap_estimate_ns: Annotated[
        int | None, value(8, "Expected time to move its blocks out and in; none without tiers or measurements.", "ns")
    ] = None


@event(
    45, "request.resumed", "A preempted request was admitted again.",
    feeds=(
        metrics.PREEMPTION_AWAY.observe(amount_of("away_ns", NS)),
        metrics.PREFIX_CACHE_RESUMED_HIT_TOKENS.count(amount_of("hit_tokens")),
    ),
)  # fmt: skip
class RequestResumed(Event):
    """Its hits are counted apart from those of new requests."""

    request: Annotated[str, identity(1, "Request id.")]
    mode: Annotated[PreemptionMode, label(2, "How it was preempted.")]
    away_ns: Annotated[int, value(3, "Time since the preemption.", "ns")]
    hit_tokens: Annotated[int, value(4, "Tokens found in the cache again.", "tokens")]
    recompute_tokens: Annotated[int, value(5, "Tokens that were computed before and will be computed again.", "tokens")]


@event(46, "request.forked", "A sequence began as a copy of another: its block table refers to the same blocks.")
class SequenceForked(Event):
    """Reference counts of the first `num_blocks` blocks of the parent's table rose by one, in each KV group."""

    request: Annotated[str, identity(1, "Request id.")]
    parent: Annotated[int, identity(2, "Sequence that was copied.")]
    child: Annotated[int, identity(3, "Sequence that begins.")]
    num_blocks: Annotated[int, value(4, "Blocks now shared; of the first KV group if there are several.", "blocks")]
    further_blocks: Annotated[list[int], value(5, "Blocks now shared in each further KV group.", "blocks")] = (
        msgspec.field(default_factory=list)
    )


@event(
    47, "request.finished", "A request ended, whatever the reason. Its blocks have been released.",
    feeds=(
        metrics.REQUESTS_FINISHED.count(),
        metrics.REQUEST_PROMPT_TOKENS.observe(amount_of("prompt_tokens")),
        metrics.REQUEST_GENERATED_TOKENS.observe(amount_of("generated_tokens")),
        metrics.REQUEST_KV_BLOCKS.observe(amount_of("peak_blocks")),
        metrics.PREFILL_SECONDS.observe(amount_of("prefill_ns", NS)),
        metrics.DECODE_SECONDS.observe(amount_of("decode_ns", NS)),
        metrics.END_TO_END.observe(amount_of("end_to_end_ns", NS)),
    ),
)  # fmt: skip
class RequestFinished(Event):
    """Exactly once for each queued request. A time that was never reached is none and is observed nowhere.

    The reason of a request with several sequences: `error` or `abort` if one ended so, else `length` if one did, else
    `stop`.
    """

    request: Annotated[str, identity(1, "Request id.")]
    reason: Annotated[FinishReason, label(2, "Why it ended.")]
    prompt_tokens: Annotated[int, value(3, "Length of the prompt.", "tokens")]
    generated_tokens: Annotated[int, value(4, "Tokens generated over all sequences that are returned.", "tokens")]
    cached_tokens: Annotated[int, value(5, "Prompt tokens found in the cache at first admission.", "tokens")]
    num_preemptions: Annotated[int, value(6, "Times it was preempted.", "1")]
    peak_blocks: Annotated[int | None, value(7, "Most distinct blocks held at once; none if it never ran.", "blocks")]
    queue_ns: Annotated[int | None, value(8, "Arrival to first admission.", "ns")]
    prefill_ns: Annotated[int | None, value(9, "First admission to first token.", "ns")]
    decode_ns: Annotated[int | None, value(10, "First to last token.", "ns")]
    end_to_end_ns: Annotated[int | None, value(11, "Arrival to last token; none if no token was generated.", "ns")]
    recomputed_tokens: Annotated[int, value(12, "Tokens computed again after preemptions.", "tokens")] = 0
    error: Annotated[str, identity(13, "Class of the error that ended it; empty if none did.")] = ""
    tenant: Annotated[str, label(14, "On whose behalf it ran; empty if nobody said.")] = ""
    lora: Annotated[str, label(15, "LoRA adapter; empty for the base model.")] = ""
    reasons: Annotated[
        list[FinishReason], label(16, "Why each sequence that is returned ended, in their order; empty for one alone.")
    ] = msgspec.field(default_factory=list)
    draft_tokens: Annotated[int, value(17, "Tokens of the drafts that were verified for it.", "tokens")] = 0
    accepted_draft_tokens: Annotated[int, value(18, "Of these, accepted ones.", "tokens")] = 0


@event(
    48, "request.recovered", "A resumed request has all tokens again that a preemption had dropped.",
    feeds=(metrics.RECOMPUTE_SECONDS.observe(amount_of("recompute_ns", NS)),),
)  # fmt: skip
class RequestRecovered(Event):
    """At most once for each resumption; not at all if the request ends or is preempted again before."""

    request: Annotated[str, identity(1, "Request id.")]
    recompute_ns: Annotated[int, value(2, "Time since it was resumed.", "ns")]


@event(49, "request.swap_abandoned", "A swapped request lost its K/V on the way, and is computed again.")
class SwapAbandoned(Event):
    """Its state was `swapped` and is `waiting` now. Its blocks, if it held any, have been released."""

    request: Annotated[str, identity(1, "Request id.")]
    reason: Annotated[str, identity(2, "Why; see `TransferFailed`.")]


@event(50, "request.wait_reasons_changed", "What some requests wait for has changed, or was found out.")
class WaitReasonsChanged(Event):
    """Once a step at most, before the step. A request that starts to run waits for nothing any more."""

    requests: Annotated[list[str], identity(1, "Requests that do not run.")]
    reasons: Annotated[list[WaitReason], label(2, "What each of them waits for.")]
