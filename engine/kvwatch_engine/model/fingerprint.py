"""Content hashes of large files."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MAX_THREADS = 4


def file_digest(path: Path) -> str:
    """Return the sha256 of a file as hex digits (about 1.5 GB/s a thread; the interpreter is free meanwhile)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_fingerprint(files: Sequence[Path]) -> str:
    """Return 64 hex digits that change whenever a byte of the weights does, wherever the files lie.

    K/V computed from different weights must never be confused, so every byte counts: sampling a few would miss an
    edited tensor.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, len(files)), thread_name_prefix="fingerprint") as executor:
        digests = list(executor.map(file_digest, files))
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name}\0{digest}\n".encode())
    return whole.hexdigest()
