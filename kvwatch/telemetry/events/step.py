"""Events of the step loop: what was scheduled, how long it took, and checksums that hold the ledger to the truth.

Numbers 60 to 79.
"""

from typing import Annotated, Literal

import msgspec

from kvwatch.telemetry import metrics
from kvwatch.telemetry.schema import Event, amount_of, event, identity, label, value, weighted

NS = 1e-9


@event(
    60, "step.scheduled", "A step was put together; its tokens go through the model next.",
    feeds=(
        metrics.COMPUTED_TOKENS.count(amount_of("total_tokens")),
        metrics.STEP_TOKENS.observe(amount_of("total_tokens")),
        metrics.BATCH_SIZE.observe(amount_of("num_sequences")),
    ),
)  # fmt: skip
class StepScheduled(Event):
    """The written blocks tell the ledger how many slots are filled. A block is listed once for each step."""

    requests: Annotated[list[str], identity(1, "Request of each scheduled sequence.")]
    num_tokens: Annotated[list[int], value(2, "Tokens scheduled for each of them.", "tokens")]
    total_tokens: Annotated[int, value(3, "Sum of these.", "tokens")]
    num_sequences: Annotated[int, value(4, "Number of scheduled sequences.", "1")]
    written_block_ids: Annotated[list[int], identity(5, "Blocks that this step writes to.")]
    filled_slots: Annotated[list[int], value(6, "Filled slots of each of them after the step.", "tokens")]


@event(
    61, "step.completed", "A step is over: its tokens were sampled and applied.",
    feeds=(
        metrics.GENERATED_TOKENS.count(amount_of("generated_tokens")),
        metrics.RECOMPUTED_TOKENS.count(amount_of("recomputed_tokens")),
        metrics.INTER_TOKEN_LATENCY.observe(weighted("inter_token_ns", "inter_token_counts", NS)),
        metrics.STEP_DURATION.observe(amount_of("schedule_ns", NS), phase="schedule"),
        metrics.STEP_DURATION.observe(amount_of("forward_ns", NS), phase="forward"),
        metrics.STEP_DURATION.observe(amount_of("sample_ns", NS), phase="sample"),
        metrics.STEP_DURATION.observe(amount_of("apply_ns", NS), phase="apply"),
        metrics.STEP_BUILD_SECONDS.count(amount_of("build_ns", NS)),
        metrics.FORWARD_OPERATION_SECONDS.count(amount_of("linear_ns", NS), operation="linear"),
        metrics.FORWARD_OPERATION_SECONDS.count(amount_of("attention_ns", NS), operation="attention"),
        metrics.FORWARD_OPERATION_SECONDS.count(amount_of("rotary_ns", NS), operation="rotary"),
        metrics.FORWARD_OPERATION_SECONDS.count(amount_of("norm_ns", NS), operation="norm"),
        metrics.FORWARD_OPERATION_SECONDS.count(amount_of("activation_ns", NS), operation="activation"),
        metrics.FORWARD_OPERATION_SECONDS.count(amount_of("logits_ns", NS), operation="logits"),
    ),
)  # fmt: skip
class StepCompleted(Event):
    """Counts at the end of the step: the ledger's must be equal. Phase durations feed `step_seconds`.

    Operations are parts of the forward pass, waiting of the threads for each other included. Where layers run one by
    one (steps with LoRA adapters, models that run through transformers) those of the layers are empty, on GPUs all are.
    """

    schedule_ns: Annotated[int, value(1, "Duration of scheduling; where `build_ns` is empty, of building too.", "ns")]
    forward_ns: Annotated[int, value(2, "Duration of the model's forward pass.", "ns")]
    sample_ns: Annotated[int, value(3, "Duration of sampling.", "ns")]
    apply_ns: Annotated[int, value(4, "Duration of applying the results.", "ns")]
    generated_tokens: Annotated[int, value(5, "Tokens generated.", "tokens")]
    recomputed_tokens: Annotated[
        int, value(6, "Scheduled tokens that had been computed before a preemption.", "tokens")
    ]
    inter_token_ns: Annotated[list[int], value(7, "Distinct times between two tokens of a sequence.", "ns")]
    inter_token_counts: Annotated[list[int], value(8, "Number of sequences for each of these times.", "1")]
    num_used_blocks: Annotated[int, value(9, "Checksum: used blocks.", "blocks")]
    num_cached_blocks: Annotated[int, value(10, "Checksum: cached blocks.", "blocks")]
    num_empty_blocks: Annotated[int, value(11, "Checksum: empty blocks.", "blocks")]
    num_table_entries: Annotated[int, value(12, "Checksum: sum of reference counts.", "blocks")]
    num_running: Annotated[int, value(13, "Checksum: running requests.", "1")]
    num_waiting: Annotated[int, value(14, "Checksum: waiting requests.", "1")]
    waiting_for: Annotated[dict[str, int], value(15, "Waiting requests by reason.", "1")]
    build_ns: Annotated[int | None, value(16, "Duration of batch building.", "ns")] = None
    linear_ns: Annotated[int | None, value(17, "Of the forward pass: the layers' matrix products.", "ns")] = None
    attention_ns: Annotated[int | None, value(18, "Of the forward pass: attention.", "ns")] = None
    rotary_ns: Annotated[
        int | None, value(19, "Of the forward pass: rotation of queries and keys, storing of keys and values.", "ns")
    ] = None
    norm_ns: Annotated[
        int | None, value(20, "Of the forward pass: norms, and the sums that they begin with.", "ns")
    ] = None
    activation_ns: Annotated[int | None, value(21, "Of the forward pass: gated activations.", "ns")] = None
    logits_ns: Annotated[
        int | None, value(22, "Of the forward pass: logits of the tokens that are sampled from.", "ns")
    ] = None


