"""Every metric: name, meaning, unit, labels, when it moves, how to aggregate it, what to do about it.

Events name the counters and histograms that they feed; gauges are read from the ledger's view or from kvwatch itself.
Exporters, docs/metrics.md and dashboards are derived from this page.
"""

from kvwatch.telemetry.buckets import (
    BATCH,
    BLOCKS,
    GHOST_BLOCKS,
    ITL_SECONDS,
    PREEMPTION_SECONDS,
    REBUILD_SECONDS,
    REQUEST_SECONDS,
    RESIDENCY_SECONDS,
    STEP_SECONDS,
    TOKENS,
    TRANSFER_SECONDS,
    TTFT_SECONDS,
)
from kvwatch.telemetry.schema import Metric, MetricKind


def _counter(name: str, brief: str, unit: str = "1", labels: tuple[str, ...] = (), **more: str) -> Metric:
    return Metric(MetricKind.COUNTER, name, brief, unit, labels, **more)  # type: ignore[arg-type]


def _gauge(name: str, brief: str, unit: str = "1", labels: tuple[str, ...] = (), **more: str) -> Metric:
    return Metric(MetricKind.GAUGE, name, brief, unit, labels, **more)  # type: ignore[arg-type]


def _histogram(
    name: str, brief: str, unit: str, buckets: tuple[float, ...], labels: tuple[str, ...] = (), **more: str
) -> Metric:
    return Metric(MetricKind.HISTOGRAM, name, brief, unit, labels, buckets, **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------- pool gauges (from the ledger's view)
KV_BLOCK_CAPACITY = _gauge(
    "kv_block_capacity", "Blocks of the pool, the null block left out.", "blocks", ("tier",),
    moves="When the pool is built or resized.",
    action="Compare with kv_blocks: capacity = empty + used + cached, always.",
)  # fmt: skip
KV_BLOCKS = _gauge(
    "kv_blocks", "Blocks by state: used by a live sequence, cached (free, content kept), empty.", "blocks",
    ("tier", "group", "state"),
    moves="At every allocation, release, store and eviction.",
    action="Many cached blocks are good (they are free memory that may still save work). Used near capacity means pressure.",
)  # fmt: skip
KV_FREE_BLOCKS = _gauge(
    "kv_free_blocks", "Blocks that can be allocated now: cached + empty, less what is pinned of the cached ones.", "blocks", ("tier",),
    moves="With kv_blocks.", action="Near kv_watermark_blocks: new requests wait.",
)  # fmt: skip
KV_USAGE_RATIO = _gauge(
    "kv_usage_ratio", "Used blocks divided by capacity.", "ratio", ("tier",),
    moves="With kv_blocks.", aggregate="sum of used divided by sum of capacity; never an average of ratios",
    action="Sustained above 0.9: expect preemptions; add memory or lower concurrency.",
)  # fmt: skip
KV_FREE_BLOCKS_MIN = _gauge(
    "kv_free_blocks_min", "Fewest free blocks at any moment of the window, however short; absent until a window was seen.",
    "blocks", ("tier", "window"), moves="At every step, and when the window moves on.", aggregate="min",
    action="0 while kv_free_blocks looks comfortable: bursts between scrapes exhaust the pool.",
)  # fmt: skip
KV_USAGE_RATIO_MAX = _gauge(
    "kv_usage_ratio_max",
    "Highest usage at any moment of the window, pinned blocks included; absent until a window was seen.", "ratio",
    ("tier", "window"), moves="With kv_free_blocks_min.", aggregate="max",
    action="Judge capacity by this, not by what a scrape happens to see.",
)  # fmt: skip
KV_TOKEN_CAPACITY = _gauge(
    "kv_token_capacity", "Tokens that fit the pool if one KV group has all of it.", "tokens", ("tier", "group"),
    moves="When the pool is built or resized.", action="With one KV group, the longest request that can ever run.",
)  # fmt: skip
KV_HELD_SLOTS = _gauge(
    "kv_held_slots", "Slots of used blocks but those that are being written by a transfer between tiers.", "tokens",
    ("tier", "group"), moves="With allocations, releases and ends of transfers.", action="See kv_waste_ratio.",
)  # fmt: skip
KV_FILLED_SLOTS = _gauge(
    "kv_filled_slots", "Slots of used blocks that hold K/V.", "tokens", ("tier", "group"),
    moves="At every step.", action="See kv_waste_ratio.",
)  # fmt: skip
KV_WASTE_RATIO = _gauge(
    "kv_waste_ratio",
    "Part of the held slots that holds no token (1 - filled/held); 0 while nothing is held. A block that a transfer writes"
    " is no waste: it counts when it has arrived.", "ratio",
    ("tier", "group"), moves="At every step.", aggregate="1 - sum of filled / sum of held",
    action="High with short requests and large blocks: choose a smaller block size.",
)  # fmt: skip
KV_SHARED_BLOCKS = _gauge(
    "kv_shared_blocks", "Used blocks that are in more than one block table.", "blocks", ("tier", "group"),
    moves="On prefix hits, forks and copy-on-write.", action="Zero with a common system prompt: is the prefix cache on?",
)  # fmt: skip
KV_SHARING_SAVED_BLOCKS = _gauge(
    "kv_sharing_saved_blocks", "Blocks saved by sharing: table entries minus distinct used blocks.", "blocks",
    ("tier", "group"), moves="With kv_shared_blocks.", action="What sharing is worth right now.",
)  # fmt: skip
KV_WATERMARK_BLOCKS = _gauge(
    "kv_watermark_blocks", "Blocks kept free when waiting requests are admitted.", "blocks", ("tier",),
    moves="When configured.", action="Raise it when preemptions are frequent.",
)  # fmt: skip
KV_PINNED_BLOCKS = _gauge(
    "kv_pinned_blocks", "Blocks of pinned prefixes, used or cached: they are not evicted.", "blocks", ("tier",),
    moves="When a prefix is pinned or unpinned.",
    action="Those that nobody uses are cached and not free: the pool is smaller by them for everybody else.",
)  # fmt: skip
KV_BLOCK_SIZE_TOKENS = _gauge(
    "kv_block_size_tokens", "Tokens in one block.", "tokens", moves="When the pool is built.", aggregate="max",
    action="Turns blocks into tokens in queries.",
)  # fmt: skip
KV_BLOCK_BYTES = _gauge(
    "kv_block_bytes", "Bytes of one block over all layers of its group.", "bytes", moves="When the pool is built.",
    aggregate="max", action="Turns blocks into bytes in queries.",
)  # fmt: skip
KV_ORPHANED_BLOCKS = _gauge(
    "kv_orphaned_blocks", "Used blocks that no live request holds; 0 unless there is a leak.", "blocks", ("tier",),
    moves="Never, in a healthy engine.", action="Not 0: a defect; keep a snapshot and report it.",
)  # fmt: skip

DEVICE_MEMORY_BYTES = _gauge(
    "device_memory_bytes", "Memory of the device by what it is for; absent where it is not known.", "bytes", ("kind",),
    moves="When the model or an adapter is loaded or the pool is built.", action="kv against the rest: what a larger pool could take.",
)  # fmt: skip

# ---------------------------------------------------------------- pool counters and histograms
KV_BLOCK_ALLOCATIONS = _counter(
    "kv_block_allocations", "Blocks taken from the pool.", "blocks", ("tier", "reason"),
    moves="When a sequence grows, is admitted, or copies a shared block.", action="Its rate is the pool's churn.",
)  # fmt: skip
KV_BLOCK_RELEASES = _counter(
    "kv_block_releases", "Table entries given up (a shared block counts once for each owner).", "blocks",
    ("tier", "reason"), moves="When sequences end or are preempted.", action="reason=preempted shows work thrown away.",
)  # fmt: skip
KV_BLOCK_STORES = _counter(
    "kv_block_stores", "Blocks that became full and can be found under their hash.", "blocks", ("tier",),
    moves="When a block is filled; in a foreign engine when a hash becomes resident.",
    action="With kv_block_evictions: how fast the cache's content changes.",
)  # fmt: skip
KV_BLOCK_EVICTIONS = _counter(
    "kv_block_evictions", "Cached blocks whose content was dropped.", "blocks", ("tier", "reason"),
    moves="When an allocation finds no empty block, or on a reset.",
    action="Harmless churn unless prefix_cache_regretted_tokens or recomputation follow.",
)  # fmt: skip
KV_BLOCK_COPIES = _counter(
    "kv_block_copies", "Blocks copied before a shared block was written.", "blocks", ("tier",),
    moves="With n > 1: once for each sequence but the last owner; of beams whenever several go on from one.",
    action="Expected; large only with many parallel samples, or with beams.",
)  # fmt: skip
KV_ALLOCATION_FAILURES = _counter(
    "kv_allocation_failures", "Times a sequence asked for blocks and the pool had too few; the head of the queue asks in each step.", "1", ("reason",),
    moves="Before each preemption and whenever an admission waits for blocks.", action="The pool is too small for the load.",
)  # fmt: skip
KV_STALL_SECONDS = _counter(
    "kv_stall_seconds", "Time during which at least one request waited for blocks.", "seconds",
    moves="While requests wait with reason=blocks.", aggregate="sum", action="What more memory would buy, in seconds.",
)  # fmt: skip
KV_BLOCK_LIFETIME = _histogram(
    "kv_block_lifetime_seconds", "Age of a cached block at its eviction, since it was allocated.", "seconds",
    RESIDENCY_SECONDS, moves="On evictions.", action="Short lifetimes: the cache is too small for its prefixes.",
)  # fmt: skip
KV_BLOCK_IDLE = _histogram(
    "kv_block_idle_before_eviction_seconds", "Time from a block's last use to its eviction.", "seconds",
    RESIDENCY_SECONDS, moves="On evictions.", action="Short idle times: blocks are evicted while still warm.",
)  # fmt: skip
KV_BLOCK_REUSE_GAP = _histogram(
    "kv_block_reuse_gap_seconds", "Time between a cached block's release and its reuse.", "seconds",
    RESIDENCY_SECONDS, moves="On prefix hits of free blocks.", action="Gaps longer than idle times: a larger pool would hit more.",
)  # fmt: skip
REQUEST_KV_BLOCKS = _histogram(
    "request_kv_blocks", "Most blocks that a request held at once.", "blocks", BLOCKS, moves="When a request ends.",
    action="Capacity divided by its mean is the concurrency that fits.",
)  # fmt: skip

# ---------------------------------------------------------------- prefix cache (all in tokens)
PREFIX_CACHE_QUERIED_TOKENS = _counter(
    "prefix_cache_queried_tokens", "Prompt tokens looked up, once for each request at its first admission.", "tokens",
    moves="At admission.", action="Denominator of the hit ratio.",
)  # fmt: skip
PREFIX_CACHE_HIT_TOKENS = _counter(
    "prefix_cache_hit_tokens", "Prompt tokens found in the cache at first admission.", "tokens", ("tier",),
    moves="At admission.", action="rate(hit)/rate(queried) is the hit ratio.",
)  # fmt: skip
PREFIX_CACHE_RESUMED_HIT_TOKENS = _counter(
    "prefix_cache_resumed_hit_tokens", "Tokens that preempted requests found again; no hits in the usual sense.", "tokens",
    moves="When a preempted request resumes.", action="Kept apart so that thrash cannot look like a good hit ratio.",
)  # fmt: skip
PREFIX_CACHE_GRANULARITY_LOST_TOKENS = _counter(
    "prefix_cache_granularity_lost_tokens",
    "Tokens that can never hit: the tail of the prompt that fills no block, and a last block that must be recomputed.",
    "tokens", moves="At admission.", action="Large beside few hits: prompts share less than a block; try a smaller block size.",
)  # fmt: skip

PREFIX_CACHE_REGRETTED_TOKENS = _counter(
    "prefix_cache_regretted_tokens",
    "Tokens that would have hit, had their blocks not been evicted for want of room; a bounded number of evictions is "
    "remembered.",
    "tokens", moves="At first admission.", action="Large beside the hits: a larger pool would save this work.",
)  # fmt: skip
PREFIX_CACHE_DUPLICATE_BLOCKS = _counter(
    "prefix_cache_duplicate_blocks", "Full blocks whose content another block held already.", "blocks", ("tier",),
    moves="When several requests compute the same prefix at the same time.",
    action="Large: send the first of many requests with a common prefix alone, the others a moment later.",
)  # fmt: skip
PREFIX_CACHE_MISMATCHES = _counter(
    "prefix_cache_mismatches", "Blocks that were found and held other tokens than their hash says; strict mode only.", "1",
    moves="Never, unless there is a defect.", action="Not 0: a defect; keep a recording and report it.",
)  # fmt: skip

# ---------------------------------------------------------------- pressure
PREEMPTIONS = _counter(
    "preemptions", "Requests that lost their blocks to others.", "1", ("mode", "reason"),
    moves="When a running request needs a block and none is free.", action="Sustained: raise the watermark or the pool. memory: lower max-batch-tokens.",
)  # fmt: skip
PREEMPTION_AWAY = _histogram(
    "preemption_away_seconds", "Time from a preemption to the resumption.", "seconds", PREEMPTION_SECONDS, ("mode",),
    moves="When a preempted request resumes.", action="What users feel as a stall in the middle of an answer.",
)  # fmt: skip
RECOMPUTE_SECONDS = _histogram(
    "recompute_seconds", "Time from a resumption until all tokens that the preemption had dropped are there again.",
    "seconds", PREEMPTION_SECONDS, moves="Once for each resumption, unless the request ends before.",
    action="Comes on top of preemption_away_seconds: long with long contexts; more memory or fewer sequences help.",
)  # fmt: skip
RECOMPUTED_TOKENS = _counter(
    "recomputed_tokens", "Tokens computed again since a preemption had dropped their K/V.", "tokens",
    moves="After resumptions.", action="recomputed/computed is the tax of preemption.",
)  # fmt: skip
COMPUTED_TOKENS = _counter(
    "computed_tokens", "Tokens run through the model.", "tokens", moves="At every step.", action="The engine's useful and useless work.",
)  # fmt: skip

# ---------------------------------------------------------------- speculative decoding
SPEC_DECODE_DRAFTS = _counter(
    "spec_decode_drafts", "Drafts that were verified: tokens guessed for one sequence in one step.", "1",
    moves="With --num-speculative-tokens, whenever a text repeats what it said before.",
    action="Accepted draft tokens divided by it, plus 1: tokens that a sequence with a draft gets in a step.",
)  # fmt: skip
SPEC_DECODE_DRAFT_TOKENS = _counter(
    "spec_decode_draft_tokens", "Tokens of drafts by what became of them: accepted ones saved a step each.", "tokens",
    ("outcome",), moves="With spec_decode_drafts.",
    action="Mostly rejected: computed for nothing. Raise --prompt-lookup-min, or guess fewer tokens.",
)  # fmt: skip

# ---------------------------------------------------------------- transfers between tiers
SWAP_BLOCKS = _counter(
    "swap_blocks", "Blocks that arrived in another tier: out and in with swapped requests, offload and restore with "
    "prefixes.", "blocks", ("direction",), moves="When a transfer ends.",
    action="offload without restore: the tiers keep what nobody asks for again. out and in: what preemption costs.",
)  # fmt: skip
SWAP_BYTES = _counter(
    "swap_bytes", "Bytes of these blocks.", "bytes", ("direction",), moves="With swap_blocks.",
    action="Its rate against the speed of the link: near it, swapping is what requests wait for.",
)  # fmt: skip
SWAP_SECONDS = _histogram(
    "swap_seconds", "Time that moving a transfer's blocks took, without its wait behind others.", "seconds",
    TRANSFER_SECONDS, ("direction",), moves="With swap_blocks.",
    action="Longer than recompute_seconds: preemption by recompute is cheaper here.",
)  # fmt: skip
TRANSFER_FAILURES = _counter(
    "transfer_failures", "Transfers whose blocks did not all arrive, by why; the rest is computed again.", "1",
    ("reason",), moves="On full or failing disks, defective files, slow links; `dropped` when a request ends first.",
    action="disk_full, disk_write, disk_read, corrupt: look at the disk. deadline: the link is too slow to be of use.",
)  # fmt: skip
KV_BLOCKS_IN_TRANSFER = _gauge(
    "kv_blocks_in_transfer", "Blocks of the tier that are being read or written; absent without further tiers.",
    "blocks", ("tier",), moves="When transfers begin and end.",
    action="Blocks of the device that are on their way are used, but no request can run with them yet.",
)  # fmt: skip
KV_TIER_IGNORED_FILES = _gauge(
    "kv_tier_ignored_files", "Files in a tier's folder that were of no use when it was opened, by why; absent if none.",
    "1", ("tier", "reason"), moves="At the start.",
    action="foreign: something else writes there. stale: of other weights or another layout. torn, corrupt: the machine "
    "or its disk failed.",
)  # fmt: skip

# ---------------------------------------------------------------- requests
REQUESTS = _gauge(
    "requests", "Requests in the engine, by state; swapped ones were preempted and keep their K/V behind the device.", "1",
    ("state",), moves="When requests arrive, start, end, or are preempted.",
    action="Waiting grows while running does not: see waiting_requests for the reason.",
)  # fmt: skip
WAITING_REQUESTS = _gauge(
    "waiting_requests", "Requests that do not run, by what they wait for.", "1", ("reason",), moves="At every step.",
    action="blocks: memory; sequences: max-num-seqs; tokens: max-batch-tokens; transfer: K/V on its way between tiers.",
)  # fmt: skip
OLDEST_WAITING_TIMESTAMP = _gauge(
    "oldest_waiting_timestamp_seconds", "Unix time at which the longest-waiting request was queued; absent if none waits.",
    "seconds", moves="When the head of the queue changes.", aggregate="min", action="time() minus it is the longest wait.",
)  # fmt: skip
QUEUE_LIMIT = _gauge(
    "queue_limit", "Limit of the waiting queue; beyond it requests get 429.", "1", ("unit",), moves="When configured.",
    action="See requests_rejected_total.",
)  # fmt: skip
REQUESTS_FINISHED = _counter(
    "requests_finished", "Requests that ended. Values of lora and tenant come from allow-lists, others are `other`.", "1",
    ("reason", "lora", "tenant"), moves="Once for each request.", action="abort: clients hang up; error: look at the logs; deadline: too slow.",
)  # fmt: skip
REQUESTS_REJECTED = _counter(
    "requests_rejected", "Requests refused before they were queued.", "1", ("reason",), moves="On every refusal, whether the API or the engine refuses.",
    action="queue_full: the engine is overloaded.",
)  # fmt: skip
PROMPT_TOKENS = _counter(
    "prompt_tokens", "Prompt tokens of admitted requests.", "tokens", moves="At first admission.",
    action="With generated_tokens: the load in tokens; prefill dominates when it is far larger.",
)  # fmt: skip
GENERATED_TOKENS = _counter(
    "generated_tokens", "Tokens generated; of a beam search those of all its beams.", "tokens", moves="At every step.",
    action="Its rate is the engine's throughput.",
)  # fmt: skip
REQUEST_PROMPT_TOKENS = _histogram(
    "request_prompt_tokens", "Prompt length of finished requests.", "tokens", TOKENS, moves="When a request ends.",
    action="Choose block size and max-batch-tokens by it; its mean tells what a request needs to start.",
)  # fmt: skip
REQUEST_GENERATED_TOKENS = _histogram(
    "request_generated_tokens", "Tokens generated for finished requests, over all its sequences.", "tokens", TOKENS,
    moves="When a request ends, by what it returns.",
    action="With request_prompt_tokens: how long requests hold their blocks.",
)  # fmt: skip
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds", "From arrival at the engine to the first token.", "seconds", TTFT_SECONDS,
    moves="At the first token.", action="High with a low queue_seconds: prefill; else the queue.",
)  # fmt: skip
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds", "Time between two tokens of one sequence.", "seconds", ITL_SECONDS,
    moves="At every token but the first; 0 between tokens of one step, which accepted drafts are.", action="Tails: preemption, or prefill chunks too large.",
)  # fmt: skip
END_TO_END = _histogram(
    "end_to_end_seconds", "From arrival to the last token.", "seconds", REQUEST_SECONDS, moves="When a request ends.",
    action="High with a normal time to first token: many tokens, or a slow inter_token_latency_seconds.",
)  # fmt: skip
QUEUE_SECONDS = _histogram(
    "queue_seconds", "From arrival to first admission.", "seconds", REQUEST_SECONDS, moves="At first admission.",
    action="The queue is the bottleneck when it is a large part of the time to first token.",
)  # fmt: skip
PREFILL_SECONDS = _histogram(
    "prefill_seconds", "From first admission to the first token.", "seconds", REQUEST_SECONDS,
    moves="When a request ends.",
    action="Long with a short queue: long prompts; more prefix hits or larger max-batch-tokens help.",
)  # fmt: skip
DECODE_SECONDS = _histogram(
    "decode_seconds", "From the first to the last token.", "seconds", REQUEST_SECONDS, moves="When a request ends.",
    action="Divided by generated tokens: time per token, pauses by preemption included.",
)  # fmt: skip

