"""The gated activations of a decoder's MLP."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.cpu.gated import compiled_gelu_tanh_and_multiply, compiled_silu_and_multiply
from kvwatch_kernels.dims import check_rows
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_gelu_tanh_and_multiply, reference_silu_and_multiply

Gate = Callable[[Tensor, Tensor], None]


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, where each row is its gate followed by its up.

    Args:
        gate_up: T[num_rows, 2 * width], last dim contiguous: what a fused gate and up projection gives.

    Returns:
        T[num_rows, width], contiguous. Both operations are computed in float32 and rounded to T.

    Raises:
        ShapeError: an argument breaks this contract.
    """
    return _gated(gate_up, compiled_silu_and_multiply, reference_silu_and_multiply)


def gelu_tanh_and_multiply(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, with GELU by its tanh formula; see `silu_and_multiply` for everything else."""
    return _gated(gate_up, compiled_gelu_tanh_and_multiply, reference_gelu_tanh_and_multiply)


def _gated(gate_up: Tensor, compiled: Gate, reference: Gate) -> Tensor:
    num_rows, double_width = check_rows("gate_up", gate_up, None, gate_up)
    if double_width % 2:
        raise ShapeError(f"gate_up has {double_width} columns: must be even, a gate and an up of the same width")
    out = torch.empty((num_rows, double_width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        is_compiled = gate_up.device.type == "cpu" and gate_up.dtype in COMPILED_DTYPES
        (compiled if is_compiled else reference)(gate_up, out)
    return out
