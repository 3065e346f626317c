"""What the planners of all APIs share: the model, the limits, the prompt encoder."""

import hashlib
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import structlog

from kvwatch.telemetry.events.request import Operation
from kvwatch_engine.contracts.adapter import Adapter
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.guidance import Guide
from kvwatch_engine.contracts.request import EngineClient
from kvwatch_engine.guidance import Grammar, GuideCompiler
from kvwatch_engine.server.api_keys import Caller
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.generation import Urgency
from kvwatch_engine.server.models import ServedModels
from kvwatch_engine.server.prompts import PromptEncoder
from kvwatch_engine.server.protocol.request import GenerationFields
from kvwatch_engine.server.sampling import Bounds
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.shapes import Head, Plan, wants_usage
from kvwatch_engine.server.tokenizer import Tokenizer

_MAX_SALT_CHARS = 128
_MAX_PRIORITY = 100
_MAX_DEADLINE_SECONDS = 86_400
_log = structlog.get_logger("kvwatch.server")


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request that has arrived."""

    body: bytes
    caller: Caller | None
    """Who sent it; none where nobody is asked for a key."""


class Planner(ABC):
    """Turns bodies into plans. Event loop only."""

    operation: ClassVar[Operation]
    """What its requests ask for."""

    def __init__(
        self,
        engine: EngineClient,
        models: ServedModels,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        guides: GuideCompiler,
        settings: ServerSettings,
    ) -> None:
        self._engine = engine
        self._models = models
        self.model = models.base
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.guides = guides
        self.settings = settings

    @abstractmethod
    async def plan(self, incoming: Incoming) -> Plan:
        """Check a body and return what to do.

        Raises:
            RequestInvalid: anything in it is wrong or not supported.
            UnknownModel: it asks for a model that is not served.
            EngineOverloaded: too many prompts wait to be tokenised.
        """

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""
        return self._engine.max_model_len

    @property
    def max_prompts(self) -> int:
        """Most prompts of one body: all of them are queued at once."""
        return self._engine.max_queued_requests

    def bounds(self) -> Bounds:
        """Return what sampling parameters are measured against."""
        return Bounds(
            settings=self.settings,
            model=self.model,
            max_model_len=self.max_model_len,
            max_new_tokens=self._engine.max_new_tokens,
        )

    def head(self, request: GenerationFields, prefix: str, adapter: Adapter | None) -> Head:
        """Return the head of the answer, with a fresh id in OpenAI's form, which begins with `prefix`.

        Raises:
            RequestInvalid: `stream_options` without `stream`.
        """
        return Head(
            id=f"{prefix}{uuid.uuid4().hex}",
            model=self.model.name if adapter is None else adapter.name,
            fingerprint=self._fingerprint(adapter),
            include_usage=wants_usage(request),
        )

    def adapter_of(self, name: str) -> Adapter | None:
        """Return the LoRA adapter that is served under a name, None for the base model.

        Raises:
            UnknownModel: nothing is.
        """
        return self._models.find(name)

    def salt(self, request: GenerationFields) -> str:
        """Return the request's cache salt, checked.

        Raises:
            RequestInvalid: it is too long.
        """
        salt = request.cache_salt or ""
        if len(salt) > _MAX_SALT_CHARS:
            raise RequestInvalid(
                f"cache_salt has {len(salt)} characters, the limit is {_MAX_SALT_CHARS}", param="cache_salt"
            )
        return salt

    def urgency(self, request: GenerationFields) -> Urgency:
        """Return the request's priority and deadline, checked.

        Raises:
            RequestInvalid: one of them is out of range.
        """
        priority, seconds = request.priority or 0, request.deadline_seconds
        if not 0 <= priority <= _MAX_PRIORITY:
            raise RequestInvalid(
                f"priority is {shorten(str(priority), 20)}, it must be 0 (first) to {_MAX_PRIORITY}", param="priority"
            )
        if seconds is not None and not 0 < seconds <= _MAX_DEADLINE_SECONDS:  # NaN is within nothing
            raise RequestInvalid(
                f"deadline_seconds is {seconds:.6g}, it must be above 0 and at most {_MAX_DEADLINE_SECONDS}",
                param="deadline_seconds",
            )
        return Urgency(priority=priority, deadline_seconds=seconds)

    async def guide(self, grammar: Grammar | None) -> Guide | None:
        """Return what keeps a text within a grammar; none if it is free.

        Raises:
            RequestInvalid: the grammar cannot be compiled, or not within its bounds.
            EngineOverloaded: too many wait to be compiled.
        """
        return None if grammar is None else await self.guides.compile(grammar)

    def _fingerprint(self, adapter: Adapter | None) -> str:
        """Return what changes whenever the weights do that a request is computed with."""
        weights = self.model.weights_fingerprint + ("" if adapter is None else adapter.fingerprint)
        return f"fp_{hashlib.sha256(weights.encode()).hexdigest()[:12]}"

    def log_prompt(self, text: str) -> None:
        """Write a prompt to the log, if the operator asked for that."""
        if self.settings.log_prompts:
            _log.info("prompt", text=text)
