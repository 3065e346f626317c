"""Carries a beam search out on its request's sequences: beams fork, others give up their way, all end together.

A request's sequences are the places of its search. A beam that goes on from another one's place shares that one's
blocks by reference; the partial block is copied when one of them writes to it. Engine thread only.
"""

from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.scheduling.beam_search import BeamSearch, EndedBeam
from kvwatch_engine.scheduling.lifecycle import Lifecycle
from kvwatch_engine.scheduling.request import Request


class BeamGroups:
    """Enters what steps bring for beams."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def advance(self, request: Request, search: BeamSearch) -> list[SequenceOutput]:
        """Take a step of a search that has all candidates; return what its caller is told: nothing until it is over."""
        beams = [request.sequences[place] for place in search.beams]
        assert all(each.num_computed == each.num_tokens for each in beams), "candidates of blocks that were lost"
        moves = search.advance()
        if moves is None:
            return self._finish(request, search.ended)
        for move in moves:
            self._lifecycle.go_on_from(request.sequences[move.place], request.sequences[move.parent])
        for place, beam in search.beams.items():
            request.sequences[place].output_token_ids = beam.token_ids
        return []

    def _finish(self, request: Request, ended: list[EndedBeam]) -> list[SequenceOutput]:
        """End all sequences; those that are returned become the best that were found."""
        found = ended[: request.sampling.n]
        for place, sequence in enumerate(request.sequences):
            sequence.output_token_ids = found[place].beam.token_ids if place < len(found) else []
        for sequence in request.sequences:
            reason = found[min(sequence.index, len(found) - 1)].reason
            self._lifecycle.finish_sequence(sequence, reason)
        return [
            SequenceOutput(
                request_id=request.request_id,
                sequence=place,
                token_ids=tuple(each.beam.token_ids),
                logprobs=each.beam.logprobs,
                finish_reason=each.reason,
                is_stop_token=each.reason is FinishReason.STOP,
                num_cached_tokens=request.num_cached_tokens,
                score=each.score,
            )
            for place, each in enumerate(found)
        ]
