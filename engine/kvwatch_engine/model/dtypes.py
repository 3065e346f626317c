"""Which dtype a model computes in."""

from dataclasses import dataclass

import torch

from kvwatch_engine.contracts.errors import ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype, and why it was chosen."""

    dtype: torch.dtype
    name: str
    reason: str


def choose_dtype(requested: str, device: torch.device | None = None) -> DtypeChoice:
    """Return the dtype to compute in.

    `auto` takes bfloat16 where the device multiplies it in hardware, since it halves the bytes that every step has to
    read; elsewhere products of bfloat16 are emulated, and float32 is faster.

    Args:
        requested: `auto`, `float32` or `bfloat16`.
        device: to compute on; none means the CPU.

    Raises:
        ModelError: another name.
    """
    if requested in _DTYPES:
        return DtypeChoice(_DTYPES[requested], requested, "as requested")
    if requested != "auto":
        raise ModelError(f"dtype {requested!r} is not supported; use auto, {', '.join(_DTYPES)}")
    if device is not None and device.type != "cpu":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return DtypeChoice(torch.bfloat16, "bfloat16", "auto: this GPU multiplies bfloat16 in hardware")
        return DtypeChoice(torch.float32, "float32", "auto: this GPU cannot multiply bfloat16")
    if torch.cpu._is_amx_tile_supported():
        return DtypeChoice(torch.bfloat16, "bfloat16", "auto: this CPU multiplies bfloat16 in hardware (AMX)")
    if torch.cpu._is_avx512_bf16_supported():
        return DtypeChoice(torch.bfloat16, "bfloat16", "auto: this CPU multiplies bfloat16 in hardware (AVX512-BF16)")
    return DtypeChoice(torch.float32, "float32", "auto: this CPU has neither AMX nor AVX512-BF16 to multiply bfloat16")