# ---------------------------------------------------------------- engine
STEP_DURATION = _histogram(
    "step_seconds", "Duration of a step by phase.", "seconds", STEP_SECONDS, ("phase",), moves="At every step.",
    action="schedule and apply are the engine itself, forward and sample the model.",
)  # fmt: skip
STEP_BUILD_SECONDS = _counter(
    "step_build_seconds", "Time of packing what runs in a step into arrays.", "seconds", moves="At every step.",
    action="Divide by the growth of step_seconds_count: grows with the sequences and tokens of a step.",
)  # fmt: skip
FORWARD_OPERATION_SECONDS = _counter(
    "forward_operation_seconds", "Time of forward passes by kind of operation.", "seconds", ("operation",),
    moves="At every step whose layers run as one call: on a CPU, without LoRA adapters; logits at every step on a CPU.",
    action="Divide by the growth of step_seconds_sum{phase=\"forward\"}: linear and logits read the weights, attention "
    "the KV cache.",
)  # fmt: skip
STEP_TOKENS = _histogram(
    "step_tokens", "Tokens computed in a step.", "tokens", TOKENS, moves="At every step.",
    action="Far below max-batch-tokens with requests waiting: blocks or sequences are short.",
)  # fmt: skip
BATCH_SIZE = _histogram(
    "batch_size", "Sequences in a step.", "1", BATCH, moves="At every step.",
    action="At max-num-seqs all the time with free blocks left: raise max-num-seqs.",
)  # fmt: skip
LAST_STEP_TIMESTAMP = _gauge(
    "last_step_timestamp_seconds", "Unix time of the last completed step.", "seconds", moves="At every step.",
    aggregate="max", action="Old while requests run: the engine is stuck.",
)  # fmt: skip
STEP_ERRORS = _counter(
    "step_errors", "Steps that failed.", "1", moves="On a failure in the model.", action="Look at the logs."
)
ENGINE_STATE = _gauge(
    "engine_state", "1 for the state that the engine is in, 0 for the others.", "1", ("state",),
    moves="On drain, stall, stop and failure.", aggregate="sum by (state): engines in each state",
    action="stalled: a step takes longer than stall-seconds; failed: look at the logs and restart.",
)  # fmt: skip
CONFIG_VALUE = _gauge(
    "config_value",
    "Value of a setting in force; switches are 0 or 1, and max_model_len is what the pool allows of it (without pins).",
    "1", ("key",), moves="When the setting changes.",
    aggregate="max", action="Replicas that differ: one was configured or changed apart.",
)  # fmt: skip
CONFIG_DRIFT = _gauge(
    "config_drift", "1 while the live value of a setting differs from the declared one, else 0.", "1", ("key",),
    moves="When a live change is made, expires, is reverted or is written to the file.", aggregate="max",
    action="1 for long: somebody has forgotten a change; a restart would undo it. Declare it or revert it.",
)  # fmt: skip
CONFIG_CHANGES = _counter(
    "config_changes", "Settings that were changed while the engine ran.", "1", ("key",),
    moves="When somebody changes a setting, or a change expires.",
    action="Compare with the moment at which something else moved; the event says who and why.",
)  # fmt: skip
OUT_OF_MEMORY = _counter(
    "out_of_memory", "Steps that failed since the device had too little memory beside the pool.", "1",
    moves="On such a failure, with step_errors.", action="Lower max-batch-tokens or the pool: the workspace needs room.",
)  # fmt: skip
POOL_REBUILDS = _counter(
    "pool_rebuilds", "Attempts to give the running pool another size, or other blocks.", "1", ("outcome",),
    moves="When the pool is resized or rebuilt, or that is refused or fails.",
    action="refused: running requests need the room; failed: the machine has no memory for it. The message says which.",
)  # fmt: skip
POOL_REBUILD_SECONDS = _histogram(
    "pool_rebuild_seconds", "Time during which steps stood still while the pool got another size or other blocks.", "seconds",
    REBUILD_SECONDS, moves="With pool_rebuilds, unless it was refused.",
    action="Grows with the blocks that hold something: resize when few do.",
)  # fmt: skip
BUILD_INFO = _gauge(
    "build_info", "Always 1; the version in a label.", "1", ("version",), moves="Never.", aggregate="max",
    action="Tells which version a series comes from.",
)  # fmt: skip

