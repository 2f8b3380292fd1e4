"""Memory for large arrays that come and go in the same sizes, step after step. Knows the operating system and sizes only.

    empty(n) --> array --- its last view is gone ---> kept, pages and all --> empty(n) --> ...

A message of some megabytes is freed when a step commits, and one of its size is allocated in the next step. A C library's
allocator gives such memory back to the system in between, or splits it, and every fresh page has to be found and cleared again:
that took more processor time than coding did. Here a block goes from one array to the next of its size class as it is.

Never more is kept than what was in use at once before: where arrays of one size take the place of another's, the blocks that
were free for longest go back.
"""

from __future__ import annotations

import collections
import contextlib
import math
import mmap
import threading
import weakref

import numpy as np
import numpy.typing as npt

LEAST_NBYTES = 1 << 20
"""Smaller arrays are the C library's: it does well with them."""
_PARTS = 8
"""Size classes between a power of two and the next: at most an eighth of a block is never touched."""
_LARGE_PAGE_NBYTES = 1 << 21
"""On most machines."""


class BlockPool:
    """Blocks of one process. Every method may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: collections.OrderedDict[int, list[mmap.mmap]] = collections.OrderedDict()  # the longest unused size first
        self._returned: collections.deque[tuple[int, mmap.mmap]] = collections.deque()
        self._nbytes = 0  # of all blocks, in use or free
        self._free_nbytes = 0
        self._most_used_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Of all blocks, in use or kept."""
        with self._lock:
            self._take_back()
            return self._nbytes

    def empty(self, num_values: int) -> npt.NDArray[np.float32]:
        """A writable (num_values,) fp32 array of undefined values. Its memory is used again once nothing refers to it."""
        nbytes = 4 * num_values
        if nbytes < LEAST_NBYTES:
            return np.empty(num_values, np.float32)
        size = block_nbytes(nbytes)
        memory = self._take(size, nbytes)
        array = np.frombuffer(memory, np.float32, num_values)
        # Called in whatever thread drops the last reference, and by the garbage collector at any moment: so without a lock.
        weakref.finalize(array, self._returned.append, (size, memory)).atexit = False
        return array

    def _take(self, size: int, nbytes: int) -> mmap.mmap:
        with self._lock:
            self._take_back()
            same = self._free.get(size)
            if same:
                memory = same.pop()
                self._free_nbytes -= size
                self._forget_if_empty(size)
            else:
                memory = _fresh(size, nbytes)
                self._nbytes += size
            self._most_used_nbytes = max(self._most_used_nbytes, self._nbytes - self._free_nbytes)
            self._give_back()
        return memory

    def _take_back(self) -> None:
        while self._returned:
            size, memory = self._returned.popleft()
            self._free.setdefault(size, []).append(memory)
            self._free.move_to_end(size)
            self._free_nbytes += size

    def _give_back(self) -> None:
        while self._nbytes > self._most_used_nbytes and self._free:
            size = next(iter(self._free))
            self._free[size].pop()  # unmapped with its last reference
            self._free_nbytes -= size
            self._nbytes -= size
            self._forget_if_empty(size)

    def _forget_if_empty(self, size: int) -> None:
        if not self._free[size]:
            del self._free[size]


def block_nbytes(nbytes: int) -> int:
    """The size class of so many bytes: what a block of it has."""
    part = max(mmap.PAGESIZE, (1 << max(nbytes - 1, 1).bit_length() - 1) // _PARTS)
    return math.ceil(nbytes / part) * part


def _fresh(size: int, nbytes: int) -> mmap.mmap:
    """A block of `size`, whose first `nbytes` are going to be written: large pages for these, so that the rest takes none."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # not Unix
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the default is shared with forked processes
    option, whole = getattr(mmap, "MADV_HUGEPAGE", None), nbytes // _LARGE_PAGE_NBYTES * _LARGE_PAGE_NBYTES
    if option is not None and whole:
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(option, 0, whole)
    return memory


_POOL = BlockPool()
empty = _POOL.empty
"""Of this process's one pool: see `BlockPool.empty`."""
