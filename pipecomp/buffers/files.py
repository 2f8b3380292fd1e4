"""The folder of a message store and the system calls on it: manifest, lock, reads and writes. Knows no records and no threads.

    FOLDER/store.json         format and identity: what the messages belong to
           lock               held by the one process that has the store open
           00000001.segment   records back to back; never written again once the next one exists
           0000000c.index     what the records up to some point come to

No call but `sync` waits for a disk to be done: what a power failure takes is known by its checksum to be gone, and each sample's
first visit is sent again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipecomp.buffers.formats import ByteArray
from pipecomp.buffers.records import FORMAT_VERSION
from pipecomp.errors import StoreError

Identity = Mapping[str, str | int | float | bool | None]
"""What a store's messages belong to: run configuration, link, end, dtype, ..."""

BLOCK_NBYTES = 4096  # what direct reads are aligned to
_DIRECT = getattr(os, "O_DIRECT", 0)


class DiskCalls:
    """The calls that move rows. They release the interpreter's lock. Tests put faults here."""

    def create(self, path: Path) -> int:
        """A descriptor to append to a file that must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
        """Append all of it."""
        left = sum(len(part) for part in parts)
        done = os.writev(descriptor, parts)
        if done == left:
            return
        rest = memoryview(b"".join(parts))[done:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def read(self, path: Path, offset: int, into: ByteArray, *, direct: bool) -> int:
        """Fill `into` from `offset`; answers how many bytes there were. `direct`: past the page cache, all of it aligned."""
        descriptor = os.open(path, os.O_RDONLY | (_DIRECT if direct else 0))
        try:
            done = 0
            while done < into.size:
                count = os.preadv(descriptor, [into.data[done:]], offset + done)
                done += count
                if count == 0 or (direct and done % BLOCK_NBYTES):
                    break
            return done
        finally:
            os.close(descriptor)


def aligned(nbytes: int) -> ByteArray:
    """A new array at a multiple of a block."""
    raw = np.empty(nbytes + BLOCK_NBYTES, np.uint8)
    start = -raw.ctypes.data % BLOCK_NBYTES
    return raw[start : start + nbytes]


def sync(path: Path) -> None:
    """Wait until the disk has a file or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> tuple[Path, ...]:
    """Make a folder, and those that it is in; those that were not there, innermost first. Raises StoreError."""
    missing = tuple(each for each in (path, *path.parents) if not each.exists())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _cannot_be_written(path, e) from e
    return missing


def _cannot_be_written(path: Path, error: OSError) -> StoreError:
    return StoreError(f"message store {path}: {error.strerror}; choose a folder that can be written (--store-folder)")


class StoreFolder:
    """A folder that this process alone has open, and that belongs to `identity`."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Raises StoreError: the folder is in use, cannot be written, or holds something else. Says what to do."""
        self.path = path
        make_folder(path)
        try:
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise _cannot_be_written(path, e) from e
        try:
            self._take_lock()
            self._check_manifest(dict(identity))
        except BaseException:
            os.close(self._lock)
            raise

    def segment(self, number: int) -> Path:
        return self.path / f"{number:08x}.segment"

    def index(self, number: int) -> Path:
        return self.path / f"{number:08x}.index"

    def numbers(self, kind: str) -> list[int]:
        """Of the files NUMBER.KIND, ascending. Other files are left alone."""
        found = []
        for path in self.path.glob(f"*.{kind}"):
            try:
                found.append(int(path.stem, 16))
            except ValueError:
                continue
        return sorted(found)

    def replace(self, path: Path, content: bytes) -> None:
        """Write a whole file; it is there with all its bytes or not at all."""
        fresh = path.with_name(f"{path.name}.new")
        try:
            fresh.write_bytes(content)
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)  # a full disk needs the space
            raise

    def reads_directly(self) -> bool:
        """Whether this file system can read past the page cache."""
        try:
            os.close(os.open(self.path / "store.json", os.O_RDONLY | _DIRECT))
        except OSError:
            return False
        return _DIRECT != 0

    def copy_to(self, target: Path, paths: Sequence[Path]) -> None:
        """Link files that are never written again into another folder (copy where it cannot be linked), and the manifest last."""
        if target.exists() and any(target.iterdir()):
            raise StoreError(f"checkpoint {target}: the folder is not empty; choose another or delete it")
        target.mkdir(parents=True, exist_ok=True)
        for path in paths:
            try:
                os.link(path, target / path.name)
            except OSError as e:
                if e.errno == errno.ENOENT:
                    continue  # it was lost before
                shutil.copyfile(path, target / path.name)
            sync(target / path.name)
        shutil.copyfile(self.path / "store.json", target / "store.json")
        sync(target / "store.json")
        sync(target)

    def close(self) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise StoreError(
                f"message store {self.path}: another process has it open; wait for it to end or choose another folder "
                "(--store-folder)"
            ) from e
        except OSError as e:
            raise StoreError(
                f"message store {self.path} cannot be locked: {e.strerror}; choose a folder on a local disk (--store-folder)"
            ) from e

    def _check_manifest(self, identity: dict[str, Any]) -> None:
        manifest = self.path / "store.json"
        ours = {"format": FORMAT_VERSION, "identity": identity}
        advice = "delete the folder or choose another (--store-folder)"
        try:
            if not manifest.exists():
                strangers = sorted(p.name for p in self.path.iterdir() if p.name not in ("lock", "store.json.new"))
                if strangers:
                    raise StoreError(
                        f"message store {self.path}: the folder has {strangers[0]} and no store.json; {advice}"
                    )
                self.replace(manifest, json.dumps(ours, indent=1, sort_keys=True).encode())
            found = json.loads(manifest.read_bytes())
        except OSError as e:
            raise _cannot_be_written(self.path, e) from e
        except ValueError as e:
            raise StoreError(f"message store {self.path}: store.json cannot be read ({e}); {advice}") from e
        if not isinstance(found, dict) or not isinstance(found.get("identity"), dict):
            raise StoreError(f"message store {self.path}: store.json holds no identity; {advice}")
        if found.get("format") != FORMAT_VERSION:
            written = found.get("format")
            raise StoreError(
                f"message store {self.path}: written in format {written}, this version reads {FORMAT_VERSION}; {advice}"
            )
        theirs = found["identity"]
        wanted = json.loads(json.dumps(identity))
        differing = [key for key in sorted({*theirs, *wanted}) if theirs.get(key) != wanted.get(key)]
        if differing:
            said = ", ".join(f"{key} is {theirs.get(key)!r} there and {wanted.get(key)!r} here" for key in differing)
            raise StoreError(f"message store {self.path} belongs to something else: {said}; {advice}")
