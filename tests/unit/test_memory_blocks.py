"""Blocks of memory that go from one array to the next: never two arrays on one block, and never more kept than was in use."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.native.blocks import LEAST_NBYTES, BlockPool, block_nbytes

MB = 1 << 20
NUM_VALUES = MB // 2  # 2 MB


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_a_block_is_used_again_once_nothing_refers_to_it():
    pool = BlockPool()
    array = pool.empty(NUM_VALUES)
    array[:] = 1.0
    place = address(array)
    part = array[10:20].reshape(2, 5)
    del array
    other = pool.empty(NUM_VALUES)
    assert address(other) != place  # a view still refers to it
    assert part.sum() == 10.0
    del part
    assert address(pool.empty(NUM_VALUES)) == place


def test_a_tensor_keeps_its_block_and_so_does_every_view_of_it():
    pool = BlockPool()
    tensor = torch.from_numpy(pool.empty(NUM_VALUES)).view(-1, 8)
    tensor[:] = 3.0
    place = tensor.data_ptr()
    view = tensor[1:3].unsqueeze(0)
    back = tensor.numpy().reshape(-1)
    del tensor
    for _ in range(4):
        pool.empty(NUM_VALUES)[:] = 7.0
    assert float(view.sum()) == 48.0
    del view
    pool.empty(NUM_VALUES)[:] = 7.0
    assert float(back.max()) == float(back.min()) == 3.0
    del back
    assert address(pool.empty(NUM_VALUES)) == place


def test_arrays_are_writable_and_of_the_size_asked_for():
    for num_values in (0, 1, LEAST_NBYTES // 4 - 1, LEAST_NBYTES // 4, NUM_VALUES + 1):
        array = BlockPool().empty(num_values)
        assert (array.shape, array.dtype) == ((num_values,), np.float32)
        assert array.flags.writeable and array.flags.c_contiguous


def test_small_arrays_take_no_block():
    pool = BlockPool()
    assert pool.empty(LEAST_NBYTES // 4 - 1).nbytes < LEAST_NBYTES
    assert pool.nbytes == 0


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, LEAST_NBYTES, LEAST_NBYTES + 1, 6_553_600, 2**24 - 1, 2**24, 2**24 + 1])
def test_a_size_class_holds_what_is_asked_for_and_little_more(nbytes: int):
    size = block_nbytes(nbytes)
    assert nbytes <= size <= max(4096 * -(-nbytes // 4096), nbytes * 9 / 8 + 1)
    assert block_nbytes(size) == size


def test_sizes_that_take_turns_keep_no_more_than_was_in_use_at_once():
    pool = BlockPool()
    sizes = [NUM_VALUES * n for n in (1, 2, 3, 4, 5)]
    for _ in range(3):
        for num_values in sizes:
            held = [pool.empty(num_values)]
            assert pool.nbytes <= 4 * max(sizes)
            del held
    assert pool.nbytes <= 4 * max(sizes)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=60))
def test_no_two_arrays_share_memory_and_the_peak_bounds_what_is_kept(calls: list[tuple[int, bool]]):
    pool = BlockPool()
    held: list[np.ndarray] = []
    most = 0
    for number, (factor, frees) in enumerate(calls):
        if frees and held:
            held.pop(number % len(held))
        held.append(pool.empty(factor * LEAST_NBYTES // 4))
        held[-1][:] = number
        most = max(most, sum(block_nbytes(array.nbytes) for array in held))
        assert pool.nbytes <= most
    spans = sorted((address(array), address(array) + array.nbytes) for array in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for array in held:
        assert array.min() == array.max()


def test_arrays_dropped_by_other_threads_and_the_collector_come_back():
    pool = BlockPool()
    failures: list[str] = []

    def work(number: int) -> None:
        for turn in range(200):
            array = pool.empty(NUM_VALUES)
            array[0], array[-1] = number, turn
            cycle: list[object] = [array]
            cycle.append(cycle)  # freed by the collector alone
            if (array[0], array[-1]) != (number, turn):
                failures.append(f"thread {number}, turn {turn}")
            del array, cycle

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    held = [pool.empty(NUM_VALUES) for _ in range(4)]
    assert not failures
    assert len({address(array) for array in held}) == 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are counted as Linux does")
def test_what_is_used_again_takes_no_fresh_pages():
    import resource

    pool = BlockPool()

    def pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            arrays = [pool.empty(6 * MB // 4) for _ in range(8)]
            for array in arrays:
                array[:] = 1.0
            del arrays, array
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    fresh = pages()
    assert fresh >= 8 * 2  # large pages at best
    assert pages() < fresh / 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_writes_to_memory_of_its_own():
    array = BlockPool().empty(NUM_VALUES)
    array[:] = 1.0
    child = os.fork()
    if not child:
        array[:] = 2.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert array.max() == 1.0
