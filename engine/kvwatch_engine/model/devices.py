"""Where a model runs: the CPU, or a GPU that torch and the kernels can use."""

from importlib.util import find_spec

import torch

from kvwatch.errors import ConfigError
from kvwatch_engine.memory.sizing import free_memory_bytes


def choose_device(requested: str) -> torch.device:
    """Return the device to run on.

    Args:
        requested: `cpu`, `cuda` (a ROCm device has that name too), or `auto` for a GPU where there is one.

    Raises:
        ConfigError: a GPU was asked for, and there is none that can be used.
    """
    if requested == "cpu":
        return torch.device("cpu")
    missing = _why_no_gpu()
    if missing is None:
        return torch.device("cuda", torch.cuda.current_device())
    if requested == "auto":
        return torch.device("cpu")
    raise ConfigError(f"--device {requested}: {missing}, or take --device cpu")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that the pool may still take on a device."""
    if device.type == "cpu":
        return free_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _why_no_gpu() -> str | None:
    """Return what is missing and what to do about it; None when a GPU can be used."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; install a driver and a build of torch for it"
    if find_spec("triton") is None:
        return "triton is not installed; install kvwatch[gpu]"
    return None
