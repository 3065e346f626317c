"""What a caller submits to the engine and what it gets back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvwatch.telemetry.events.request import Operation, RejectionReason, RequestRejected
from kvwatch_engine.contracts.adapter import AdapterAdmission, LoadId
from kvwatch_engine.contracts.guidance import Guide
from kvwatch_engine.contracts.image import PromptImage
from kvwatch_engine.contracts.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context limit."""
    ABORT = "abort"
    """The client went away, or the server shut down."""
    DEADLINE = "deadline"
    """Its time was over before it was complete."""
    ERROR = "error"
    """The step failed; `SequenceOutput.error` says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOrigin:
    """Where a request comes from. Changes nothing of its answer: only telemetry reads it."""

    operation: Operation = "text_completion"
    is_stream: bool = False
    """Whether the caller reads the answer token by token."""
    trace_parent: str = ""
    """W3C `traceparent` of the request; empty if it has none."""
    trace_state: str = ""
    """W3C `tracestate` of the request; empty if it has none."""
    tenant: str = ""
    """On whose behalf; empty if nobody said."""
    adapter: str = ""
    """LoRA adapter; empty for the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request: a prompt and how to continue it `sampling.n` times."""

    request_id: str
    """Unique among live requests."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    images: tuple[PromptImage, ...] = ()
    """What stands behind placeholder tokens of the prompt, in order."""
    cache_salt: str = ""
    """Part of every block hash of this request: blocks are shared only between equal salts."""
    tenant_salt: str = ""
    """What the server adds for the tenant of an API key; like `cache_salt`, but no request can choose it."""
    origin: RequestOrigin = RequestOrigin()
    load_id: LoadId | None = None
    """LoRA adapter that computes it, which is part of every block hash as well; none is the base model."""
    guide: Guide | None = None
    """Grammar that every sequence keeps to; none if they are free."""
    priority: int = 0
    """0 is served first. A higher number waits, but never for ever; see `EngineSettings.priority_aging_seconds`."""
    deadline_seconds: float | None = None
    """Time after its arrival at which it ends, finished or not; none leaves it to the engine's settings."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was refused before it was queued."""

    request_id: str
    reason: RejectionReason
    origin: RequestOrigin = RequestOrigin()
    arrived_ns: int = 0
    """Monotonic time at which it arrived; 0 if that is not known."""
    refused_ns: int = 0
    """Monotonic time at which it was refused; 0 if that is not known."""

    def to_event(self) -> RequestRejected:
        """Return what is told of it."""
        origin = self.origin
        return RequestRejected(
            self.request_id,
            self.reason,
            origin.operation,
            origin.trace_parent,
            origin.trace_state,
            origin.tenant,
            self.arrived_ns,
            self.refused_ns,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one generated position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of a prompt, each given all that stand before it.

    Columns, not objects: a prompt may have very many tokens.
    """

    token_ids: npt.NDArray[np.int64]
    """i64[num_tokens]: the prompt's own tokens. Its first one, which follows nothing, is never among them."""
    logprobs: npt.NDArray[np.float64]
    """f64[num_tokens]"""
    ranks: npt.NDArray[np.int64]
    """i64[num_tokens]: 1 for the most likely token; as many tokens as are more likely, and 1."""
    top_token_ids: npt.NDArray[np.int64]
    """i64[num_tokens, num_top]: the most likely tokens, most likely first."""
    top_logprobs: npt.NDArray[np.float64]
    """f64[num_tokens, num_top]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one step brought for one sequence.

    `finish_reason` is set in the last output of a sequence; the last output of the last sequence ends the request.
    """

    request_id: str
    sequence: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each token if asked for, else empty."""
    finish_reason: FinishReason | None = None
    is_stop_token: bool = False
    """Whether the last of `token_ids` is the token that ended the sequence: it counts, but its text is not shown."""
    num_cached_tokens: int = 0
    """Prompt tokens of the request that were found in the prefix cache at its first admission."""
    error: str = ""
    is_guide_error: bool = False
    """Whether it ended since its grammar took too much work, which is the request's own fault."""
    score: float | None = None
    """Score of a whole sequence that a beam search found; see `BeamParams`."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the next tokens of the request's prompt, if asked for: in order, each token once, all of them before the first
    token of any of its sequences."""


OutputListener = Callable[[Sequence[SequenceOutput]], None]
"""Called on the engine thread after each step with all outputs of the step; must return quickly and never raise."""


class EngineClient(Protocol):
    """What the server needs of the engine. Every method may be called from any thread."""

    @property
    def max_model_len(self) -> int:
        """Longest possible sequence in tokens, prompt and output together: min(model, pool)."""
        ...

    @property
    def max_queued_requests(self) -> int:
        """Most requests that can wait at once."""
        ...

    @property
    def adapters(self) -> AdapterAdmission:
        """Which LoRA adapters requests may use."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its outputs come through the engine's `OutputListener`.

        Raises:
            RequestInvalid: it can never run (too long for the model, or larger than the whole pool).
            EngineOverloaded: the queue is full, or the engine drains.
        """
        ...

    def note_rejection(
        self, request_id: str, reason: RejectionReason, origin: RequestOrigin, arrived_ns: int | None = None
    ) -> None:
        """Count a request that the server refused before `submit`, which counts its own refusals.

        Args:
            request_id: the request.
            reason: why it was refused.
            origin: where it comes from.
            arrived_ns: monotonic time at which it arrived; now by default.
        """
        ...

    def max_new_tokens(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Return the largest `max_tokens` with which such a request can run; below 1 when it cannot run at all."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request whatever its state and free its blocks. Unknown ids are ignored."""
        ...

    def stop_sequence(self, request_id: str, sequence: int) -> None:
        """End one sequence with reason `stop` (a stop string was seen). Unknown ids are ignored.

        No further output comes for it: the caller has already decided what its text is.
        """
        ...

    def is_alive(self) -> bool:
        """Whether the step loop makes progress, or has nothing to do."""
        ...

    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        ...
