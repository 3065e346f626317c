"""What LoRA adapters compute: y += B (A x), each adapter for its own tokens of a step.

The base model's layers are fused, an adapter's are not: queries, keys and values have an A and a B each. Their A lie
one under the other, so that a fused layer needs one product with x; each B adds to its own part of the output. Scaling
is multiplied into B when an adapter is loaded. Knows nothing of files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvwatch_engine.model.decoder import LayerWeights, LinearLayer, LinearName
from kvwatch_engine.model.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Projection:
    """One of the layers that an adapter knows, and its place in the fused one."""

    module: str
    """Its name within a layer, as checkpoints have it."""
    fused: LinearName
    in_features: int
    out_features: int
    first_output: int
    """Place of its first output among the fused layer's."""


def projections(config: DecoderConfig) -> tuple[Projection, ...]:
    """Return what an adapter may change in each layer of a model, in the order in which layers are fused."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        Projection("self_attn.q_proj", "qkv", hidden, queries, 0),
        Projection("self_attn.k_proj", "qkv", hidden, keys, queries),
        Projection("self_attn.v_proj", "qkv", hidden, keys, queries + keys),
        Projection("self_attn.o_proj", "output", queries, hidden, 0),
        Projection("mlp.gate_proj", "gate_up", hidden, intermediate, 0),
        Projection("mlp.up_proj", "gate_up", hidden, intermediate, intermediate),
        Projection("mlp.down_proj", "down", intermediate, hidden, 0),
    )


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter's two matrices for one projection."""

    projection: Projection
    a: torch.Tensor
    """`dtype[rank, in_features]`"""
    b: torch.Tensor
    """`dtype[out_features, rank]`, scaled."""


class LoraLinear:
    """What an adapter adds to one fused layer."""

    __slots__ = ("_a", "_parts", "num_bytes")

    def __init__(self, modules: Sequence[LoraModule]) -> None:
        """Put the modules of one fused layer together; at least one."""
        self._a = torch.cat([module.a for module in modules])
        self._parts: list[tuple[slice, slice, torch.Tensor]] = []
        self.num_bytes = self._a.nbytes
        rank = 0
        for module in modules:
            first, num_outputs = module.projection.first_output, module.projection.out_features
            ranks = slice(rank, rank := rank + len(module.a))
            self._parts.append((ranks, slice(first, first + num_outputs), module.b.T.contiguous()))
            self.num_bytes += module.b.nbytes

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to `y`, `dtype[num_tokens, out_features]`, what it makes of `x`, `dtype[num_tokens, in_features]`."""
        inner = x @ self._a.T
        for ranks, outputs, b in self._parts:
            y[:, outputs].addmm_(inner[:, ranks], b)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter's weights; immutable."""

    layers: tuple[Mapping[LinearName, LoraLinear], ...]
    """Of each layer: the fused layers that it changes."""
    num_bytes: int
    rank: int
    """The highest rank of its modules."""
    fingerprint: str
    """Changes whenever a byte of its files does."""


class _AdaptedLinear:
    """A layer of the base model, and what adapters add to it, each for its own tokens."""

    __slots__ = ("_added", "_base")

    def __init__(self, base: LinearLayer, added: Sequence[tuple[slice, LoraLinear]]) -> None:
        self._base = base
        self._added = added

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._base(x)
        for tokens, linear in self._added:
            linear.add(x[tokens], y[tokens])
        return y


class LoraStep:
    """The adapters of one step; implements `StepAdapters`. Engine thread only."""

    def __init__(self, spans: Sequence[tuple[slice, LoraWeights]]) -> None:
        """Take the adapters with the packed tokens that each acts on."""
        self._spans = spans

    def adapted(self, layers: tuple[LayerWeights, ...]) -> tuple[LayerWeights, ...]:
        """Return the layers as they compute in this step."""
        return tuple(self._adapted(index, layer) for index, layer in enumerate(layers))

    def _adapted(self, index: int, layer: LayerWeights) -> LayerWeights:
        return replace(
            layer,
            qkv=self._linear(index, "qkv", layer.qkv),
            output=self._linear(index, "output", layer.output),
            gate_up=self._linear(index, "gate_up", layer.gate_up),
            down=self._linear(index, "down", layer.down),
        )

    def _linear(self, index: int, name: LinearName, base: LinearLayer) -> LinearLayer:
        added = [
            (tokens, linear)
            for tokens, weights in self._spans
            if (linear := weights.layers[index].get(name)) is not None
        ]
        return _AdaptedLinear(base, added) if added else base