# ---------------------------------------------------------------- for gateways (Gateway API Inference Extension)
GATEWAY_QUEUED_REQUESTS = _gauge(
    "gateway_queued_requests", "TotalQueuedRequests of the Gateway API Inference Extension.", "1", moves="With requests.",
    action="For an endpoint picker: one series without labels to match.",
)  # fmt: skip
GATEWAY_RUNNING_REQUESTS = _gauge(
    "gateway_running_requests", "TotalRunningRequests of the Gateway API Inference Extension.", "1", moves="With requests.",
    action="For an endpoint picker.",
)  # fmt: skip
GATEWAY_KV_UTILIZATION = _gauge(
    "gateway_kv_utilization_ratio", "KVCacheUtilization of the Gateway API Inference Extension; cached blocks count as free.",
    "ratio", moves="With kv_usage_ratio.", aggregate="max", action="For an endpoint picker.",
)  # fmt: skip
GATEWAY_CACHE_CONFIG = _gauge(
    "gateway_cache_config_info", "Always 1; BlockSize and NumGPUBlocks of the Gateway API Inference Extension as labels.",
    "1", ("block_size", "num_gpu_blocks"), moves="When the pool is built or resized.", aggregate="max",
    action="For an endpoint picker that matches prefixes: how much this engine can hold.",
)  # fmt: skip

