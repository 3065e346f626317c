"""What can be set of `kvwatch serve`. Imports no torch: the command line is read first."""

from typing import Annotated, Literal

from kvwatch.config import setting
from kvwatch.observatory.settings import ObservatorySettings
from kvwatch_engine.contracts.adapter import DEFAULT_MAX_ADAPTERS, DEFAULT_MAX_RANK
from kvwatch_engine.contracts.cache import KVDtype
from kvwatch_engine.contracts.model import ModelImplementation
from kvwatch_engine.contracts.settings import PreemptionMode, VictimPolicy
from kvwatch_engine.contracts.tools import ToolParser
from kvwatch_engine.memory.tiers.tiers import DEFAULT_TRANSFER_SECONDS


class ServeSettings(ObservatorySettings, frozen=True, kw_only=True):
    """Settings of `kvwatch serve`; docs/configuration.md is derived from this class."""

    model: Annotated[str, setting("Model: `embedded`, a Hugging Face folder or hub name, or a .gguf file.")] = (
        "embedded"
    )
    model_impl: Annotated[
        ModelImplementation,
        setting("What computes the model's layers; auto: the lean decoder where it knows the model."),
    ] = "auto"
    served_model_name: Annotated[
        tuple[str, ...],
        setting("Name under which the API offers the model; repeatable, the first is that of answers and metrics."),
    ] = ()
    tokenizer: Annotated[
        str | None, setting("Folder or hub name of a tokenizer to take instead of the model's own.")
    ] = None
    chat_template: Annotated[
        str | None, setting("File with a chat template in Jinja to take instead of the model's own.")
    ] = None
    host: Annotated[str, setting("Address of the API.")] = "127.0.0.1"
    port: Annotated[int, setting("Port of the API; 0 takes a free one.", minimum=0, maximum=65_535)] = 8000
    api_key_file: Annotated[
        str | None, setting("TOML file of API keys with their tenants; without it everybody may use the API.")
    ] = None
    block_size: Annotated[int, setting("Tokens in one block.", minimum=1, maximum=1024)] = 16
    num_blocks: Annotated[int | None, setting("Blocks of the pool, the null block included.", minimum=2)] = None
    kv_memory: Annotated[str | None, setting("Memory of the pool, such as 4GiB, instead of --num-blocks.")] = None
    claim_memory: Annotated[
        Literal["as-used", "at-start"],
        setting("When the pool's memory on a CPU is claimed: block by block as it is used, or all of it at start."),
    ] = "as-used"
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], setting("Type that the model computes in.")] = "auto"
    kv_dtype: Annotated[
        KVDtype, setting("Type of the cache: `auto` is the model's; int8 and fp8 hold two to four times the tokens.")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], setting("Where the model runs; auto: on a GPU if there is one, CUDA or ROCm.")
    ] = "auto"
    max_model_len: Annotated[int | None, setting("Longest sequence in tokens; default: the model's.", minimum=2)] = None
    max_num_seqs: Annotated[int, setting("Most sequences in one step.", minimum=1, maximum=4096)] = 64
    max_batch_tokens: Annotated[int, setting("Most tokens in one step.", minimum=1)] = 2048
    max_prefill_chunk: Annotated[int | None, setting("Most tokens of one sequence in one step.", minimum=1)] = None
    target_itl_seconds: Annotated[
        float,
        setting(
            "Steps that decode compute no more of prompts than fits; 1 gap of 200 may be longer, for queues. 0: any.",
            minimum=0,
            maximum=86_400,
        ),
    ] = 0.07
    max_step_seconds: Annotated[
        float,
        setting(
            "No step computes more of prompts than fits into this time, whoever waits for it. 0: any.",
            minimum=0,
            maximum=86_400,
        ),
    ] = 1.0
    max_queued_requests: Annotated[int, setting("Waiting requests beyond this get 429.", minimum=1)] = 1024
    max_queued_tokens: Annotated[int, setting("Waiting prompt tokens beyond this get 429.", minimum=1)] = 1_048_576
    watermark: Annotated[str, setting("Blocks kept free at admission: 0.02 is a ratio, 8 are blocks.")] = "0.02"
    reserve_prompt: Annotated[
        bool, setting("Admit a request only when all its tokens fit at once; else its first chunk is enough.")
    ] = True
    priority_aging_seconds: Annotated[
        float,
        setting(
            "A request of priority p waits as if it had come p times so much later; 0: never ages.",
            minimum=0,
            maximum=86_400,
        ),
    ] = 30.0
    deadline_seconds: Annotated[
        float | None,
        setting("Requests end with an error after this time; they may ask for less.", minimum=0.001, maximum=86_400),
    ] = None
    preemption_mode: Annotated[
        PreemptionMode, setting("What becomes of K/V whose blocks are taken; auto: what is cheaper, as measured.")
    ] = "auto"
    victim_policy: Annotated[
        VictimPolicy, setting("Who yields when blocks are short; low priorities always come first.")
    ] = "newest"
    protect_after_preemptions: Annotated[
        int, setting("A request that was preempted so often yields last of its priority.", minimum=1)
    ] = 3
    host_memory: Annotated[
        str | None, setting("Host memory for swapped requests and evicted prefixes, such as 4GiB; default: none.")
    ] = None
    disk_dir: Annotated[
        str | None, setting("Folder for prefixes that the host or the device evicts; what is stale in it is removed.")
    ] = None
    disk_bytes: Annotated[str | None, setting("Most bytes in --disk-dir, such as 100GiB.")] = None
    swap_bandwidth: Annotated[
        str | None, setting("Limit of the link to the device a second, such as 100MiB, to stand for a slower one.")
    ] = None
    transfer_seconds: Annotated[
        float,
        setting("A transfer between tiers that takes longer has failed: recompute.", minimum=0.01, maximum=86_400),
    ] = DEFAULT_TRANSFER_SECONDS
    prefix_cache: Annotated[bool, setting("Reuse the blocks of known prefixes.")] = True
    strict_prefix_cache: Annotated[
        bool, setting("Keep the token ids of stored blocks and compare them on a hit; not with tiers.")
    ] = False
    max_pinned_ratio: Annotated[
        float, setting("Part of the pool that pinned prefixes may take.", minimum=0, maximum=0.95)
    ] = 0.5
    num_speculative_tokens: Annotated[
        int,
        setting("Tokens guessed from a sequence's own text and verified in one step; 0: none.", minimum=0, maximum=32),
    ] = 0
    prompt_lookup_min: Annotated[
        int, setting("Tokens at a sequence's end that must occur in it before, to guess on.", minimum=1, maximum=32)
    ] = 2
    prompt_lookup_max: Annotated[
        int, setting("Most such tokens that are compared: the longest match is taken.", minimum=1, maximum=32)
    ] = 4
    lora: Annotated[
        tuple[str, ...], setting("LoRA adapter as NAME=DIR, in PEFT's format, served as model NAME; repeatable.")
    ] = ()
    lora_dir: Annotated[
        str | None, setting("Adapters may be loaded from beneath it through the API; default: none may.")
    ] = None
    max_loras: Annotated[int, setting("Most LoRA adapters in memory.", minimum=1, maximum=256)] = DEFAULT_MAX_ADAPTERS
    max_lora_rank: Annotated[int, setting("Highest rank of a LoRA adapter.", minimum=1, maximum=512)] = DEFAULT_MAX_RANK
    allow_rebuild: Annotated[
        bool,
        setting("Let block size and type of the cache be changed while requests run: steps stand still meanwhile."),
    ] = False
    max_rebuild_pause: Annotated[
        float, setting("Seconds for which steps may stand still for that, as estimated.", minimum=0.01, maximum=3600)
    ] = 10.0
    rebuild_cooldown: Annotated[float, setting("Seconds between two such changes.", minimum=0, maximum=86_400)] = 60.0
    tool_parser: Annotated[
        ToolParser, setting("How the model writes calls of functions; auto: what its chat template shows.")
    ] = "auto"
    max_images: Annotated[int, setting("Most images of one request, where the model takes images.", minimum=0)] = 8
    max_image_bytes: Annotated[str, setting("Most bytes of all images of one request, as files.")] = "10MiB"
    max_image_pixels: Annotated[int, setting("Most pixels of one image.", minimum=1)] = 16_777_216
    image_cache: Annotated[str, setting("Memory for encoded images, kept for requests that show them again.")] = (
        "256MiB"
    )
    max_stored_responses: Annotated[
        int, setting("Most responses that are kept to be read or answered later; 0 keeps none.", minimum=0)
    ] = 1000
    max_stored_response_bytes: Annotated[
        str, setting("Most memory for kept responses, with the conversations that they answer.")
    ] = "64MiB"
    drain_seconds: Annotated[
        float, setting("Time that requests get to finish on SIGTERM.", minimum=0, maximum=86_400)
    ] = 30.0
    stall_seconds: Annotated[float, setting("A step longer than this fails /health.", minimum=1, maximum=86_400)] = 30.0
    engine_name: Annotated[str, setting("Stable name of this engine in all metrics.")] = "kvwatch"
    dp_rank: Annotated[int, setting("Rank among data-parallel replicas.", minimum=0)] = 0
    vllm_aliases: Annotated[bool, setting("Offer metrics under vLLM's names as well.")] = False
    kv_events: Annotated[str | None, setting("Publish KV events, with token ids, such as tcp://*:5557.")] = None
    kv_events_replay: Annotated[str | None, setting("Answer replays of KV events, such as tcp://*:5657.")] = None
    kv_events_topic: Annotated[str, setting("Topic of KV events.")] = ""
    kv_events_hashes: Annotated[
        Literal["int", "bytes"], setting("Hashes of KV events: 64-bit integers or digests.")
    ] = "int"
    kv_events_socket: Annotated[
        Literal["auto", "bind", "connect"], setting("Whether --kv-events is bound; auto: if it has *, :: or 0.0.0.0.")
    ] = "auto"
    log_prompts: Annotated[bool, setting("Write prompt texts to the log.")] = False
