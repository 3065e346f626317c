"""What the ahead-of-time gate compiles: every shipped kernel, as run time launches it.

Derived from the launch table and the functions that give run time its constants; a row that changes there changes here.
The shapes are those of common models: heads of 64, 128 and 256, four query heads to a KV head, blocks of 16 tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvwatch_kernels.quant import is_quantised
from kvwatch_kernels.triton.attention import attention_constants, reduce_constants, stored_kind
from kvwatch_kernels.triton.attention_kernel import attention_kernel
from kvwatch_kernels.triton.copy_kernel import copy_kernel
from kvwatch_kernels.triton.launch import COPY, REDUCE_WARPS, STORE_WARPS, Queries, Stored, attention_launch
from kvwatch_kernels.triton.reduce import reduce_kernel
from kvwatch_kernels.triton.store import store_constants
from kvwatch_kernels.triton.store_kernel import rotate_and_store_kernel, store_kernel

HEAD_DIMS: Final = (64, 128, 256)
GROUP: Final = 4
NUM_KV_HEADS: Final = 8
BLOCK_SIZE: Final = 16
DEFAULT_STAGES: Final = 2

_TYPES: Final = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
"""Triton's names."""

_SHORT: Final = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}

_NOT_SPECIALISED: Final = {"num_seqs", "num_splits", "words"}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One kernel, ready for `triton.compiler.ASTSource`."""

    name: str
    kernel: Any
    """Triton's JITFunction"""
    signature: dict[str, str]
    """Parameter -> Triton's type, `constexpr` for those in `constants`."""
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[object]]]
    """What the JIT would see at run time: which parameters are divisible by 16."""
    num_warps: int
    num_stages: int
    expects_mma: bool
    """Whether the products must be done by matrix units."""
    expects_async_copy: bool
    """Whether, on NVIDIA, keys and values must be on their way while others are computed."""


def shipped() -> list[Configuration]:
    """Return all configurations, in a fixed order, the same for every target."""
    return [*_attention(), *_reduce(), *_stores(), _copy()]


def _attention() -> Iterator[Configuration]:
    for queries in Queries:
        for stored in _TYPES:
            for head_dim in HEAD_DIMS:
                yield _attention_of(queries, stored, head_dim)
        # e4m3 where the device cannot convert it
        yield from (_attention_of(queries, torch.float8_e4m3fn, head_dim, has_bits=True) for head_dim in HEAD_DIMS)
    yield _attention_of(Queries.DECODE, torch.bfloat16, 128, is_split=True)
    yield _attention_of(Queries.PREFILL, torch.bfloat16, 128, is_split=True)
    yield _attention_of(Queries.DECODE, torch.int8, 128, is_split=True)
    yield _attention_of(Queries.DECODE, torch.int8, 128, query=torch.float16)
    yield _attention_of(Queries.PREFILL, torch.int8, 128, query=torch.float16)
    yield _attention_of(Queries.DECODE, torch.int8, 128, query=torch.float32)
    yield _attention_of(Queries.DECODE, torch.bfloat16, 80)
    yield _attention_of(Queries.PREFILL, torch.bfloat16, 192)
    yield _attention_of(Queries.DECODE, torch.bfloat16, 128, sliding_window=4096)
    yield _attention_of(Queries.PREFILL, torch.bfloat16, 256, sliding_window=4096, soft_cap=50.0)
    yield _attention_of(Queries.PREFILL, torch.bfloat16, 64, has_alibi=True)


def _attention_of(
    queries: Queries,
    stored: torch.dtype,
    head_dim: int,
    *,
    query: torch.dtype | None = None,
    has_bits: bool = False,
    is_split: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    has_alibi: bool = False,
) -> Configuration:
    if query is None:
        query = torch.bfloat16 if is_quantised(stored) else stored
    kind = stored_kind(stored, query)
    launch = attention_launch(queries, kind, head_dim, GROUP)
    constants = attention_constants(
        launch,
        group=GROUP,
        num_kv_heads=NUM_KV_HEADS,
        block_size=BLOCK_SIZE,
        same_strides=True,
        head_dim=head_dim,
        is_split=is_split,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_alibi=has_alibi,
        is_quantised=is_quantised(stored),
        has_bits=has_bits,
        one_query=queries is Queries.DECODE,
    )
    cache = "u8" if has_bits else _TYPES[stored]
    types = dict.fromkeys(("out", "query"), f"*{_TYPES[query]}")
    types |= dict.fromkeys(("key_cache", "value_cache"), f"*{cache}")
    types |= dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i32")
    if is_quantised(stored):
        types |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    if is_split:
        types |= dict.fromkeys(("partial_sums", "partial_maxima", "partial_norms"), "*fp32")
    if has_alibi:
        types["alibi_slopes"] = "*fp32"
    types["scale"] = "fp32"
    marks = {
        f", {_SHORT[query]} query": is_quantised(stored) and query != torch.bfloat16,
        ", from bits": has_bits,
        ", split": is_split,
        f", window {sliding_window}": sliding_window is not None,
        ", soft cap": soft_cap is not None,
        ", alibi": has_alibi,
    }
    name = f"attention {queries} {_SHORT[stored]} d{head_dim}" + "".join(mark for mark, is_on in marks.items() if is_on)
    is_narrow = kind in (Stored.HALF, Stored.QUANTISED)
    return _configuration(
        name,
        attention_kernel,
        types,
        constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        expects_mma=is_narrow,
        expects_async_copy=is_narrow,
    )


