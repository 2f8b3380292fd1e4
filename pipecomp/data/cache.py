"""Keep a tokenized data set on disk and map it back. Knows a folder of plain arrays; knows no tokenizer and no text.

One entry is a folder named by its key, with one .npy file for each array and `counts.json` with their checksums. It is
written under another name and renamed, so a reader sees all of it or none. What does not check out is rebuilt, never used.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from pipecomp.data.samples import Counts, Dataset, SampleTable

_LOGGER = logging.getLogger(__name__)
_DTYPES = dict(zip(SampleTable._fields, ("<i4", "|b1", "<i8", "<i8", "<i8", "<i8", "<u8"), strict=True))


class _Manifest(msgspec.Struct, frozen=True):
    counts: Counts
    checksums: dict[str, str]
    class_names: tuple[str, ...]


def read_entry(folder: Path) -> Dataset | None:
    """The data set kept in `folder`, its arrays mapped read-only; None if there is none or it is damaged."""
    if not folder.is_dir():
        return None
    try:
        manifest = msgspec.json.decode((folder / "counts.json").read_bytes(), type=_Manifest)
        table = SampleTable(*(_read_array(folder, name, manifest) for name in SampleTable._fields))
        return Dataset(table, manifest.counts, manifest.class_names)
    except (OSError, ValueError, KeyError, msgspec.MsgspecError) as e:
        _LOGGER.warning("the cached data set %s is damaged (%s); tokenizing again", folder, e)
        return None


def write_entry(folder: Path, dataset: Dataset) -> None:
    """Keep `dataset` in `folder`, in place of what is there. A cache that cannot be written is only slower: it is logged."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write_arrays(partial, dataset)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as e:
        _LOGGER.warning("cannot keep the tokenized data set in %s: %s", folder, e)


def _write_arrays(folder: Path, dataset: Dataset) -> None:
    checksums: dict[str, str] = {}
    for name, dtype in _DTYPES.items():
        path = folder / f"{name}.npy"
        np.save(path, np.asarray(getattr(dataset.table, name), dtype=dtype), allow_pickle=False)
        checksums[name] = _checksum(path)
    (folder / "counts.json").write_bytes(msgspec.json.encode(_Manifest(dataset.counts, checksums, dataset.class_names)))


def _read_array(folder: Path, name: str, manifest: _Manifest) -> np.ndarray:
    path = folder / f"{name}.npy"
    if _checksum(path) != manifest.checksums[name]:
        raise ValueError(f"{path.name} has another checksum")
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
