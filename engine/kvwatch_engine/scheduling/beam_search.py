"""Beam search over one prompt: which beginnings go on, which sequences have ended, when it is over.

    candidates of every beam ─▶ ranked by sum of log-probabilities
        ends here, among the best `width`   ─▶ an ended sequence, scored; the best `width` of those are kept
        goes on                             ─▶ the best `width` are the beams of the next step

Finds what transformers' `generate(num_beams=...)` finds. Pure: knows tokens and scores, neither blocks nor steps;
`beam_groups.py` moves the blocks.
"""

import math
from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, PositionLogprobs
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import Candidates


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning that may go on, or a sequence that has ended."""

    token_ids: list[int]
    """Generated tokens. Never changed: beams that go on are new ones."""
    sum_logprob: float
    """Sum of the log-probabilities of its tokens."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Of each token, if asked for."""


@dataclass(frozen=True, slots=True)
class EndedBeam:
    """A sequence that was found."""

    beam: Beam
    score: float
    reason: FinishReason


class Move(NamedTuple):
    """A place whose beam goes on from the beam of another place."""

    place: int
    parent: int


class _Continuation(NamedTuple):
    parent: int
    token_id: int
    sum_logprob: float
    logprobs: PositionLogprobs | None


class BeamSearch:
    """State of one search. Each beam has a place, from 0: that of the sequence which computes it.

    Invariant: before the first step there is one beam, without tokens, at place 0; after it all `width` places are
    taken, and all beams have the same number of tokens.
    """

    def __init__(self, params: BeamParams, max_tokens: int, end_token_ids: Collection[int]) -> None:
        """Begin a search.

        Args:
            params: how to search.
            max_tokens: tokens after which every sequence ends.
            end_token_ids: tokens that end a sequence.
        """
        self.params = params
        self.beams: dict[int, Beam] = {0: Beam([], 0.0)}
        """Place -> what goes on there."""
        self.ended: list[EndedBeam] = []
        """The best so far, the best first; at most `width`."""
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._num_tokens = 0
        self._candidates: dict[int, Candidates] = {}

    @property
    def num_candidates(self) -> int:
        """Candidates that are wanted of each beam: `width` of them go on, whatever end tokens are among them."""
        return self.params.width + len(self._end_token_ids)

    @property
    def is_ready(self) -> bool:
        """Whether the candidates of all beams are there."""
        return len(self._candidates) == len(self.beams)

    def offer(self, place: int, candidates: Candidates) -> None:
        """Take in the candidates of one beam. They may come in different steps."""
        assert place in self.beams, f"no beam goes on at place {place}"
        self._candidates[place] = candidates

    def forget_candidates(self) -> None:
        """Forget the candidates that are there: the beams are computed again."""
        self._candidates.clear()

    def advance(self) -> list[Move] | None:
        """Take one step, once the candidates of all beams are there.

        Returns:
            Who goes on from another place's beam; None when the search is over.
        """
        assert self.is_ready, "a beam has no candidates yet"
        self._num_tokens += 1
        is_last = self._num_tokens >= self._max_tokens
        going_on: list[_Continuation] = []
        for rank, continuation in enumerate(self._ranked()):
            is_end = continuation.token_id in self._end_token_ids
            if not is_end and not is_last:
                going_on.append(continuation)
            elif rank < self.params.width:  # what ranks lower only stood by, so that enough can go on
                self._end(continuation, FinishReason.STOP if is_end else FinishReason.LENGTH)
            if rank + 1 >= self.params.width and (is_last or len(going_on) == self.params.width):
                break
        self._candidates.clear()
        if not going_on or self._is_settled(going_on[0].sum_logprob):
            return None
        seats = self._seats(going_on)
        self.beams = {place: self._beam(continuation) for place, continuation in seats.items()}
        return [
            Move(place, continuation.parent) for place, continuation in seats.items() if place != continuation.parent
        ]

    # ------------------------------------------------------------------ parts

    def _ranked(self) -> list[_Continuation]:
        """Return the continuations of all beams, the most likely first; of equals the one of the lower place."""
        return sorted(self._continuations(), key=lambda each: (-each.sum_logprob, each.parent))

    def _continuations(self) -> Iterator[_Continuation]:
        for place, beam in sorted(self.beams.items()):
            found = self._candidates[place]
            for index, (token_id, score) in enumerate(zip(found.token_ids, found.scores, strict=True)):
                logprobs = found.logprobs[index] if found.logprobs is not None else None
                yield _Continuation(place, token_id, beam.sum_logprob + score, logprobs)

    def _beam(self, continuation: _Continuation) -> Beam:
        parent, logprobs = self.beams[continuation.parent], continuation.logprobs
        return Beam(
            [*parent.token_ids, continuation.token_id],
            continuation.sum_logprob,
            parent.logprobs if logprobs is None else (*parent.logprobs, logprobs),
        )

    def _end(self, continuation: _Continuation, reason: FinishReason) -> None:
        score = self._score(continuation.sum_logprob, self._num_tokens)
        insort(self.ended, EndedBeam(self._beam(continuation), score, reason), key=lambda each: -each.score)
        del self.ended[self.params.width :]

    def _is_settled(self, best_sum_logprob: float) -> bool:
        """Return whether it is over though beams could go on, the best of which has this sum."""
        params = self.params
        if len(self.ended) < params.width:
            return False
        if params.early_stopping is True:
            return True
        is_longest_best = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if is_longest_best else self._num_tokens
        return self._score(best_sum_logprob, length) <= self.ended[-1].score

    def _score(self, sum_logprob: float, num_tokens: int) -> float:
        return sum_logprob / math.pow(num_tokens, self.params.length_penalty)

    def _seats(self, going_on: list[_Continuation]) -> dict[int, _Continuation]:
        """Give each continuation a place: the best one of a beam its own, others those of beams that do not go on."""
        seats: dict[int, _Continuation] = {}
        for continuation in going_on:
            seats.setdefault(continuation.parent, continuation)
        free = (place for place in range(self.params.width) if place not in seats)
        for continuation in going_on:
            if seats[continuation.parent] is not continuation:
                seats[next(free)] = continuation
        return seats


def search_of(source: GenerationRequest, settings: EngineSettings) -> BeamSearch | None:
    """Return the search that a request asks for; none if it samples."""
    sampling = source.sampling
    if sampling.beams is None:
        return None
    max_tokens = min(sampling.max_tokens, settings.max_model_len - len(source.prompt_token_ids))
    return BeamSearch(sampling.beams, max_tokens, sampling.end_token_ids(settings.eos_token_ids))
