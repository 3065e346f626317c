"""Serves a load on an engine in this thread and notes, for each step, what it computed and where its time went.

What a step's phases and operations took is read from its `StepCompleted`, as everybody else would. Added is what no
event tells: the whole step by the clock, appending to the log, and turning tokens into text, which a server does on
another thread.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from embedded_engine import make_core
from peers.loads import Load

from kvwatch.telemetry.events import StepCompleted
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch_engine.contracts.request import GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.server.detokenizer import Detokenizer
from kvwatch_engine.server.tokenizer import Tokenizer

_FIRST_TOKEN_ID = 100
"""Prompts are made of tokens from here on: what comes before may be special."""
_BLOCK_SIZE = 16
_SPARE_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """One step."""

    num_tokens: int
    num_sequences: int
    num_sampled: int
    """Rows of logits."""
    num_context_tokens: int
    """Sum of the tokens whose keys and values each sequence reads."""
    num_seen_tokens: int
    """Sum over the step's tokens of those that each attends to."""
    completed: StepCompleted
    wall_ns: int
    emit_ns: int
    """Appending to the log, which lies within scheduling, applying, and what comes after it."""
    num_events: int
    detokenize_ns: int
    num_output_tokens: int

    @property
    def has_prefill(self) -> bool:
        """Whether a sequence has more than one token in it."""
        return self.num_tokens > self.num_sequences


class Serving:
    """One engine, as `kvwatch serve` builds it, that loads are put on one after the other."""

    def __init__(self, model: LoadedModel, *, max_num_seqs: int, num_tokens: int) -> None:
        """Build and warm up an engine.

        Args:
            model: what is served.
            max_num_seqs: most sequences of a step.
            num_tokens: tokens that the cache must hold at once.
        """
        self._model = model
        self._log = _TimedLog()
        self._cursor = self._log.subscribe("profile")
        self._executors: list[_WatchedExecutor] = []
        num_blocks = num_tokens // _BLOCK_SIZE + max_num_seqs + _SPARE_BLOCKS
        self.core = make_core(model, self._log, max_num_seqs=max_num_seqs, num_blocks=num_blocks, watch=self._watched)
        self._tokenizer = Tokenizer.of_model(model.info)
        self._texts: dict[tuple[str, int], Detokenizer] = {}
        self._num_rounds = 0

    def serve(self, load: Load) -> list[ProfiledStep]:
        """Serve all requests of a load to their end, `load.concurrency` at a time; return all steps."""
        self._num_rounds += 1
        waiting = list(self._requests(load))
        steps: list[ProfiledStep] = []
        num_live = 0
        while waiting or self.core.has_work:
            while waiting and num_live < load.concurrency:
                self.core.add(waiting.pop(0), time.monotonic_ns())
                num_live += 1
            outputs, step = self._step()
            num_live -= sum(output.finish_reason is not None for output in outputs)
            if step is not None:
                steps.append(step)
        return steps

    def num_calls(self) -> Mapping[str, int]:
        """Return how many calls of each kind of operation a step makes."""
        return {str(operation): count for operation, count in self._executors[-1].runner.num_calls().items()}

    def _watched(self, runner: ModelRunner) -> "_WatchedExecutor":
        self._executors.append(_WatchedExecutor(runner))
        return self._executors[-1]

    def _requests(self, load: Load) -> Sequence[GenerationRequest]:
        """Return greedy requests; those of another round share nothing with them."""
        rng = random.Random(f"{load.name}/{self._num_rounds}")
        most = self._model.info.vocab_size
        first = min(_FIRST_TOKEN_ID, most // 2)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(first, most) for _ in range(count))

        shared = tokens(load.num_shared_tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=load.num_output_tokens, ignore_eos=True)
        return [
            GenerationRequest(
                request_id=f"{load.name}-{self._num_rounds}-{index}",
                prompt_token_ids=shared + tokens(load.num_prompt_tokens - load.num_shared_tokens),
                sampling=sampling,
            )
            for index in range(load.num_requests)
        ]

    def _step(self) -> tuple[list[SequenceOutput], ProfiledStep | None]:
        log = self._log
        log.reset()
        started = time.perf_counter_ns()
        outputs = self.core.step()
        ended = time.perf_counter_ns()
        self._detokenize(outputs)
        detokenized = time.perf_counter_ns()
        completed = self._completed()
        if completed is None:
            return outputs, None
        step = self._executors[-1].step
        assert step is not None, "it was completed"
        lengths = np.diff(step.query_starts).astype(np.int64)
        contexts = step.context_lens.astype(np.int64)
        return outputs, ProfiledStep(
            num_tokens=step.num_tokens,
            num_sequences=len(contexts),
            num_sampled=len(set(step.sample_indices.tolist())),
            num_context_tokens=int(contexts.sum()),
            num_seen_tokens=int((lengths * contexts - lengths * (lengths - 1) // 2).sum()),
            completed=completed,
            wall_ns=ended - started,
            emit_ns=log.emit_ns,
            num_events=log.num_events,
            detokenize_ns=detokenized - ended,
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
        )

    def _completed(self) -> StepCompleted | None:
        completed = None
        while events := self._cursor.read():
            for event in events:
                if isinstance(event, StepCompleted):
                    completed = event
        return completed

    def _detokenize(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            key = output.request_id, output.sequence
            text = self._texts.get(key)
            if text is None:
                text = self._texts[key] = self._tokenizer.detokenizer()
            for token_id in output.token_ids:
                text.push(token_id)
            if output.finish_reason is not None:
                text.flush()
                del self._texts[key]


class _WatchedExecutor:
    """Remembers the last step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step: StepInput | None = None

    def execute(self, step: StepInput) -> StepResult:
        self.step = step
        return self.runner.execute(step)


class _TimedLog(EventLog):
    """Takes the time of its appends."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.emit_ns = 0
        self.num_events = 0

    def append(self, event: Event) -> None:
        started = time.perf_counter_ns()
        super().append(event)
        self.emit_ns += time.perf_counter_ns() - started
        self.num_events += 1