# ---------------------------------------------------------------- kvwatch itself
TELEMETRY_EVENTS = _counter(
    "telemetry_events", "Events that the ledger has applied.", "1", ("event",), moves="All the time.",
    action="Its rate is what subscribers must keep up with.",
)  # fmt: skip
TELEMETRY_GAPS = _counter(
    "telemetry_gaps", "Times a subscriber lost events and was healed by a snapshot.", "1", ("subscriber",),
    moves="When a subscriber is too slow.", action="Counters fed by the lost events are low by what was lost.",
)  # fmt: skip
TELEMETRY_DROPPED = _counter(
    "telemetry_dropped", "Events that a subscriber lost.", "1", ("subscriber",), moves="With telemetry_gaps.",
    action="Not 0: the subscriber named is too slow, or its receiver is.",
)  # fmt: skip
TELEMETRY_LAG = _gauge(
    "telemetry_lag_events", "Events that a subscriber has still to read.", "1", ("subscriber",), moves="All the time.",
    aggregate="max",
    action="Near the log's capacity: the subscriber will lose events.",
)  # fmt: skip
TELEMETRY_ERRORS = _counter(
    "telemetry_errors", "Errors inside a subscriber; the engine was not touched.", "1", ("subscriber",), moves="On defects.",
    action="Not 0: a defect in kvwatch; look at its logs.",
)  # fmt: skip
ADMIN_AUTH_FAILURES = _counter(
    "admin_auth_failures", "Requests on the admin listener that were refused for who sent them, by why.", "1", ("reason",),
    moves="On missing, unknown and expired tokens, missing roles, foreign hosts and origins.",
    action="unknown or host, again and again: somebody tries. expired: renew the token in the file.",
)  # fmt: skip
TELEMETRY_CPU = _counter(
    "telemetry_cpu_seconds", "Processor time of kvwatch's own threads.", "seconds", ("thread",),
    moves="All the time.", action="The cost of watching; its rate is a part of one core.",
)  # fmt: skip
LEDGER_VIOLATIONS = _counter(
    "ledger_violations", "Steps after which the ledger and the engine's checksums disagreed.", "1", moves="On defects.",
    action="Not 0: do not trust the pool gauges; the log has the equation.",
)  # fmt: skip
LEDGER_UPDATE_TIMESTAMP = _gauge(
    "ledger_update_timestamp_seconds", "Unix time of the newest event in the view that is shown.", "seconds",
    moves="While the engine works.", aggregate="max", action="Tells a frozen number from a true one.",
)  # fmt: skip

