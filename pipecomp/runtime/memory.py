"""How much memory this process has needed, and what becomes of memory that it frees. Knows the operating system only."""

from __future__ import annotations

import ctypes
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of mallopt(3)."""
_LARGEST = 32 << 20
"""Bytes of a block; the most that glibc takes for this."""


def peak_memory_nbytes() -> int:
    """Peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees for what it allocates next; whether the C library is one that can be told so.

    A tensor of some megabytes that is freed goes back to the system otherwise, and the next one of its size is made of fresh
    pages, each of which the kernel has to find and clear: for activations and messages of 6.5 MB that was a third of all
    processor time of a step. What is kept is what was in use at once before. Larger blocks than `_LARGEST` still go back.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; musl has none
    if mallopt is None:
        return False
    return all(mallopt(option, value) == 1 for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, 2**31 - 1)))
