"""Runs one step: block copies, forward pass, sampling."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from kvwatch_engine.contracts.cache import BlockLayout, KVCacheSpec, KVDtype
from kvwatch_engine.contracts.request import PromptLogprobs
from kvwatch_engine.contracts.step import Int64Array, OperationTimes, StepInput, StepResult
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention, warm_up_attention
from kvwatch_engine.model.decoder import StepAdapters, StepImages
from kvwatch_engine.model.devices import free_bytes
from kvwatch_engine.model.graphs import DeviceForward, idle_step
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.prompt_logprobs import NEVER, PromptScorer
from kvwatch_engine.model.sampler import sample
from kvwatch_engine.model.step_logits import StepLogits
from kvwatch_engine.model.whole_forward import WholeForward
from kvwatch_kernels.forward import Operation

_DEVICE_BLOCK_SIZE = 8
"""What block sizes are multiples of on a GPU."""

_WARM_UP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Numbers of tokens in one step whose matrix products are prepared at start, if they can occur at all."""


class _Forward(NamedTuple):
    """What a forward pass brought."""

    logits: StepLogits
    """Of the tokens that are sampled from."""
    scored: tuple[PromptLogprobs, ...]
    """One for each of the step's scored spans."""
    operations: OperationTimes | None = None
    logits_ns: int | None = None


