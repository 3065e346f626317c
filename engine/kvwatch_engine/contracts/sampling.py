"""How the next token of a sequence is chosen."""

from dataclasses import dataclass
from typing import Literal

EarlyStopping = bool | Literal["never"]
"""When a beam search ends that has found `width` ended sequences; see `BeamParams`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search: the `width` most likely beginnings are kept, instead of drawing tokens.

    Meanings are those of transformers' `generate`. The score of an ended sequence is the sum of its tokens'
    log-probabilities over (number of its tokens) to the power of `length_penalty`.
    """

    width: int
    """Beginnings that are kept, and ended sequences."""
    length_penalty: float = 1.0
    """Above 0 favours long sequences, since scores are negative; below 0 short ones."""
    early_stopping: EarlyStopping = False
    """With `width` ended sequences the search is over: True at once; False when the best beginning, if it ended now,
    would not beat the worst of them; `never` when it could not at any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request, already validated by whoever built them.

    The order of application: penalties and `logit_bias` on the logits, `min_tokens` forbids end tokens, temperature,
    then `top_k`, `top_p`, `min_p`. Temperature 0 is greedy. Log-probabilities are those of the model, before all that.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated so far (not those of the prompt)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output."""
    seed: int | None = None
    """The same seed gives the same text; none draws one for the request."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)."""
    logprobs: int | None = None
    """Return the log-probability of each chosen token, and of this many of the most likely ones."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each token of the prompt but the first, and of this many of the most likely ones
    in its place. Nothing of the prompt is then taken from the prefix cache before its log-probabilities are known."""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """End tokens and stop tokens are forbidden until so many tokens were generated."""
    max_tokens: int = 16
    ignore_eos: bool = False
    n: int = 1
    """Sequences generated from the same prompt, or, of a beam search, the best ones that are returned."""
    beams: BeamParams | None = None
    """Search instead of drawing. Then temperature, top_k, top_p, min_p and seed have no meaning; penalties, bias and
    `min_tokens` change log-probabilities instead of logits."""

    @property
    def num_sequences(self) -> int:
        """Sequences that hold blocks at once."""
        return self.n if self.beams is None else self.beams.width

    def end_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that end a sequence, given those of the model."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + eos_token_ids

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