# ---------------------------------------------------------------- what a sidecar watches
KV_INDEXED_BLOCKS = _gauge(
    "kv_indexed_blocks", "Hashes that are resident in a foreign engine; absent while source_complete is 0.", "blocks",
    ("tier", "group"), moves="When hashes become resident or are gone.",
    action="What can be hit. Which of them are in use is not told: no kv_blocks for such an engine.",
)  # fmt: skip
SOURCE_UP = _gauge(
    "source_up", "1 while the sidecar reaches the engine, else 0.", "1", moves="When the engine starts, stops or is cut off.",
    aggregate="min", action="0: is the engine up, and are its address and its token what the sidecar was given?",
)  # fmt: skip
SOURCE_COMPLETE = _gauge(
    "source_complete", "1 while the engine's history is known from a moment at which its cache was empty.", "1",
    moves="When history is lost, on a replay from the beginning, a clear, a restart of the engine.", aggregate="min",
    action="0: resident blocks cannot be counted. Offer a replay endpoint, or start the sidecar before the engine.",
)  # fmt: skip
SOURCE_DRIFT = _gauge(
    "source_drift_blocks",
    "Blocks for which the engine's events contradicted what was known since its history was whole; absent before it was.",
    "blocks", moves="On removals of what is not known, and on more copies than the pool can hold; 0 again on a clear or restart.",
    action="Not 0: events were lost; do not trust kv_indexed_blocks until a clear or a restart.",
)  # fmt: skip
SOURCE_GAPS = _counter(
    "source_gaps", "Times batches of the engine's events were missed.", "1", moves="When the numbers of batches have a hole.",
    action="The sidecar or the network is too slow; with a replay endpoint gaps are filled, see source_replays.",
)  # fmt: skip
SOURCE_RESETS = _counter(
    "source_resets", "Times the engine was seen to have started anew.", "1", moves="When the engine restarts.",
    action="More than were deployed: the engine crashes.",
)  # fmt: skip
SOURCE_REPLAYS = _counter(
    "source_replays", "Replays asked of the engine, by how they ended.", "1", ("outcome",),
    moves="At the start, and after gaps.", action="incomplete: the engine keeps too few batches. failed: is the endpoint right?",
)  # fmt: skip
SOURCE_DECODE_ERRORS = _counter(
    "source_decode_errors", "Messages or events of the engine that could not be understood and were left out.", "1",
    ("kind",), moves="When an engine says what this version does not know.", action="Not 0: update the sidecar; look at its logs.",
)  # fmt: skip
SOURCE_LAST_EVENT_TIMESTAMP = _gauge(
    "source_last_event_timestamp_seconds", "Unix time at which the engine's newest event came in.", "seconds",
    moves="While the engine works.", aggregate="max", action="Old while the engine is busy: its events do not arrive.",
)  # fmt: skip

