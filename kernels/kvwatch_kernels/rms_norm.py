"""RMS norm of rows, with the residual sum before it."""

import torch
from torch import Tensor

from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.cpu.rms_norm import compiled_rms_norm
from kvwatch_kernels.dims import check_eps, check_rows, check_written
from kvwatch_kernels.reference import reference_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, added: Tensor | None = None) -> Tensor:
    """Return `x / sqrt(mean(x**2) + eps) * weight` for each row of x, after adding `added` to x in place.

    Computed in float32 and rounded once; what is normalised is the sum as x holds it, rounded to its dtype. A row's
    result has the same bits whatever rows lie beside it.

    Args:
        x: T[num_rows, width], last dim contiguous; `added` is added to it.
        weight: T[width], contiguous.
        eps: added to the mean of squares.
        added: T[num_rows, width], last dim contiguous; none leaves x as it is.

    Returns:
        T[num_rows, width], contiguous.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    num_rows, width = check_rows("x", x, None, x)
    check_rows("weight", weight, (width,), x)
    check_eps(eps)
    if added is not None:
        check_rows("added", added, (num_rows, width), x)
        check_written("x", x)
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        is_compiled = x.device.type == "cpu" and x.dtype in COMPILED_DTYPES
        normalise = compiled_rms_norm if is_compiled else reference_rms_norm
        normalise(x, weight, eps, added, out)
    return out
