"""All layers of a decoder's forward pass on a CPU as one call.

Layer by layer the same compiled code runs as in the functions of this package, on the same numbers, so results have the
same bits. What is saved is everything between: hundreds of times the interpreter's lock, checks, allocations, and
waking threads.
"""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from kvwatch_kernels.cpu.attention import LAYER_FIELDS, attention_code, has_compiled_attention, set_layer
from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.cpu.call import KernelCall
from kvwatch_kernels.cpu.fields import COUNTERS, FAULT, FAULT_VALUE
from kvwatch_kernels.cpu.fields import NUM_FIELDS as NUM_ATTENTION_FIELDS
from kvwatch_kernels.cpu.gated import gated_call
from kvwatch_kernels.cpu.gather import GATHER_FAULT, GATHER_FAULT_VALUE, GATHER_INDICES, gather_call
from kvwatch_kernels.cpu.linear import PackedWeight, linear_call
from kvwatch_kernels.cpu.linear_body import NUM_ROWS as LINEAR_NUM_ROWS
from kvwatch_kernels.cpu.linear_product import MAX_ROWS, PANEL
from kvwatch_kernels.cpu.program import Program
from kvwatch_kernels.cpu.rms_norm import rms_norm_call
from kvwatch_kernels.cpu.rotary import SLOTS, rotary_calls
from kvwatch_kernels.cpu.rows import AWAKE_ELEMENTS_PER_ITEM, NUM_ROWS
from kvwatch_kernels.cpu.store import STORE_NUM_TOKENS, STORE_SLOTS
from kvwatch_kernels.dims import Int64Array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.paged_attention import AttentionBatch
from kvwatch_kernels.slots import SlotMapping

_STEP_FIELDS = np.setdiff1d(np.arange(NUM_ATTENTION_FIELDS), (*LAYER_FIELDS, COUNTERS))
"""Arguments of an attention call that are those of the step."""
_MANY = 1 << 20
"""Work items where their number is known when the program runs."""


Operation = Literal["linear", "attention", "rotary", "norm", "activation"]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
"""Kinds of calls: matrix products, attention, rotation with the store of keys and values, norms with the residual sums,
gated activations."""
_LOOK_UP = len(OPERATIONS)
"""Kind of calls that look up embeddings and angles; their time is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """What all layers have in common."""

    dtype: torch.dtype
    """Of hidden states: float32 or bfloat16."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of all norms."""
    scale: float
    """Factor of the scores."""
    is_gelu: bool
    """The gated activation is GELU (tanh) instead of SiLU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLayer:
    """One layer: its weights, `T[...]` in the dtype of the shape, and its part of the cache."""

    attention_norm: Tensor
    """T[hidden_size]"""
    qkv: PackedWeight
    qk_norm: Tensor | None
    """T[num_heads + num_kv_heads, head_dim], of each head before the rotation; none for no norm."""
    output: PackedWeight
    attention_output_norm: Tensor | None
    """T[hidden_size], of what attention adds; none for no norm."""
    mlp_norm: Tensor
    """T[hidden_size]"""
    gate_up: PackedWeight
    down: PackedWeight
    mlp_output_norm: Tensor | None
    """T[hidden_size], of what the MLP adds; none for no norm."""
    rotary: int
    """Which of the step's angles it turns by."""
    group: int
    """Which of the step's block tables it sees."""
    sliding_window: int | None
    key_cache: Tensor
    """C[num_blocks, num_kv_heads, block_size, head_dim]"""
    value_cache: Tensor
    key_scales: Tensor | None
    """f32[num_blocks, num_kv_heads, block_size], if C is quantised."""
    value_scales: Tensor | None


