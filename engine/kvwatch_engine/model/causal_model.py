"""What the runner needs of a model's layers, whoever computes them."""

from typing import Protocol

import torch

from kvwatch_engine.model.decoder import LayerAttention, StepAdapters, StepImages


class CausalModel(Protocol):
    """A decoder-only language model over packed tokens. Holds no state between calls: the KV cache comes with each."""

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        ...

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph of a step may be replayed for others."""
        ...

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> torch.Tensor:
        """Return `dtype[num_tokens, hidden_size]`; writes the tokens' keys and values to the cache.

        Args:
            token_ids: i64[num_tokens].
            positions: i64[num_tokens]. Place of each token in its sequence, from 0.
            attention: cache and blocks of this step.
            adapters: LoRA adapters of this step; none if no token has one.
            images: images of this step; none if no token stands for one.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return f32[num_rows, vocab_size], the logits of rows of `hidden_states`.

        Args:
            hidden: `dtype[num_rows, hidden_size]`. Only the rows that are sampled from.
        """
        ...
