"""How many blocks a pool gets. Pure arithmetic, and one look at the machine's free memory."""

from collections.abc import Sequence
from pathlib import Path

from kvwatch.errors import ConfigError
from kvwatch_engine.contracts.cache import KVCacheSpec, most_window_blocks

DEFAULT_FREE_MEMORY_SHARE = 0.25
"""Part of the free memory that the pool takes unless told otherwise."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def parse_watermark(text: str, capacity: int, setting: str = "--watermark") -> int:
    """Read a watermark: a ratio of the pool (`0.02`) or a number of blocks (`8`); return blocks.

    Raises:
        ConfigError: it is neither, or no smaller than the pool.
    """
    try:
        blocks = int(text) if text.strip().isdigit() else round(float(text) * capacity)
    except (ValueError, OverflowError):
        blocks = -1
    if not 0 <= blocks < capacity:
        raise ConfigError(
            f"{setting}: {text!r} is neither a ratio from 0 to below 1 nor a number of blocks below {capacity}; "
            "write for instance 0.02"
        )
    return blocks


def watermark_ratio(text: str) -> float | None:
    """Return the ratio that a valid watermark is; None if it is a number of blocks."""
    return None if text.strip().isdigit() else float(text)


def most_blocks_of_sequence(windows: Sequence[int | None], block_size: int, num_tokens: int, max_chunk: int) -> int:
    """Return the most blocks that a sequence holds at once over all KV groups.

    Args:
        windows: of each group; none sees all.
        block_size: tokens of a block.
        num_tokens: of the sequence.
        max_chunk: most tokens of it that are computed at once.
    """
    in_all = -(-num_tokens // block_size)
    return sum(
        in_all if window is None else min(in_all, most_window_blocks(window, max_chunk, block_size))
        for window in windows
    )


def default_num_blocks(spec: KVCacheSpec, blocks_per_sequence: int, max_num_seqs: int, free_bytes: int) -> int:
    """Return the number of blocks, null block included: a share of the free memory, but no more than can be used.

    Args:
        spec: shape of the cache.
        blocks_per_sequence: most blocks of the longest sequence.
        max_num_seqs: most sequences at once.
        free_bytes: free memory in bytes.
    """
    usable = max_num_seqs * blocks_per_sequence
    affordable = int(free_bytes * DEFAULT_FREE_MEMORY_SHARE) // spec.block_bytes
    return 1 + max(1, min(usable, affordable))


def free_memory_bytes() -> int:
    """Return the bytes that this process may still take: what the machine has free, or its container leaves."""
    free = _machine_free_bytes()
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_int(Path(limit_file)), _read_int(Path(usage_file))
        if limit is not None and usage is not None:
            free = min(free, max(0, limit - usage))
    return free


def _machine_free_bytes() -> int:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no Linux: the modest guess below is better than no server
    return 4 * 2**30


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or the word "max"
        return None