def can_run_forward(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether `ForwardProgram` computes in a dtype over a cache of another on this machine."""
    return dtype in COMPILED_DTYPES and has_compiled_attention(dtype, cache_dtype)


def _products(layer: ForwardLayer) -> tuple[PackedWeight, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _attention_call(layer: ForwardLayer) -> KernelCall:
    """A call that lacks everything but its function."""
    function = attention_code(layer.key_cache.dtype).run
    return KernelCall(function, array("q", [0] * NUM_ATTENTION_FIELDS), _MANY)


class ForwardProgram:
    """The layers of one model over one cache, for steps of up to `max_tokens` tokens. One run at a time.

    Its buffers are made once and keep what the last run left in them.
    """

    def __init__(
        self,
        shape: ForwardShape,
        layers: Sequence[ForwardLayer],
        max_tokens: int,
        *,
        angles: Sequence[tuple[Tensor, Tensor]],
        embedding: Tensor | None = None,
    ) -> None:
        """Lay out all calls.

        Args:
            shape: what the layers have in common; `can_run_forward` holds.
            layers: at least one; what they refer to stays where it is as long as the program is used.
            max_tokens: most tokens of a step.
            angles: for each rotary embedding cosine and sine of every position, T[num_positions, head_dim / 2].
            embedding: T[vocab_size, hidden_size]; none where whoever runs the program always writes `hidden`.
        """
        self.shape = shape
        self.max_tokens = max_tokens
        self.num_threads = torch.get_num_threads()
        """Threads that it was laid out for: a run with more has no room."""
        self._layers = tuple(layers)

        def rows(width: int) -> Tensor:
            return torch.empty((max_tokens, width), dtype=shape.dtype)

        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.hidden = rows(shape.hidden_size)
        """T[max_tokens, hidden_size]. Embeddings that the program does not look up itself are written here."""
        self.added = rows(shape.hidden_size)
        """T[max_tokens, hidden_size]. What the last layer's MLP adds to `hidden`: not yet added."""
        self._tables = (embedding, tuple(angles))
        self._angles = tuple((rows(shape.head_dim // 2), rows(shape.head_dim // 2)) for _ in angles)
        self._normed, self._gate_up = rows(shape.hidden_size), rows(2 * shape.intermediate_size)
        self._gated, self._attended = rows(shape.intermediate_size), rows(q_size)
        self._qkv = rows(q_size + 2 * kv_size)
        depth = max(packed.in_features for layer in layers for packed in _products(layer))
        self._scratch = torch.empty((self.num_threads, MAX_ROWS + depth, PANEL), dtype=torch.float32)
        self._no_slots = np.zeros(max_tokens, dtype=np.int64)
        self._calls: list[KernelCall] = []
        self._operations: list[int] = []
        self._counts: dict[int, list[int]] = defaultdict(list)
        self._slots: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._attention: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        self._by_position = [
            self._add_gather(table, out)
            for tables, outs in zip(angles, self._angles, strict=True)
            for table, out in zip(tables, outs, strict=True)
        ]
        self._by_token = None if embedding is None else self._add_gather(embedding, self.hidden)
        for index, layer in enumerate(layers):
            self._add_layer(layer, is_first=index == 0)
        self._program = Program(self._calls, self._operations)
        self._count_places = np.concatenate([self._places(calls, field) for field, calls in self._counts.items()])
        by_token = [] if self._by_token is None else [self._by_token]
        self._position_places = self._places(self._by_position, GATHER_INDICES)
        self._token_place = self._places(by_token, GATHER_INDICES)[0] if by_token else None
        self._token_count_place = self._places(by_token, NUM_ROWS)[0] if by_token else None
        self._gather_faults = self._places([*self._by_position, *by_token], GATHER_FAULT)
        self._slot_places: dict[int, list[Int64Array]] = defaultdict(list)
        for (group, field), calls in self._slots.items():
            self._slot_places[group].append(self._places(calls, field))
        self._step_places = {
            key: self._program.rows(calls, NUM_ATTENTION_FIELDS) for key, calls in self._attention.items()
        }

    def run(
        self,
        batches: Sequence[AttentionBatch],
        slots: Sequence[SlotMapping],
        positions: Int64Array,
        token_ids: Int64Array | None = None,
    ) -> None:
        """Run all layers for a step's tokens; writes their keys and values to the cache.

        Args:
            batches: sequences of each KV group.
            slots: where each KV group's tokens are written.
            positions: i64[1 to max_tokens], contiguous.
            token_ids: like `positions`; none where their embeddings are in the first rows of `hidden`.

        Raises:
            ShapeError: lengths contradict each other, a block id lies outside of the cache, or a token id or position
                has no row in its table.
        """
        num_tokens = len(positions)
        assert num_tokens <= self.max_tokens, "more tokens than the buffers hold"
        assert torch.get_num_threads() <= self.num_threads, "more threads than there is scratch for"
        shape, program = self.shape, self._program
        program.begin()
        params = program.params
        params[self._count_places] = num_tokens
        params[self._position_places] = positions.ctypes.data
        if self._token_place is not None:
            params[self._token_place] = 0 if token_ids is None else token_ids.ctypes.data
            if token_ids is None:
                params[self._token_count_place] = 0
        for group, all_places in self._slot_places.items():
            for places in all_places:
                params[places] = slots[group].slots.ctypes.data
        kept = []
        for (group, window), places in self._step_places.items():
            compiled = batches[group].compiled
            assert compiled is not None, "there is compiled attention for this cache"
            prepared = compiled.prepared(num_tokens, shape.num_heads, shape.dtype.itemsize, window)
            params[places[:, _STEP_FIELDS]] = np.frombuffer(prepared.params, dtype=np.int64)[_STEP_FIELDS]
            counters = np.zeros((len(places), len(prepared.counters)), dtype=np.int64)
            params[places[:, COUNTERS]] = counters.ctypes.data + counters.strides[0] * np.arange(len(places))
            kept.append(counters)
        program.run()
        faults = params[self._gather_faults]
        if faults.any():
            value = int(params[self._gather_faults[int(faults.argmax())] + GATHER_FAULT_VALUE - GATHER_FAULT])
            raise ShapeError(f"a token's id or position is {value}: its table has no such row")
        for (group, _), places in self._step_places.items():
            faults = params[places[:, FAULT]]
            if faults.any():
                first = int(np.flatnonzero(faults)[0])
                compiled = batches[group].compiled
                assert compiled is not None, "as before the run"
                compiled.check_fault(int(faults[first]), int(params[places[first, FAULT_VALUE]]), num_tokens)

    def durations_ns(self) -> dict[Operation, int] | None:
        """Return what each kind of operation took in the last run; none where the processor has no clock to read."""
        durations = self._program.durations_ns()
        return None if durations is None else dict(zip(OPERATIONS, durations[: len(OPERATIONS)], strict=True))

    def num_calls(self) -> dict[Operation, int]:
        """Return how many calls of each kind a run makes."""
        return {operation: self._operations.count(index) for index, operation in enumerate(OPERATIONS)}

    # ------------------------------------------------------------------ layout

    def _places(self, calls: list[int], field: int) -> Int64Array:
        places: Int64Array = self._program.rows(calls, field + 1)[:, field]
        return places

    def _add(self, operation: Operation, call: KernelCall, count_field: int) -> int:
        """Add a call whose argument `count_field` is the number of tokens; return its index."""
        self._calls.append(call)
        self._operations.append(OPERATIONS.index(operation))
        index = len(self._calls) - 1
        self._counts[count_field].append(index)
        return index

    def _add_gather(self, table: Tensor, out: Tensor) -> int:
        """Add a look-up in a table; return its index."""
        self._calls.append(gather_call(table, out))
        self._operations.append(_LOOK_UP)
        self._counts[NUM_ROWS].append(len(self._calls) - 1)
        return len(self._calls) - 1

    def _add_norm(self, x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor) -> None:
        self._add("norm", rms_norm_call(x, weight, self.shape.eps, added, out, AWAKE_ELEMENTS_PER_ITEM), NUM_ROWS)

    def _add_linear(self, x: Tensor, packed: PackedWeight, out: Tensor) -> None:
        self._add("linear", linear_call(x, x.stride(0), packed, out, self.max_tokens, self._scratch), LINEAR_NUM_ROWS)

    def _add_layer(self, layer: ForwardLayer, *, is_first: bool) -> None:
        self._add_norm(self.hidden, layer.attention_norm, None if is_first else self.added, self._normed)
        self._add_linear(self._normed, layer.qkv, self._qkv)
        self._add_attention(layer)
        self._add_linear(self._attended, layer.output, self.added)
        if layer.attention_output_norm is not None:
            self._add_norm(self.added, layer.attention_output_norm, None, self.added)
        self._add_norm(self.hidden, layer.mlp_norm, self.added, self._normed)
        self._add_linear(self._normed, layer.gate_up, self._gate_up)
        is_gelu = self.shape.is_gelu
        gated = gated_call(self._gate_up, self._gated, is_gelu=is_gelu, elements_per_item=AWAKE_ELEMENTS_PER_ITEM)
        self._add("activation", gated, NUM_ROWS)
        self._add_linear(self._gated, layer.down, self.added)
        if layer.mlp_output_norm is not None:
            self._add_norm(self.added, layer.mlp_output_norm, None, self.added)

    def _add_attention(self, layer: ForwardLayer) -> None:
        shape = self.shape
        qkv = self._qkv.view(self.max_tokens, -1, shape.head_dim)
        cosine, sine = self._angles[layer.rotary]
        rotary = rotary_calls(
            qkv,
            cosine,
            sine,
            layer.key_cache,
            layer.value_cache,
            self._no_slots,
            norm_weight=layer.qk_norm,
            eps=shape.eps,
            key_scales=layer.key_scales,
            value_scales=layer.value_scales,
            elements_per_item=AWAKE_ELEMENTS_PER_ITEM,
        )
        self._slots[layer.group, SLOTS].append(self._add("rotary", rotary.rotate, NUM_ROWS))
        if rotary.store is not None:
            self._slots[layer.group, STORE_SLOTS].append(self._add("rotary", rotary.store, STORE_NUM_TOKENS))
        call = _attention_call(layer)
        set_layer(
            call.params,
            qkv[:, : shape.num_heads],
            layer.key_cache,
            layer.value_cache,
            scale=shape.scale,
            soft_cap=None,
            alibi_slopes=None,
            key_scales=layer.key_scales,
            value_scales=layer.value_scales,
            out=self._attended.view(self.max_tokens, shape.num_heads, shape.head_dim),
        )
        self._calls.append(call)
        self._operations.append(OPERATIONS.index("attention"))
        self._attention[layer.group, layer.sliding_window].append(len(self._calls) - 1)