SOURCE_LAG = _histogram(
    "source_lag_seconds", "Time from a batch of events in the engine to its arrival in the sidecar, by both clocks.", "seconds",
    STEP_SECONDS, moves="With every live batch.", action="Long: the network, a slow sidecar, or clocks that differ.",
)  # fmt: skip
KV_PREFIX_ROOTS = _gauge(
    "kv_prefix_roots", "Resident blocks that follow no resident block: distinct beginnings.", "blocks", ("tier", "group"),
    moves="When prefixes begin or lose their beginning.", action="Near kv_indexed_blocks: prompts have nothing in common.",
)  # fmt: skip
KV_PREFIX_BRANCHES = _gauge(
    "kv_prefix_branches", "Resident blocks that at least two resident blocks follow: ends of shared prefixes.", "blocks",
    ("tier", "group"), moves="When prompts part or their continuations are gone.",
    action="What to pin: few branches with many blocks behind them are worth keeping.",
)  # fmt: skip
KV_PREFIX_FAN_OUT_MAX = _gauge(
    "kv_prefix_fan_out_max", "Most resident blocks that follow one resident block directly.", "blocks", ("tier", "group"),
    moves="With kv_prefix_branches.", aggregate="max", action="The most popular prefix.",
)  # fmt: skip
KV_PREFIX_DEPTH_MAX = _gauge(
    "kv_prefix_depth_max", "Most blocks in one resident prefix, as far as its beginning is known.", "blocks", ("tier", "group"),
    moves="When long contexts come and go.", aggregate="max", action="Times the block size: the longest context that can hit.",
)  # fmt: skip
KV_PREMATURE_EVICTION_AWAY = _histogram(
    "kv_premature_eviction_away_seconds", "Time from a block's removal to its return; a bounded number of removals is remembered.",
    "seconds", RESIDENCY_SECONDS, ("tier",), moves="When a removed hash is stored again.",
    action="Its count beside kv_block_evictions: the part of removals that was regretted.",
)  # fmt: skip
KV_PREMATURE_EVICTION_EXTRA = _histogram(
    "kv_premature_eviction_extra_blocks", "Extra blocks of room that would have kept a block that was removed and came back.",
    "blocks", GHOST_BLOCKS, ("tier",), moves="When a removed hash is stored again.",
    action="The share below n is what n more blocks would have saved, exactly for an engine that removes the least recently used.",
)  # fmt: skip

CATALOGUE: tuple[Metric, ...] = tuple(item for item in list(globals().values()) if isinstance(item, Metric))
"""All metrics in the order of this page."""
