"""How much memory this process has needed. Knows the operating system only."""

from __future__ import annotations

import resource
import sys


def peak_memory_nbytes() -> int:
    """Peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
