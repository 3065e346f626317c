"""The forward pass on a GPU: decode steps replay captured graphs, all others run kernel by kernel.

    step ──stage──► device arrays ──► graph of its bucket, or the decoder ──► logits ──► host
                    (fixed places)    (1, 2, 4, ... sequences, padded)

A decode step launches hundreds of small kernels; replayed as a graph they cost one launch. A graph reads its arrays
where they lay when it was captured, as `StepStaging` promises, and the cache at its address: with another cache all
graphs are void. On a CPU the same code runs without streams, and a "graph" is the decoder itself, which is of use to
tests only.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import numpy as np
import torch

from kvwatch_engine.contracts.block import NULL_BLOCK, PAD_SLOT
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.request import PromptLogprobs
from kvwatch_engine.contracts.step import GroupBlocks, Int64Array, StepInput
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.causal_model import CausalModel
from kvwatch_engine.model.decoder import LayerAttention, StepAdapters, StepImages
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.prompt_logprobs import PromptScorer
from kvwatch_engine.model.staging import StagedStep, StagingSizes, StepStaging

DECODE_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences for which decode steps are captured; a step is padded to the next one. Larger steps are not
captured: with so many rows the kernels outlast their launches."""

_RUNS_BEFORE_CAPTURE: Final = 2
"""Kernels are compiled and libraries allocate their workspaces, neither of which a capture allows."""

Replay = Callable[[], torch.Tensor]
"""Runs a captured step and returns its logits, f32[bucket, vocab_size], which the next run overwrites."""

AttentionFactory = Callable[[KVCache, StagedStep, LayerPlaces, int, int], LayerAttention]
"""Makes the attention of a staged step from the cache, the step, the layers' places, and bounds of its query and
context lengths."""


def decode_buckets(max_seqs: int) -> tuple[int, ...]:
    """Return the buckets that an engine needs whose steps have at most `max_seqs` sequences."""
    smaller = [bucket for bucket in DECODE_BUCKETS if bucket < max_seqs]
    return (*smaller, min(max_seqs, DECODE_BUCKETS[-1])) if max_seqs <= DECODE_BUCKETS[-1] else DECODE_BUCKETS


def bucket_for(num_seqs: int, buckets: tuple[int, ...]) -> int | None:
    """Return the smallest bucket that holds `num_seqs` sequences, None when there is none."""
    index = bisect_left(buckets, num_seqs)
    return buckets[index] if index < len(buckets) else None


