"""Compiled kernels are kept on disk for other processes, several of which may write at once; a bad folder costs only time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core import caching

from pipecomp.native import cpu

# Encode with each kernel asked for and print, for each, whether it came from the cache and whether it is right.
PROGRAM = """
import sys
import numpy as np
from pipecomp.native import cpu, ops, reference
values = np.linspace(-1, 1, 200, dtype=np.float32)
for bits in map(int, sys.argv[1:]):
    layout = ops.Layout(bits, 64)
    payloads = [np.zeros(ops.payload_nbytes(200, layout), np.uint8) for _ in range(2)]
    for backend, payload in zip((cpu, reference), payloads):
        backend.encode(values, layout, payload, None, None, 0)
    kernel = cpu._encode_kernel(layout, False, False)
    print(bits, sum(kernel.stats.cache_hits.values()), np.array_equal(*payloads))
"""


def start(folder: Path, *bits: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, bits)],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return output.splitlines()


def test_processes_that_compile_at_once_share_a_folder(tmp_path: Path) -> None:
    # Numba numbers the entries of one index; were all kernels in one, the two writers could take each other's number.
    writers = [start(tmp_path, 2, 4), start(tmp_path, 4, 2)]
    for writer in writers:
        assert all(line.endswith("True") for line in outcome(writer))
    assert outcome(start(tmp_path, 2, 4)) == ["2 1 True", "4 1 True"]
    indices = sorted(path.name.partition("_bf16")[0] for path in tmp_path.rglob("*.nbi"))
    assert indices == ["cpu.encode2", "cpu.encode4"]


def test_without_a_folder_to_write_to_kernels_are_compiled_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def add_one(x):
        return x + 1

    assert cpu._compile(add_one, numba.int64(numba.int64), "add_one")(2) == 3
