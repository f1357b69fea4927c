"""Freed memory of CPU ranks stays with the process, as that of GPUs stays with PyTorch's caching allocator.

glibc gives memory back to the system when tensors at the end of the heap are freed, and each tensor of 32 MiB and more
at once. A training step frees nearly all that it makes, so the next one gets its pages anew, and the system clears
each of them. `benchmarks/kept_memory.py` measures what that costs, and what keeping takes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of `mallopt`, glibc's malloc/malloc.h."""

_ALL = -1
"""As a trim threshold: the end of the heap is never given back (mallopt(3))."""

_LARGEST = 2**31 - 1
"""The largest size that `mallopt` takes: tensors below it come from the heap."""

_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")

KEEP = "AUTOPAR_KEEP_MEMORY"
"""Environment variable that leaves malloc as it is where it is 0."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let glibc's malloc keep what this process frees, and return whether it does.

    A user who tells malloc something else, by its variables or GLIBC_TUNABLES, or sets AUTOPAR_KEEP_MEMORY=0, is left
    alone; so is any other C library. A glibc that takes no such threshold gets all tensors from the heap instead.
    """
    if (
        environment.get(KEEP) == "0"
        or any(name in environment for name in _OWN)
        or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    ):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    tell = ctypes.CDLL(None).mallopt
    return bool(tell(_TRIM_THRESHOLD, _ALL) and (tell(_MMAP_THRESHOLD, _LARGEST) or tell(_MMAP_MAX, 0)))
