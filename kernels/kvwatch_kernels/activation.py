"""The gated activation of a decoder's MLP."""

import torch
from torch import Tensor

from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.cpu.gated import compiled_silu_and_multiply
from kvwatch_kernels.dims import check_rows
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_silu_and_multiply


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, where each row is its gate followed by its up.

    Args:
        gate_up: T[num_rows, 2 * width], last dim contiguous: what a fused gate and up projection gives.

    Returns:
        T[num_rows, width], contiguous. Both operations are computed in float32 and rounded to T.

    Raises:
        ShapeError: an argument breaks this contract.
    """
    num_rows, double_width = check_rows("gate_up", gate_up, None, gate_up)
    if double_width % 2:
        raise ShapeError(f"gate_up has {double_width} columns: must be even, a gate and an up of the same width")
    out = torch.empty((num_rows, double_width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        is_compiled = gate_up.device.type == "cpu" and gate_up.dtype in COMPILED_DTYPES
        multiply = compiled_silu_and_multiply if is_compiled else reference_silu_and_multiply
        multiply(gate_up, out)
    return out
