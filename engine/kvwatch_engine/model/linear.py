"""Linear layers whose weights lie in the order in which the CPU's matrix products read them."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn import functional

from kvwatch_kernels.linear import PackedWeight, can_pack, is_fast, linear, pack_weight


class Linear:
    """y = x @ weight.T + bias.

    The weight is reordered once, and the plain layout is not kept. Which layout depends on where and in what the layer
    computes:

    - float32 on a CPU with AVX2 or AVX-512: our own panels (`kvwatch_kernels.linear`), in the weight's dtype. A
      checkpoint in bfloat16 stays that small, and is widened, which is exact, in registers.
    - bfloat16 on a CPU with AVX512-BF16 and without AMX: our own panels too.
    - otherwise on a CPU: oneDNN's blocked layout, in the dtype that is computed in, where oneDNN has that.
    - elsewhere: the plain weight.
    """

    __slots__ = ("_apply", "num_bytes", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype) -> None:
        """Take over a layer.

        Args:
            weight: float32 or bfloat16 `[out_features, in_features]`; if not of `dtype`, see `stored_dtype`.
            bias: `[out_features]`, or none; float32 or bfloat16.
            dtype: to compute in, float32 or bfloat16.
        """
        stored = stored_dtype(weight, dtype)
        weight, bias = weight.to(stored), bias.to(dtype) if bias is not None else None
        self.packed: PackedWeight | None = None
        """Weight and bias in our own panels, where they lie in these."""
        if is_fast(weight.device, dtype) and can_pack(weight, dtype):
            self.packed = pack_weight(weight, bias, dtype)
        self._apply = _applied(weight, bias, dtype) if self.packed is None else partial(linear, packed=self.packed)
        self.num_bytes = weight.numel() * stored.itemsize + (bias.numel() * dtype.itemsize if bias is not None else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: `[num_tokens, in_features]` in the dtype that is computed in, last dimension contiguous.

        Returns:
            `[num_tokens, out_features]`, its dtype, contiguous.
        """
        return self._apply(x)


def stored_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is kept: its own where that loses nothing and costs no time.

    Args:
        weight: as it came.
        dtype: to compute in.
    """
    is_kept = weight.dtype == torch.bfloat16 and dtype == torch.float32 and is_fast(weight.device)
    return torch.bfloat16 if is_kept else dtype


def _applied(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the layer as a function of x that computes in `dtype`, by torch."""
    if weight.device.type == "cpu" and _onednn_multiplies(dtype):
        # No batch size is given: it would only be a hint, and batches differ from step to step.
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x: product(x, blocked, bias, "none", [], "")
    return lambda x: functional.linear(x, weight, bias)


@cache
def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights of a dtype on this CPU; in bfloat16 it wants AVX-512 or its like."""
    if not torch._C._has_mkldnn:
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