def _reduce() -> Iterator[Configuration]:
    for head_dim in HEAD_DIMS:
        pointers = ("partial_sums", "partial_maxima", "partial_norms")
        types = {"out": "*bf16"} | dict.fromkeys(pointers, "*fp32") | {"query_starts": "*i32", "context_lens": "*i32"}
        constants = reduce_constants(GROUP * NUM_KV_HEADS, head_dim, None)
        yield _configuration(f"reduce bf16 d{head_dim}", reduce_kernel, types, constants, num_warps=REDUCE_WARPS)


def _stores() -> Iterator[Configuration]:
    for stored in _TYPES:
        query = torch.bfloat16 if is_quantised(stored) else stored
        constants = store_constants(stored, block_size=BLOCK_SIZE, head_dim=128)
        caches = dict.fromkeys(("key_cache", "value_cache"), "*u8" if is_quantised(stored) else f"*{_TYPES[stored]}")
        if is_quantised(stored):
            caches |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
        caches["slots"] = "*i64"
        types = dict.fromkeys(("key", "value"), f"*{_TYPES[query]}") | caches
        yield _configuration(f"store {_SHORT[stored]} d128", store_kernel, types, constants, num_warps=STORE_WARPS)
        types = dict.fromkeys(("qkv", "cosine", "sine", "norm_weight"), f"*{_TYPES[query]}") | caches | {"eps": "fp32"}
        constants |= {"NUM_HEADS": GROUP * NUM_KV_HEADS, "NUM_KV_HEADS": NUM_KV_HEADS}
        name = f"rotate and store {_SHORT[stored]} d128"
        yield _configuration(name, rotate_and_store_kernel, types, constants, num_warps=STORE_WARPS)


def _copy() -> Configuration:
    types = dict.fromkeys(("destination", "source", "destination_blocks", "source_blocks"), "*i64")
    return _configuration("copy", copy_kernel, types, {"CHUNK": COPY.chunk}, num_warps=COPY.num_warps)


def _configuration(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    num_stages: int = DEFAULT_STAGES,
    expects_mma: bool = False,
    expects_async_copy: bool = False,
) -> Configuration:
    """Complete what is the same for all: pointers that are not given are None, other parameters are integers.

    Pointers are aligned as torch's allocations are, and strides are multiples of 16, as those of common shapes are.
    """
    constants = dict(constants)
    signature = {}
    for parameter in kernel.params:
        is_pointer = parameter.name in _OPTIONAL
        if parameter.is_constexpr or (is_pointer and parameter.name not in types):
            constants.setdefault(parameter.name, None)
        signature[parameter.name] = "constexpr" if parameter.name in constants else types.get(parameter.name, "i32")
    aligned = [
        (index,)
        for index, (parameter, type_) in enumerate(signature.items())
        if parameter not in _NOT_SPECIALISED and type_ != "constexpr" and not type_.startswith("fp")
    ]
    attributes: dict[tuple[int], list[list[object]]] = {place: [["tt.divisibility", 16]] for place in aligned}
    return Configuration(
        name,
        kernel,
        signature,
        constants,
        attributes,
        num_warps,
        num_stages,
        expects_mma,
        expects_async_copy,
    )


_OPTIONAL: Final = {
    "partial_sums",
    "partial_maxima",
    "partial_norms",
    "key_scales",
    "value_scales",
    "alibi_slopes",
    "norm_weight",
    "destination_blocks",
    "source_blocks",
}
"""Pointers that may be None."""
