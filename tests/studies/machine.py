"""What a measurement was made on, in words."""

import os
import platform
from importlib.metadata import version

import psutil
from llvmlite import binding

_INSTRUCTIONS = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx512bf16": "AVX512-BF16", "avx512vnni": "AVX512-VNNI",
    "amx-bf16": "AMX-BF16", "neon": "NEON", "bf16": "BF16", "sve": "SVE",
}  # fmt: skip
_BUSY_PERCENT = 15.0
"""As in `tests/perf/bench.py`: below this the machine counts as quiet."""


def conditions() -> str:
    """Return on what it will be measured; looks for a second how busy the machine is."""
    busy = psutil.cpu_percent(interval=1.0)
    load = "otherwise idle" if busy < _BUSY_PERCENT else f"{busy:.0f} % busy with other work"
    features = binding.get_host_cpu_features()
    instructions = [name for flag, name in _INSTRUCTIONS.items() if features.get(flag)]
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} {platform.machine()} cores with "
        f"{', '.join(instructions) or 'no vector instructions known here'}, {memory:.0f} GiB of memory, {load}; "
        f"Python {platform.python_version()}, torch {version('torch').split('+')[0]}."
    )


def measured(num_rounds: int, machine: str) -> str:
    """Return what stands under a table that was measured in so many rounds."""
    rounds = (
        "One round, so no spread."
        if num_rounds == 1
        else f"{num_rounds} alternating rounds: median (lowest to highest)."
    )
    return f"{rounds} {machine}"
