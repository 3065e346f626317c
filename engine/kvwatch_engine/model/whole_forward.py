"""The lean decoder's layers on a CPU as one call of compiled code, where that is possible.

The same kernels run in the same order as in `Decoder.hidden_states`, so hidden states have the same bits. A step whose
tokens have LoRA adapters is not of this kind: its layers differ from token to token.
"""

from typing import Self

import torch

from kvwatch_engine.contracts.step import Int64Array, OperationTimes
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.causal_model import CausalModel
from kvwatch_engine.model.decoder import Decoder, LayerWeights, LinearLayer, StepImages
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.layer_caches import LayerCaches
from kvwatch_engine.model.linear import Linear
from kvwatch_engine.model.step_logits import StepLogits
from kvwatch_kernels.forward import ForwardLayer, ForwardProgram, ForwardShape, Operation, can_run_forward
from kvwatch_kernels.linear import PackedWeight
from kvwatch_kernels.output import OutputProgram, can_run_output

_LEAST_TOKENS = 64
"""Tokens that buffers have room for at least."""
_LEAST_ROWS = 16
"""Tokens whose logits buffers have room for at least."""
_LEAST_POSITIONS = 4096
"""Positions whose angles are computed at least."""


class WholeForward:
    """Forward passes of one decoder over one cache. Engine thread only; buffers grow with the largest step so far."""

    def __init__(self, decoder: Decoder, cache: KVCache, places: LayerPlaces) -> None:
        """Bind a decoder to a cache; `of` says whether that is possible."""
        self._decoder = decoder
        self._layers = LayerCaches(cache, places)
        self._program: ForwardProgram | None = None
        self._output: OutputProgram | None = None
        self._num_tokens = 0
        self._angles: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_positions = 0
        self._looks_up = decoder.looks_embeddings_up

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

    def run(
        self,
        token_ids: Int64Array,
        positions: Int64Array,
        attention: StepAttention,
        images: StepImages | None = None,
    ) -> None:
        """Run all layers, see `Decoder.hidden_states`; writes the tokens' keys and values to the cache."""
        num_tokens = self._num_tokens = len(token_ids)
        program = self._program_for(num_tokens, int(positions.max()) + 1)
        looks_up = images is None and self._looks_up
        if not looks_up:
            hidden = program.hidden[:num_tokens]
            # torch.tensor copies: it may then not mind that the step's arrays are read-only.
            hidden.copy_(self._decoder.embeddings(torch.tensor(token_ids)))
            if images is not None:
                images.put_into(hidden)
        program.run(attention.batches, attention.slots, positions, token_ids if looks_up else None)

    def hidden_states(self) -> torch.Tensor:
        """Return the last run's `dtype[num_tokens, hidden_size]`; the next one overwrites it. Call it once."""
        assert self._program is not None, "something was computed"
        return self._program.hidden[: self._num_tokens].add_(self._program.added[: self._num_tokens])

    @property
    def has_logits(self) -> bool:
        """Whether `logits` can be called."""
        packed = self._decoder.weights.logits.packed
        return packed is not None and can_run_output(packed)

    def logits(self, sampled: Int64Array) -> StepLogits:
        """Return the logits of tokens of the last run; they are gone with the next one. Instead of `hidden_states`.

        Args:
            sampled: i64[at least 1], packed tokens.
        """
        output = self._output_for(len(sampled))
        output.run(sampled)
        count = len(sampled)
        return StepLogits(output.logits[:count], output.best[:count], output.are_finite[:count])

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

    def _program_for(self, num_tokens: int, num_positions: int) -> ForwardProgram:
        program, most_threads = self._program, torch.get_num_threads()
        is_roomy = program is not None and program.max_tokens >= num_tokens and program.num_threads >= most_threads
        if program is not None and is_roomy and self._num_positions >= num_positions:
            return program
        self._program = self._output = None  # buffers go before larger ones come
        if num_positions > self._num_positions:
            self._num_positions = _power_of_two(max(num_positions, _LEAST_POSITIONS))
            positions, dtype = torch.arange(self._num_positions), self._decoder.dtype
            self._angles = [rotary.angles(positions, dtype) for rotary in self._decoder.rotaries]
        self._program = self._laid_out(_power_of_two(max(num_tokens, _LEAST_TOKENS)))
        return self._program

    def _output_for(self, num_rows: int) -> OutputProgram:
        output, program = self._output, self._program
        assert program is not None, "something was computed"
        if output is not None and output.max_rows >= num_rows and output.num_threads >= torch.get_num_threads():
            return output
        self._output = None
        weights, packed = self._decoder.weights, self._decoder.weights.logits.packed
        assert packed is not None, "`has_logits` was asked"
        eps, most_rows = self._decoder.config.rms_norm_eps, _power_of_two(max(num_rows, _LEAST_ROWS))
        self._output = OutputProgram(program.hidden, program.added, weights.norm, eps, packed, most_rows)
        return self._output

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
        embedding = weights.embedding if self._looks_up else None
        return ForwardProgram(shape, layers, max_tokens, angles=self._angles, embedding=embedding)

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


def _power_of_two(number: int) -> int:
    """Return the smallest one that is not below a number."""
    return 1 << (number - 1).bit_length()
