"""The attention function that transformers' modules call, and the way from a layer to the cache of the step.

transformers calls one function for all models; the module that calls tells which layer of which network it is. Knows
neither blocks nor kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.decoder import LayerAttention

IMPLEMENTATION: Final = "kvwatch-paged"
"""Name of our attention among transformers' implementations. No mask is registered under it, so that none is made."""

_UNSUPPORTED: Final = {
    "s_aux": "attention sinks, which the attention kernels lack",
    "position_bias": "a position bias, which the attention kernels lack",
}
"""Arguments with which models ask for more than scores, window and soft cap."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of attention, beside its tensors."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements of a query and of a key."""
    value_dim: int
    """Elements of a value; at most `head_dim`."""
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class AttentionTarget(Protocol):
    """Whoever answers the layers of a network during one forward pass."""

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, num_heads, value_dim]`.

        Args:
            call: what is asked for.
            query: `[num_tokens, num_heads, head_dim]`.
            key: `[num_tokens, num_kv_heads, head_dim]`.
            value: `[num_tokens, num_kv_heads, value_dim]`.
        """
        ...


class AttentionRoute:
    """Leads the layers of one network to the target of the forward pass that runs. Engine thread only."""

    def __init__(self) -> None:
        self._target: AttentionTarget | None = None

    @property
    def target(self) -> AttentionTarget:
        """Who answers now."""
        assert self._target is not None, "a forward pass runs within `leading_to`"
        return self._target

    @contextmanager
    def leading_to(self, target: AttentionTarget) -> Iterator[None]:
        """Lead to a target for the time of a forward pass."""
        self._target = target
        try:
            yield
        finally:
            self._target = None

    def lay(self, model: PreTrainedModel) -> None:
        """Make the route known to all layers of a model."""
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.paged_route = self


class PagedTarget:
    """Answers with the cache of a step."""

    __slots__ = ("_attention", "_window")

    def __init__(self, attention: LayerAttention, window: int | None = None) -> None:
        """Bind a step.

        Args:
            attention: its cache and blocks.
            window: for layers with a window instead of their own, so that few tokens show it; none leaves them theirs.
        """
        self._attention = attention
        self._window = window

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write keys and values to the cache, and attend to what each query may see; see `AttentionTarget`."""
        missing = call.head_dim - call.value_dim
        # A cache has one head size; what shorter values are padded with adds nothing.
        self._attention.store(call.layer, key, functional.pad(value, (0, missing)) if missing else value)
        window = call.sliding_window if call.sliding_window is None else self._window or call.sliding_window
        attended = self._attention.attend(
            call.layer, query, scale=call.scale, sliding_window=window, soft_cap=call.soft_cap
        )
        return attended.view(query.shape)[..., : call.value_dim]


def paged_attention_forward(  # noqa: PLR0913 - transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' `AttentionInterface` says.

    Args:
        module: the attention layer that calls.
        query: `[1, num_heads, num_tokens, head_dim]`, rotated.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, rotated.
        value: `[1, num_kv_heads, num_tokens, value_dim]`.
        attention_mask: none, since no mask is made under our name.
        scaling: factor of the scores; none is head_dim ** -0.5.
        sliding_window: tokens that a query sees, itself included; none sees all.
        softcap: bound of the scores; none if there is none.
        **more: whatever else a model passes.

    Returns:
        `[1, num_tokens, num_heads, value_dim]`, and no weights.

    Raises:
        ModelError: the model asks for more than the kernels have.
    """
    name = type(module).__name__
    for argument, meaning in _UNSUPPORTED.items():
        if more.get(argument) is not None:
            raise ModelError(f"{name} asks for {meaning}; serve another model")
    if attention_mask is not None:
        raise ModelError(f"{name} brings a mask of its own; only causal attention and windows are supported")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{name} looks ahead: only causal attention is supported")
    route = getattr(module, "paged_route", None)
    if route is None:
        raise ModelError(f"{name} does not say which layer it is; its keys and values would have no place")
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        sliding_window=sliding_window,
        soft_cap=softcap,
    )
    tokens_first = (each[0].transpose(0, 1) for each in (query, key, value))
    return route.target.attend(call, *tokens_first)[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
