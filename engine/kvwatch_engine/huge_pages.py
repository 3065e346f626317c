"""Memory of torch on a CPU in huge pages, where the system gives them when asked (Linux, `madvise`).

Weights are read from end to end in every step; in pages of 4 KiB the processor walks the page tables for each of them.
NumPy, which the KV cache's memory comes from, asks by itself.
"""

import os
from typing import Final

VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"
"""torch asks for huge pages for memory of 2 MiB and more if it is 1."""


def use_huge_pages() -> None:
    """Have torch ask, unless the user has decided otherwise. Call it before torch allocates anything."""
    os.environ.setdefault(VARIABLE, "1")
