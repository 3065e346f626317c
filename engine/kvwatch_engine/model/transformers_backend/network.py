"""Forward pass of a transformers model over packed tokens, in the two parts that the engine calls.

The output layer is computed for the rows that are sampled from only, and what a model does to its logits (scales, soft
caps) is its own code: the model's `forward` runs once more around a base that returns what it is given.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.decoder import LayerAttention, StepAdapters, StepImages
from kvwatch_engine.model.transformers_backend.route import AttentionRoute, AttentionTarget, PagedTarget


@dataclass
class _BaseOutput(ModelOutput):  # type: ignore[misc]  # transformers has no types
    """What a base model returns, with the fields of all kinds of them."""

    last_hidden_state: torch.Tensor | None = None
    cache: None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class _GivenBase(torch.nn.Module):
    """Stands for the base model where its result is known: returns the embeddings that it is given."""

    @property
    def decoder(self) -> "_GivenBase":
        """Itself: OPT asks for the inner one of its base."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _BaseOutput:
        return _BaseOutput(last_hidden_state=inputs_embeds)


class TransformersNetwork:
    """A decoder whose layers are transformers' own modules. Keeps nothing from call to call; see `CausalModel`."""

    can_be_captured = False
    """Its modules may ask tensors for values, which a CUDA graph does not allow."""

    def __init__(self, model: PreTrainedModel, route: AttentionRoute) -> None:
        """Take over a model in evaluation mode.

        Args:
            model: with our implementation of attention.
            route: laid through the model.

        Raises:
            ModelError: it is not made of a base model and an output layer.
        """
        prefix = model.base_model_prefix
        base = model._modules.get(prefix)
        if base is None:
            raise ModelError(f"{type(model).__name__} has no base model {prefix!r} apart from its output layer")
        self.model = model
        self._route = route
        self._base: Callable[..., Any] = base
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, prefix: _GivenBase()}
        weight = next(model.parameters())
        self.dtype = weight.dtype
        self.device = weight.device

    @property
    def num_bytes(self) -> int:
        """Memory that weights and tables take, each counted once."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> torch.Tensor:
        """Run all layers; writes the tokens' keys and values to the cache.

        Args:
            token_ids: i64[num_tokens].
            positions: i64[num_tokens]. Place of each token in its sequence, from 0.
            attention: cache and blocks of this step.
            adapters: none: this path has no adapters.
            images: none: this path sees no images.

        Returns:
            `dtype[num_tokens, hidden_size]`, as the output layer takes them.
        """
        assert adapters is None, "the adapter store of this path refuses all adapters"
        assert images is None, "a model of this path takes no images"
        return self.run(token_ids, positions, PagedTarget(attention))

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, target: AttentionTarget) -> torch.Tensor:
        """Run all layers with any answer to their attention; see `hidden_states`."""
        with self._route.leading_to(target):
            output = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return f32[num_rows, vocab_size], the logits of rows of `hidden_states`.

        Args:
            hidden: `dtype[num_rows, hidden_size]`.
        """
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()