class ModelRunner:
    """Executes steps of one model where its KV cache lies. Engine thread only; keeps nothing from step to step."""

    def __init__(self, model: LoadedModel, kv_cache: KVCache) -> None:
        """Bind a model to its cache, see `rebind`."""
        self._model = model
        self._places = LayerPlaces(model.info.groups)
        self._scorer = PromptScorer(model.decoder, model.info)
        self._device: DeviceForward | None = None
        self._captured_tokens: int | None = None
        self.rebind(kv_cache)

    @property
    def kv_cache(self) -> KVCache:
        """The cache that steps read and write."""
        return self._kv_cache

    @property
    def runs_whole_steps(self) -> bool:
        """Whether the layers of a step without LoRA adapters run as one call; see `WholeForward`."""
        return self._whole is not None

    def num_calls(self) -> Mapping[Operation, int]:
        """Return how many calls of each kind the layers of a step make; nothing where layers run one by one."""
        return {} if self._whole is None else self._whole.num_calls()

    def rebind(self, kv_cache: KVCache) -> None:
        """Use another cache from the next step on; what the old one holds is not moved.

        On a GPU all captured graphs are dropped, since they read the old cache, and captured anew if they were before.

        Raises:
            ValueError: the cache is not of this model's shape, or on another device.
        """
        if kv_cache.device != self._model.device:
            raise ValueError(
                f"a KV cache on {kv_cache.device} does not fit this model, which is on {self._model.device}"
            )
        expected = self._model.cache_spec(kv_cache.spec.block_size)
        if kv_cache.spec.is_quantised:
            expected = replace(expected, dtype=kv_cache.spec.dtype)
        if kv_cache.spec != expected:
            raise ValueError(f"a KV cache of {kv_cache.spec} does not fit this model, which needs {expected}")
        self._kv_cache = kv_cache
        self._whole = WholeForward.of(self._model.decoder, kv_cache, self._places)
        self._device = None
        if kv_cache.device.type != "cpu":
            self._device = DeviceForward(self._model.decoder, kv_cache, self._model.info)
            if self._captured_tokens is not None:
                self._device.capture(self._captured_tokens)

    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        """Go on with a cache of another size that keeps the content of some blocks; see `BlockMemory`."""
        before = self._kv_cache, self._device
        cache = self._kv_cache.rebuilt(num_blocks, sources, destinations)
        try:
            self.rebind(cache)
        except BaseException:  # graphs could not be captured, for instance
            self._kv_cache, self._device = before
            raise

    def layout(self, block_size: int, kv_dtype: KVDtype) -> BlockLayout:
        """Return how blocks would be laid out; see `BlockMemory`."""
        if self._kv_cache.device.type != "cpu" and block_size % _DEVICE_BLOCK_SIZE:
            raise ValueError(
                f"block_size {block_size} is no multiple of {_DEVICE_BLOCK_SIZE}, as the kernels of a GPU need; "
                "choose one that is"
            )
        spec = self._model.cache_spec(block_size, kv_dtype)
        return BlockLayout(block_size, kv_dtype, spec.dtype, spec.block_bytes)

    def free_bytes(self) -> int:
        """Return how much memory is left on the cache's device."""
        return free_bytes(self._kv_cache.device)

    def relay(self, layout: BlockLayout, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        """Go on with a cache of another block size that keeps the content of some slots; see `BlockMemory`."""
        before = self._kv_cache, self._device
        cache = self._kv_cache.relaid(self._spec_of(layout), num_blocks, sources, destinations)
        try:
            self._warm_up_layout(cache)
            self.rebind(cache)
        except BaseException:
            self._kv_cache, self._device = before
            raise

    def replace(self, layout: BlockLayout, num_blocks: int) -> None:
        """Go on with an empty cache of another layout, once the old one is gone; see `BlockMemory`."""
        spec, old_num_blocks, device = self._kv_cache.spec, self._kv_cache.num_blocks, self._kv_cache.device
        self._device = self._whole = None
        self._kv_cache = KVCache(spec, 2, device)  # nothing refers to the old one any more
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            cache = KVCache(self._spec_of(layout), num_blocks, device)
            self._warm_up_layout(cache)
            self.rebind(cache)
        except BaseException:
            self.rebind(KVCache(spec, old_num_blocks, device))
            raise

    def _spec_of(self, layout: BlockLayout) -> KVCacheSpec:
        return self._model.cache_spec(layout.block_size, layout.kv_dtype)

    def _warm_up_layout(self, cache: KVCache) -> None:
        """Compile the kernels for a layout, if they are not, before a step needs them."""
        if cache.device.type == "cpu":
            self._warm_up_spec(cache.spec)

    def _warm_up_spec(self, spec: KVCacheSpec) -> None:
        info = self._model.info
        warm_up_attention(spec, info.num_heads, getattr(torch, info.dtype))

    def execute(self, step: StepInput) -> StepResult:
        """Carry out a step and choose its tokens.

        Copies come first, then the tokens' keys and values are written and attended to, layer by layer. Logits are
        computed once for each token that is sampled from, however many rows share it.
        """
        started = time.perf_counter_ns()
        if len(step.copy_sources):
            (self._device or self._kv_cache).copy_blocks(step.copy_sources, step.copy_destinations)
        sampled, logits_rows = _distinct(step.sample_indices)
        forward = self._forward(step, sampled)
        forwarded = time.perf_counter_ns()
        samples = sample(forward.logits, step.sample_rows, logits_rows)
        return StepResult(
            token_ids=samples.token_ids,
            logprobs=samples.logprobs,
            forward_ns=forwarded - started,
            sample_ns=time.perf_counter_ns() - forwarded,
            errors=samples.errors,
            candidates=samples.candidates,
            scored=forward.scored,
            operations=forward.operations,
            logits_ns=forward.logits_ns,
        )

    def warm_up(self, max_tokens: int, kv_dtypes: Iterable[KVDtype] = ()) -> None:
        """Do once what would make the first requests slow: compile kernels, prepare products, capture graphs.

        Nothing is written to the cache, whose memory is claimed block by block as it is used.

        Args:
            max_tokens: most tokens of one step.
            kv_dtypes: types that the cache may get later. On a CPU their kernels are compiled now, which takes seconds
                each the first time on a machine: no step could run meanwhile.
        """
        info = self._model.info
        if self._device is not None:
            self._captured_tokens = max_tokens
            self._device.capture(max_tokens)
            return
        spec = self._kv_cache.spec
        self._warm_up_spec(spec)
        for kv_dtype in kv_dtypes:
            self._warm_up_spec(self._model.cache_spec(spec.block_size, kv_dtype))
        for num_tokens in sorted({min(size, max_tokens) for size in _WARM_UP_TOKENS}):
            self._forward(idle_step(num_tokens, len(info.groups)), np.arange(num_tokens, dtype=np.int64))

    @torch.inference_mode()
    def _forward(self, step: StepInput, sampled: Int64Array) -> _Forward:
        """Return the logits of the packed tokens that `sampled` names, and what is wanted of prompts."""
        adapters = self._model.adapters.of_step(step.adapters) if step.adapters else None
        encoder = self._model.images
        images = encoder.of_step(step.images) if encoder is not None and step.images else None
        if self._device is None:
            return self._compute(step, sampled, adapters, images)
        if step.scored:
            logits, scored = self._device.logits_and_scores(step, sampled, self._scorer, adapters, images)
            return _Forward(self._looked_through(logits), scored)
        return _Forward(self._looked_through(self._device.logits(step, sampled, adapters, images)), ())

    def _looked_through(self, logits: torch.Tensor) -> StepLogits:
        """Look through f32[num_sampled, vocab_size]; the placeholder of images is written out of them first."""
        if self._model.images is not None:
            logits[:, self._model.images.input.placeholder_id] = NEVER  # no image would stand behind it
        return StepLogits.of(logits)

    def _compute(
        self, step: StepInput, sampled: Int64Array, adapters: StepAdapters | None, images: StepImages | None
    ) -> _Forward:
        decoder = self._model.decoder
        attention = StepAttention.of_step(self._kv_cache, step, self._places)
        whole, operations = (self._whole if adapters is None else None), None
        if whole is None:
            # torch.tensor copies: it may then not mind that the step's arrays are read-only.
            token_ids, positions = torch.tensor(step.token_ids), torch.tensor(step.positions)
            hidden = decoder.hidden_states(token_ids, positions, attention, adapters, images)
        else:
            whole.run(step.token_ids, step.positions, attention, images)
            operations = whole.operation_times()
            if not step.scored and self._model.images is None and whole.has_logits and len(sampled):
                started = time.perf_counter_ns()
                return _Forward(whole.logits(sampled), (), operations, time.perf_counter_ns() - started)
            hidden = whole.hidden_states()
        scored = self._scorer.score(hidden, step.scored) if step.scored else ()
        started = time.perf_counter_ns()
        logits = self._looked_through(decoder.logits(hidden[torch.tensor(sampled)]))
        return _Forward(logits, scored, operations, time.perf_counter_ns() - started)


def _distinct(indices: Int64Array) -> tuple[Int64Array, list[int]]:
    """Return the different ones of i64[n] in ascending order, and of each of the n which of them it is."""
    if (indices[1:] > indices[:-1]).all():
        return indices, list(range(len(indices)))
    distinct, places = np.unique(indices, return_inverse=True)
    return distinct, places.tolist()