class DeviceForward:
    """Forward passes of one decoder over one cache. Engine thread only."""

    def __init__(
        self, decoder: CausalModel, cache: KVCache, model: ModelInfo, attention: AttentionFactory | None = None
    ) -> None:
        """Bind a decoder to a cache on the same device.

        Args:
            decoder: the model.
            cache: read and written by every step.
            model: tells the longest context, and how the layers are divided into KV groups.
            attention: none means the Triton kernels.
        """
        self._decoder = decoder
        self._cache = cache
        self._attention = attention or _triton_attention()
        self._places, self._num_groups = LayerPlaces(model.groups), len(model.groups)
        # A group with a window may have longer tables than the pool has blocks: most entries are null blocks.
        self._max_blocks = -(-model.max_position // cache.spec.block_size)
        if any(group.window is None for group in model.groups):
            self._max_blocks = min(self._max_blocks, cache.num_blocks - 1)
        self._is_cuda = cache.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self._is_cuda:
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
            # Weights and cache may still be on their way there.
            self._stream.wait_stream(torch.cuda.current_stream(cache.device))
        self._staging: StepStaging | None = None
        self._replays: dict[int, Replay] = {}
        self._buckets: tuple[int, ...] = ()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Buckets that are captured now."""
        return self._buckets

    @torch.inference_mode()
    def capture(self, max_tokens: int) -> None:
        """Make room for steps of `max_tokens` tokens, and capture all buckets of decode steps that can occur.

        A model that cannot be captured runs kernel by kernel in every step. Nothing is written to the cache.
        """
        with self._on_stream():
            self._make_room(StagingSizes(max_tokens, max_tokens, self._max_blocks, self._num_groups))
            buckets = decode_buckets(max_tokens) if self._decoder.can_be_captured else ()
            for bucket in reversed(buckets):  # the largest first: the others fit into its memory
                self._replays[bucket] = self._captured(bucket)
            self._buckets = buckets

    def copy_blocks(self, sources: Int64Array, destinations: Int64Array) -> None:
        """Copy whole blocks of the cache before the next step; see `KVCache.copy_blocks`."""
        with self._on_stream():
            self._cache.copy_blocks(sources, destinations)

    @torch.inference_mode()
    def logits(
        self,
        step: StepInput,
        sampled: Int64Array,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> torch.Tensor:
        """Run a step; returns when its logits are there.

        Args:
            step: whatever the scheduler composed.
            sampled: i64[num_sampled], packed tokens whose logits are wanted; none occurs twice.
            adapters: LoRA adapters of this step; none if no token has one.
            images: images of this step; none if no token stands for one.

        Returns:
            f32[num_sampled, vocab_size] on the CPU.
        """
        with self._on_stream():
            staging = self._staging_for(step)
            num_seqs = len(step.context_lens)
            is_captured = step.num_tokens == num_seqs and adapters is None and images is None
            bucket = bucket_for(num_seqs, self._buckets) if is_captured else None
            if bucket is None:
                lengths = int(np.diff(step.query_starts).max()), int(step.context_lens.max())
                return self._to_host(self._forward(staging.stage(step, sampled), *lengths, adapters, images))
            staging.stage(step, sampled, bucket)
            return self._to_host(self._replays[bucket]()[: len(sampled)])

    @torch.inference_mode()
    def logits_and_scores(
        self,
        step: StepInput,
        sampled: Int64Array,
        scorer: PromptScorer,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> tuple[torch.Tensor, tuple[PromptLogprobs, ...]]:
        """Run a step that has scored spans, kernel by kernel: see `logits`, and `PromptScorer` for the rest."""
        with self._on_stream():
            staged = self._staging_for(step).stage(step, sampled)
            lengths = int(np.diff(step.query_starts).max()), int(step.context_lens.max())
            hidden = self._hidden_states(staged, *lengths, adapters, images)
            scored = scorer.score(hidden, step.scored)
            return self._to_host(self._decoder.logits(hidden[staged.sampled])), scored

    def _forward(
        self,
        staged: StagedStep,
        max_query_len: int,
        max_context_len: int,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> torch.Tensor:
        """Return f32[num_sampled, vocab_size] on the device."""
        hidden = self._hidden_states(staged, max_query_len, max_context_len, adapters, images)
        return self._decoder.logits(hidden[staged.sampled])

    def _hidden_states(
        self,
        staged: StagedStep,
        max_query_len: int,
        max_context_len: int,
        adapters: StepAdapters | None,
        images: StepImages | None,
    ) -> torch.Tensor:
        attention = self._attention(self._cache, staged, self._places, max_query_len, max_context_len)
        return self._decoder.hidden_states(staged.token_ids, staged.positions, attention, adapters, images)

    def _captured(self, bucket: int) -> Replay:
        assert self._staging is not None, "there is room before anything is captured"
        staged = self._staging.stage(idle_step(bucket, self._num_groups), np.arange(bucket, dtype=np.int64), bucket)
        # A graph serves steps of any lengths, so it is launched for the longest contexts there can be.
        run = partial(self._forward, staged, 1, self._max_blocks * self._cache.spec.block_size)
        if self._stream is None:
            return run
        for _ in range(_RUNS_BEFORE_CAPTURE):
            run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    def _staging_for(self, step: StepInput) -> StepStaging:
        """Return a staging area with room for the step; a larger one makes all graphs void."""
        if self._staging is None or not self._staging.sizes.holds(step):
            have = self._staging.sizes if self._staging is not None else StagingSizes(0, 0, 0)
            num_seqs = len(step.context_lens)
            num_tokens = max(have.max_tokens, step.num_tokens)
            self._make_room(StagingSizes(num_tokens, max(have.max_seqs, num_seqs), self._max_blocks, self._num_groups))
        assert self._staging is not None, "room was made"
        return self._staging

    def _make_room(self, sizes: StagingSizes) -> None:
        self._replays.clear()
        self._buckets = ()
        self._staging = StepStaging(self._cache.device, sizes)
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None

    def _to_host(self, logits: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return logits.clone()
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()  # waits for this step alone, not for whatever else the device does
        return host

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _triton_attention() -> AttentionFactory:
    from kvwatch_engine.model.device_attention import DeviceAttention  # Triton is optional

    return DeviceAttention


def idle_step(num_tokens: int, num_groups: int = 1) -> StepInput:
    """Return a step of single-token sequences that writes nothing and samples nothing."""
    nothing = GroupBlocks(
        slot_mapping=np.full(num_tokens, PAD_SLOT, dtype=np.int64),
        block_tables=np.full((num_tokens, 1), NULL_BLOCK, dtype=np.int32),
    )
    return StepInput(
        step=0,
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.zeros(num_tokens, dtype=np.int64),
        slot_mapping=nothing.slot_mapping,
        query_starts=np.arange(num_tokens + 1, dtype=np.int32),
        context_lens=np.ones(num_tokens, dtype=np.int32),
        block_tables=nothing.block_tables,
        copy_sources=np.zeros(0, dtype=np.int64),
        copy_destinations=np.zeros(0, dtype=np.int64),
        sample_rows=(),
        sample_indices=np.zeros(0, dtype=np.int64),
        further_groups=(nothing,) * (num_groups - 1),
    )
