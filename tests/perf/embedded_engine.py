"""The embedded model in an engine without threads, and loads to put on it."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvwatch_engine.huge_pages import use_huge_pages
from kvwatch_engine.threads import bound_spinning, bound_turns

bound_spinning()  # before torch is imported, as `kvwatch serve` does
bound_turns()
use_huge_pages()

from kvwatch.errors import ControlError
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepExecutor
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

VOCABULARY = 49_000  # below the special tokens' neighbours and within every small model's vocabulary


def load_embedded() -> LoadedModel:
    """Load the embedded model in the dtype that `kvwatch serve` would take."""
    return load_model("embedded")


def make_core(
    model: LoadedModel,
    log: EventLog,
    *,
    max_num_seqs: int = 16,
    num_blocks: int = 2048,
    enable_prefix_cache: bool = True,
    watch: Callable[[ModelRunner], StepExecutor] = lambda runner: runner,
) -> EngineCore:
    """Return an engine as `kvwatch serve` builds it, warmed up.

    But its steps have at most 256 tokens and no bound in time, so that they are alike.

    Args:
        model: what it serves.
        log: where its events go.
        max_num_seqs: most sequences of a step.
        num_blocks: of the pool, the null block included.
        enable_prefix_cache: as in `EngineSettings`.
        watch: makes what stands between the engine and what computes its steps.
    """
    settings = EngineSettings(
        num_blocks=num_blocks,
        groups=model.info.groups,
        max_model_len=model.info.max_position,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=256,
        watermark_blocks=num_blocks // 50,
        enable_prefix_cache=enable_prefix_cache,
        weights_fingerprint=model.info.weights_fingerprint,
        eos_token_ids=model.info.eos_token_ids,
        vocab_size=model.info.vocab_size,
    )
    runner = ModelRunner(model, KVCache(model.cache_spec(settings.block_size), num_blocks))
    runner.warm_up(settings.max_batch_tokens)
    return EngineCore(settings, watch(runner), log, block_bytes=runner.kv_cache.spec.block_bytes)


def random_prompts(count: int, num_tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Return prompts that share no prefix."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(100, VOCABULARY) for _ in range(num_tokens)) for _ in range(count)]


def submit(core: EngineCore, prompts: Sequence[tuple[int, ...]], max_tokens: int, prefix: str) -> None:
    """Queue greedy requests that run to their full length."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerationRequest(request_id=f"{prefix}-{index}", prompt_token_ids=prompt, sampling=sampling)
        core.add(request, time.monotonic_ns())


def run(core: EngineCore, on_step: Callable[[], None] = lambda: None) -> int:
    """Step until idle; return the number of output tokens."""
    num_tokens = 0
    while core.has_work:
        num_tokens += sum(len(output.token_ids) for output in core.step())
        on_step()
    return num_tokens


class SteppedControl:
    """Answers the observatory for an engine that is stepped by this script's own thread, between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._asked: deque[Future[EngineSnapshot]] = deque()

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        future: Future[EngineSnapshot] = Future()
        self._asked.append(future)
        try:
            return future.result(timeout_seconds)
        except TimeoutError:
            raise ControlError(f"no answer within {timeout_seconds} s") from None

    def answer(self) -> None:
        """Answer whoever asked. The stepping thread calls it between two steps."""
        while self._asked:
            self._asked.popleft().set_result(self._core.snapshot())

    def is_alive(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True
