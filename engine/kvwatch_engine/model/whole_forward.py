"""The lean decoder's layers on a CPU as one call of compiled code, where that is possible.

The same kernels run in the same order as in `Decoder.hidden_states`, so hidden states have the same bits. A step whose
tokens have LoRA adapters is not of this kind: its layers differ from token to token.
"""

from typing import Self

import torch

from kvwatch_engine.contracts.step import OperationTimes
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.causal_model import CausalModel
from kvwatch_engine.model.decoder import Decoder, LayerWeights, LinearLayer, StepImages
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.layer_caches import LayerCaches
from kvwatch_engine.model.linear import Linear
from kvwatch_kernels.forward import ForwardLayer, ForwardProgram, ForwardShape, Operation, can_run_forward
from kvwatch_kernels.linear import PackedWeight

_LEAST_TOKENS = 64
"""Tokens that buffers have room for at least."""


class WholeForward:
    """Forward passes of one decoder over one cache. Engine thread only; buffers grow with the largest step so far."""

    def __init__(self, decoder: Decoder, cache: KVCache, places: LayerPlaces) -> None:
        """Bind a decoder to a cache; `of` says whether that is possible."""
        self._decoder = decoder
        self._layers = LayerCaches(cache, places)
        self._program: ForwardProgram | None = None

    @classmethod
    def of(cls, model: CausalModel, cache: KVCache, places: LayerPlaces) -> Self | None:
        """Return the forward pass of a model over a cache, none where it must be computed layer by layer."""
        if not isinstance(model, Decoder) or cache.device.type != "cpu":
            return None
        if not can_run_forward(model.dtype, getattr(torch, cache.spec.dtype)):
            return None
        if not all(map(_is_packed, model.weights.layers)):
            return None
        return cls(model, cache, places)

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        images: StepImages | None = None,
    ) -> torch.Tensor:
        """Run all layers; see `Decoder.hidden_states`.

        Returns:
            `dtype[num_tokens, hidden_size]`, a buffer that the next call overwrites.
        """
        num_tokens, decoder = len(token_ids), self._decoder
        program = self._program_for(num_tokens)
        hidden = program.hidden[:num_tokens]
        hidden.copy_(decoder.embeddings(token_ids))
        if images is not None:
            images.put_into(hidden)
        for rotary, (cosine, sine) in zip(decoder.rotaries, program.angles, strict=True):
            cosines, sines = rotary.angles(positions, decoder.dtype)
            cosine[:num_tokens], sine[:num_tokens] = cosines, sines
        program.run(attention.batches, attention.slots, num_tokens)
        return hidden.add_(program.added[:num_tokens])

    def operation_times(self) -> OperationTimes | None:
        """Return what each kind of operation took in the last call; none where the processor has no clock to read."""
        assert self._program is not None, "something was computed"
        times = self._program.durations_ns()
        if times is None:
            return None
        return OperationTimes(times["linear"], times["attention"], times["rotary"], times["norm"], times["activation"])

    def num_calls(self) -> dict[Operation, int]:
        """Return how many calls of each kind a step makes."""
        assert self._program is not None, "something was computed"
        return self._program.num_calls()

    def _program_for(self, num_tokens: int) -> ForwardProgram:
        program = self._program
        if program is not None and program.max_tokens >= num_tokens and program.num_threads >= torch.get_num_threads():
            return program
        self._program = None  # its buffers go before larger ones come
        self._program = self._laid_out(1 << (max(num_tokens, _LEAST_TOKENS) - 1).bit_length())
        return self._program

    def _laid_out(self, max_tokens: int) -> ForwardProgram:
        config, weights = self._decoder.config, self._decoder.weights
        shape = ForwardShape(
            dtype=self._decoder.dtype,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            is_gelu=config.activation != "silu",
        )
        layers = [self._layer(index, layer) for index, layer in enumerate(weights.layers)]
        return ForwardProgram(shape, layers, max_tokens, len(self._decoder.rotaries))

    def _layer(self, index: int, weights: LayerWeights) -> ForwardLayer:
        group, (key_cache, value_cache), scales = self._layers.of(index)
        return ForwardLayer(
            attention_norm=weights.attention_norm,
            qkv=_packed(weights.qkv),
            qk_norm=weights.qk_norm,
            output=_packed(weights.output),
            attention_output_norm=weights.attention_output_norm,
            mlp_norm=weights.mlp_norm,
            gate_up=_packed(weights.gate_up),
            down=_packed(weights.down),
            mlp_output_norm=weights.mlp_output_norm,
            rotary=self._decoder.rotary_of_layer[index],
            group=group,
            sliding_window=self._decoder.config.sliding_windows[index],
            key_cache=key_cache,
            value_cache=value_cache,
            **scales,
        )


def _is_packed(layer: LayerWeights) -> bool:
    products = layer.qkv, layer.output, layer.gate_up, layer.down
    return all(isinstance(each, Linear) and each.packed is not None for each in products)


def _packed(layer: LinearLayer) -> PackedWeight:
    assert isinstance(layer, Linear), "`of` has looked"
    assert layer.packed is not None, "`of` has looked"
    return layer.packed
