"""The engine's limits and policies, already validated."""

from dataclasses import dataclass
from typing import Literal

from kvwatch_engine.contracts.cache import KVDtype, KVGroup

PreemptionMode = Literal["recompute", "swap", "auto"]
"""What becomes of the K/V of a request that must yield its blocks; `auto` takes what is cheaper, as measured."""

VictimPolicy = Literal["newest", "least-computed", "lowest-priority"]
"""Which request yields; see `scheduling/victims.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine."""

    num_blocks: int
    """Blocks of the pool, the null block included."""
    block_size: int = 16
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    """KV groups of the model; a sequence takes blocks in each of them."""
    kv_dtype: KVDtype = "auto"
    """Type of the cache; `auto` is the model's."""
    max_model_len: int = 8192
    """Longest sequence in tokens that the model allows; the pool may allow less."""
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_batch_tokens: int = 2048
    """Most tokens in one step."""
    max_prefill_chunk: int | None = None
    """Most tokens of one sequence in one step; none means `max_batch_tokens`."""
    target_itl_seconds: float = 0.0
    """Time within which a step ends that decodes for some and computes prompts of others, but for few of them (see
    `scheduling/step_bound.py`); 0 sets no such bound."""
    max_step_seconds: float = 0.0
    """Time within which every step ends that computes prompts; 0 sets no such bound."""
    watermark_blocks: int = 0
    """Blocks kept free when waiting requests, new or preempted, are admitted beside running ones."""
    reserve_prompt: bool = True
    """Admit a request only when all tokens that it has fit at once; else its first chunk is enough."""
    priority_aging_seconds: float = 30.0
    """A request of priority p has the place of one of priority 0 that arrived p times so much later; 0 never ages."""
    deadline_seconds: float | None = None
    """Time after which every request ends, finished or not, unless it asks for less; none is no limit."""
    preemption_mode: PreemptionMode = "auto"
    """Without tiers everything is recomputed."""
    victim_policy: VictimPolicy = "newest"
    protect_after_preemptions: int = 3
    """A request that was preempted so often yields only when no other of its priority can."""
    watermark_ratio: float | None = None
    """Part of the pool that `watermark_blocks` is, and stays when the pool is resized; none if it is a number."""
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_048_576
    enable_prefix_cache: bool = True
    is_prefix_cache_strict: bool = False
    """Keep the token ids of stored blocks and compare them on a hit."""
    num_pinned_blocks: int = 0
    """Blocks of pinned prefixes, which nobody else can have."""
    max_pinned_ratio: float = 0.5
    """Part of the pool that may be pinned."""
    num_speculative_tokens: int = 0
    """Most tokens of a sequence that are guessed from its own text and verified in one step; 0 guesses none."""
    prompt_lookup_min: int = 2
    """Fewest tokens at the end of a sequence that must occur earlier in it before what followed there is guessed."""
    prompt_lookup_max: int = 4
    """Most tokens that are compared: the longest match is taken."""
    weights_fingerprint: str = ""
    """Part of every block hash: K/V of different weights are never confused."""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 1 << 31
    stall_seconds: float = 30.0
    """A step that takes longer than this makes the engine count as stuck."""
    emit_token_ids: bool = False
    """Tell the token ids of stored blocks to whoever follows the log: they are what users wrote."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each KV group."""
        return tuple(group.window for group in self.groups)

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in one step."""
        return min(self.max_prefill_chunk or self.max_batch_tokens, self.max_batch_tokens)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can have at most: all but the null block and those that are pinned."""
        return self.num_blocks - 1 - self.num_pinned_blocks

    @property
    def max_pinned_blocks(self) -> int:
        """Blocks that may be pinned at most."""
        return int(self.max_pinned_ratio * (self.num_blocks - 1))

    def numbers(self) -> dict[str, float]:
        """Return the settings that are limits or policies, as numbers; what is not set is absent."""
        found: dict[str, float | None] = {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_batch_tokens": self.max_batch_tokens,
            "max_prefill_chunk": self.max_prefill_chunk,
            "target_itl_seconds": self.target_itl_seconds,
            "max_step_seconds": self.max_step_seconds,
            "watermark_blocks": self.watermark_blocks,
            "reserve_prompt": self.reserve_prompt,
            "priority_aging_seconds": self.priority_aging_seconds,
            "deadline_seconds": self.deadline_seconds,
            "protect_after_preemptions": self.protect_after_preemptions,
            "max_queued_requests": self.max_queued_requests,
            "max_queued_tokens": self.max_queued_tokens,
            "prefix_cache": self.enable_prefix_cache,
            "strict_prefix_cache": self.is_prefix_cache_strict,
            "max_pinned_ratio": self.max_pinned_ratio,
            "num_speculative_tokens": self.num_speculative_tokens,
            "stall_seconds": self.stall_seconds,
        }
        return {name: float(value) for name, value in found.items() if value is not None}
