"""From a grammar to a guide, off the event loop and off the step loop.

An untried grammar is compiled in a process of its own first, and then here, which takes as long again. A few threads
wait for that, in the order of arrival: what is cached, and what was refused before, does not wait for them. Whoever
comes while they are all taken is told so in time.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.guidance.grammar import Grammar, GuidanceLimits
from kvwatch_engine.guidance.matching import CompiledGuide
from kvwatch_engine.guidance.refusals import Refusals
from kvwatch_engine.guidance.trials import Trials, TrialStarved, unavailable
from kvwatch_engine.guidance.vocabulary import VocabularySource, make_matcher, matcher_error, one_line


class GuideCompiler:
    """Compiles grammars for one model's vocabulary. Methods belong to the event loop."""

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GuidanceLimits | None = None
    ) -> None:
        """Read the vocabulary now: the library holds the interpreter for that, which no step should have to wait for.

        A tokenizer of a kind that the library does not know makes every grammar be refused, and nothing else.

        Args:
            tokenizer: tokenizer.json.
            vocab_size: tokens of the model.
            eos_token_ids: tokens that end a text.
            limits: the defaults if there are none.
        """
        self.limits = limits or GuidanceLimits()
        source = VocabularySource(tokenizer, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._unavailable = ""
        try:
            self._vocabulary = source.build()
        except Exception as error:  # the library raises every kind
            self._unavailable = one_line(str(error)) or type(error).__name__
        self._trials = Trials(source, self.limits)
        self._threads = ThreadPoolExecutor(self.limits.max_trials, thread_name_prefix="guidance")
        self._free_threads = asyncio.Semaphore(self.limits.max_trials)
        self._mask_threads = ThreadPoolExecutor(self.limits.mask_threads, thread_name_prefix="guidance-masks")
        self._cache: OrderedDict[Grammar, CompiledGuide] = OrderedDict()
        self._refusals = Refusals(self.limits.max_refusals)
        self._pending: dict[Grammar, asyncio.Task[CompiledGuide]] = {}

    async def compile(self, grammar: Grammar) -> CompiledGuide:
        """Return the guide of a grammar.

        Raises:
            RequestInvalid: it cannot be compiled, or not within its bounds.
            EngineOverloaded: too many wait to be compiled.
        """
        grammar.check_size(self.limits)
        cached = self._cache.get(grammar)
        if cached is not None:
            self._cache.move_to_end(grammar)
            return cached
        self._refusals.check(grammar)
        pending = self._pending.get(grammar)
        if pending is None:
            if len(self._pending) >= self.limits.max_pending:
                raise EngineOverloaded(
                    f"{len(self._pending)} grammars wait to be compiled, the limit is {self.limits.max_pending}; "
                    "retry later",
                    reason="queue_full",
                )
            pending = self._pending[grammar] = asyncio.create_task(self._compile(grammar))
            pending.add_done_callback(_note_error)
        return await asyncio.shield(pending)  # others may wait for the same one

    def has_no_text(self, token_id: int) -> bool:
        """Whether a grammar takes a token for a special one, which it must name by its id: no text allows it."""
        return self._vocabulary is not None and self._vocabulary.is_special_token(token_id)

    async def close(self) -> None:
        """End the trial process and the threads that ask it. Sequences that are guided may go on."""
        for pending in self._pending.values():
            pending.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._close_trials)

    def _close_trials(self) -> None:
        self._threads.shutdown(wait=True)  # a compilation takes no longer than its deadline
        self._trials.close()

    async def _compile(self, grammar: Grammar) -> CompiledGuide:
        try:
            guide = await self._compile_in_turn(grammar)
        finally:
            del self._pending[grammar]
        self._cache[grammar] = guide
        if len(self._cache) > self.limits.max_cached:
            self._cache.popitem(last=False)
        return guide

    async def _compile_in_turn(self, grammar: Grammar) -> CompiledGuide:
        limits, loop = self.limits, asyncio.get_running_loop()
        deadline = loop.time() + max(limits.answer_seconds, limits.compile_seconds)
        try:
            async with asyncio.timeout_at(deadline):
                await self._free_threads.acquire()
        except TimeoutError as error:
            raise _too_busy(grammar) from error
        seconds = min(limits.compile_seconds, deadline - loop.time())
        try:
            return await loop.run_in_executor(self._threads, self._compile_now, grammar, seconds)
        except RequestInvalid as error:
            self._refusals.note(grammar, error)
            raise
        except TrialStarved as error:
            raise _too_busy(grammar) from error
        finally:
            self._free_threads.release()

    def _compile_now(self, grammar: Grammar, seconds: float) -> CompiledGuide:
        if self._vocabulary is None:
            raise unavailable(grammar, self._unavailable)
        compiled = self._trials.run(grammar, seconds)
        try:
            matcher = make_matcher(self._vocabulary, compiled)
            error = matcher_error(matcher)
        except BaseException as panic:  # a defect of the library is no exception to Python, and no reason to end
            raise grammar.refusal(f"the grammar library failed ({type(panic).__name__})") from panic
        if error:
            raise grammar.refusal(error)
        return CompiledGuide(matcher, self._mask_threads, self._vocab_size, self.limits.mask_seconds)


def _too_busy(grammar: Grammar) -> EngineOverloaded:
    return EngineOverloaded(
        f"{grammar.param}: the machine is too busy to compile it now; retry later", reason="queue_full"
    )


def _note_error(task: "asyncio.Task[CompiledGuide]") -> None:
    """Look at the error of a compilation that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