@event(
    62,
    "step.failed",
    "A step raised in the model.",
    feeds=(metrics.STEP_ERRORS.count(),),
)
class StepFailed(Event):
    """Its requests end with an error, unless memory was short: then their tokens run in smaller steps."""

    error: Annotated[str, identity(1, "Class of the exception.")]
    unwritten_block_ids: Annotated[
        list[int], identity(2, "Blocks of requests that go on, which the step would have written to.")
    ] = msgspec.field(default_factory=list)
    filled_slots: Annotated[list[int], value(3, "Filled slots of each of them, as before the step.", "tokens")] = (
        msgspec.field(default_factory=list)
    )


@event(
    63, "step.out_of_memory", "A step failed since the device had too little memory for it.",
    feeds=(metrics.OUT_OF_MEMORY.count(),),
)  # fmt: skip
class OutOfMemory(Event):
    """The pool is allocated in advance, so this is about workspace. `StepFailed` follows."""

    num_tokens: Annotated[int, value(1, "Tokens of the step.", "tokens")]
    num_sequences: Annotated[int, value(2, "Sequences of the step.", "1")]


@event(64, "step.stalled", "A step takes longer than the engine may need for one.")
class EngineStalled(Event):
    """Once for each such step, as soon as it is noticed. The next event of the step loop says that it is over."""

    stuck_ns: Annotated[int, value(1, "Time since the step loop last made progress.", "ns")]
    num_running: Annotated[int, value(2, "Running requests.", "1")]
    num_waiting: Annotated[int, value(3, "Waiting requests.", "1")]


@event(65, "step.engine_ended", "The step loop has ended; no request is live any more.")
class EngineEnded(Event):
    """The last event of an engine."""

    reason: Annotated[Literal["stopped", "failed"], label(1, "Whether it was told to, or found itself defective.")]


@event(
    66, "step.drafts_verified", "A step has verified drafts: tokens that were guessed from sequences' own text.",
    feeds=(
        metrics.SPEC_DECODE_DRAFTS.count(amount_of("num_drafts")),
        metrics.SPEC_DECODE_DRAFT_TOKENS.count(amount_of("accepted_tokens"), outcome="accepted"),
        metrics.SPEC_DECODE_DRAFT_TOKENS.count(amount_of("rejected_tokens"), outcome="rejected"),
    ),
)  # fmt: skip
class DraftsVerified(Event):
    """Between the step's `StepScheduled`, whose written blocks hold the drafts, and its `StepCompleted`.

    Accepted are the tokens that a sequence got beyond the one of every step. The blocks that held nothing but rejected
    tokens have been released before (`truncated`); others are less filled than `StepScheduled` said.
    """

    requests: Annotated[list[str], identity(1, "Request of each sequence that had a draft.")]
    proposed: Annotated[list[int], value(2, "Tokens of each of these drafts.", "tokens")]
    accepted: Annotated[list[int], value(3, "Of these, accepted ones.", "tokens")]
    num_drafts: Annotated[int, value(4, "Number of drafts.", "1")]
    accepted_tokens: Annotated[int, value(5, "Accepted tokens of all drafts.", "tokens")]
    rejected_tokens: Annotated[int, value(6, "Rejected tokens of all drafts.", "tokens")]
    unwritten_block_ids: Annotated[list[int], identity(7, "Blocks of which a part was taken back.")]
    filled_slots: Annotated[list[int], value(8, "Filled slots of each of them after that.", "tokens")]
