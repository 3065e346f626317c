"""One sequence within a compiled grammar. Knows the library, not the model."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher

from kvwatch_engine.contracts.errors import GuideFailed
from kvwatch_engine.contracts.guidance import BoolArray
from kvwatch_engine.guidance.vocabulary import DEAD_END, matcher_error


class MatcherGuide:
    """A `SequenceGuide`: what may follow is found out on a thread, while the model computes its logits."""

    def __init__(self, matcher: LLMatcher, threads: ThreadPoolExecutor, vocab_size: int, seconds: float) -> None:
        """Guide a sequence without tokens.

        Args:
            matcher: at its beginning; nobody else's.
            threads: where it works.
            vocab_size: tokens of the model.
            seconds: how long `allowed` waits.
        """
        self._matcher = matcher
        self._threads = threads
        self._vocab_size = vocab_size
        self._seconds = seconds
        self._num_tokens = 0
        self._mask: Future[BoolArray] | None = None
        self._error = ""

    @property
    def error(self) -> str:
        """See `SequenceGuide.error`."""
        return self._error

    def prepare(self, output_token_ids: Sequence[int], num_tokens: int) -> None:
        """See `SequenceGuide.prepare`."""
        if self._mask is not None and num_tokens == self._num_tokens:
            return  # the step was composed before, and failed
        assert num_tokens >= self._num_tokens, "a sequence takes no token back"
        new = list(output_token_ids[self._num_tokens : num_tokens])
        self._num_tokens = num_tokens
        self._mask = self._threads.submit(self._find_allowed, new)

    def allowed(self) -> BoolArray:
        """See `SequenceGuide.allowed`."""
        assert self._mask is not None, "it was prepared"
        try:
            return self._mask.result(self._seconds)
        except TimeoutError as error:
            self._error = f"the grammar takes more than {self._seconds:g} s to say what may follow; make it simpler"
            raise GuideFailed(self._error) from error
        except GuideFailed as error:
            self._error = str(error)
            raise

    def _find_allowed(self, new: list[int]) -> BoolArray:
        try:
            return self._ask_matcher(new)
        except GuideFailed:
            raise
        except BaseException as error:  # a defect of the library ends this sequence, never the step with all others
            raise GuideFailed(f"the grammar library failed at this token ({type(error).__name__})") from error

    def _ask_matcher(self, new: list[int]) -> BoolArray:
        matcher = self._matcher
        if new:
            matcher.consume_tokens(new)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        error = matcher_error(matcher)
        if error == DEAD_END:
            raise GuideFailed(f"the grammar has led to a place where {error}")
        if error:
            raise GuideFailed(f"the grammar takes too much work at this token ({error}); make it simpler")
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)


class CompiledGuide:
    """A `Guide`: each sequence gets a copy of one compiled grammar."""

    def __init__(self, matcher: LLMatcher, threads: ThreadPoolExecutor, vocab_size: int, seconds: float) -> None:
        """Take a compiled grammar; the other arguments are those of `MatcherGuide`."""
        self._matcher = matcher
        self._threads = threads
        self._vocab_size = vocab_size
        self._seconds = seconds

    def start(self) -> MatcherGuide:
        """See `Guide.start`."""
        return MatcherGuide(self._matcher.deep_copy(), self._threads, self._vocab_size, self._seconds)
