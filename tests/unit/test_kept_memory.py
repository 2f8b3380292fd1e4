"""Memory that a worker frees stays with it, so that what it allocates next takes no fresh pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipecomp.runtime import memory

SCRIPT = """
import resource
from pipecomp.runtime.memory import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [bytearray(6 << 20) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = pages()
told = keep_freed_memory()
pages()
print(usual, told, pages())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is glibc that is told")
def test_what_is_freed_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    usual, told, kept = done.stdout.split()
    if told == "False":
        pytest.skip("another C library than glibc")
    assert int(usual) > 5 * 8 * 2  # 1536 pages of 4 kB a block; where the kernel gives large ones, three
    assert int(kept) < int(usual) / 4


def test_a_c_library_that_cannot_be_told_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    assert not memory.keep_freed_memory()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_freed_memory()
