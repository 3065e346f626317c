"""What the layers of a network ask of attention, found out by asking them: one short forward pass without a cache.

Configurations name the same things in many ways, and some name what their model does not do; the layers' own calls say
what will be computed.
"""

import torch
from transformers import PreTrainedConfig

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.parts import AttentionShape
from kvwatch_engine.model.transformers_backend.network import TransformersNetwork
from kvwatch_engine.model.transformers_backend.route import AttentionCall


class _Recorder:
    """Answers with zeros, and remembers what was asked."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall, query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.calls.append(call)
        return value.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def trace_attention(network: TransformersNetwork, config: PreTrainedConfig) -> AttentionShape:
    """Return the shape of a network's attention.

    Raises:
        ModelError: its layers do not all ask for attention once, or not for what one paged cache can hold.
    """
    recorder = _Recorder()
    network.run(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), recorder)
    calls = sorted(recorder.calls, key=lambda call: call.layer)
    num_layers = int(config.num_hidden_layers)
    if [call.layer for call in calls] != list(range(num_layers)):
        asked = [call.layer for call in calls]
        raise ModelError(
            f"of {num_layers} layers {len(set(asked))} ask for attention, {len(asked)} times in all: only models whose "
            "every layer attends once, to keys and values of its own, are supported"
        )
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) for call in calls}
    if len(shapes) > 1:
        raise ModelError(
            f"its layers have heads of {len(shapes)} shapes, {sorted(shapes)}; blocks of one size need one shape"
        )
    (num_heads, num_kv_heads, head_dim, value_dim) = shapes.pop()
    if value_dim > head_dim:
        raise ModelError(f"its values have {value_dim} elements, its keys {head_dim}: values may not be longer")
    windows = tuple(call.sliding_window for call in calls)
    _check_windows(windows, config)
    return AttentionShape(num_heads, num_kv_heads, head_dim, windows)


def _check_windows(windows: tuple[int | None, ...], config: PreTrainedConfig) -> None:
    """Compare windows with the types of layers in the configuration, after which transformers makes its masks.

    Raises:
        ModelError: they contradict each other.
    """
    named = getattr(config, "sliding_window", None)
    others = sorted({window for window in windows if window is not None} - {named})
    if others:
        raise ModelError(
            f"its layers ask for windows of {others}, but sliding_window is {named}; correct the configuration"
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if (kind == "sliding_attention") != (window is not None):
            raise ModelError(
                f"layer {layer} is of type {kind!r} by its configuration, but asks for a window of {window}; "
                "correct layer_types and sliding_window"
            )
