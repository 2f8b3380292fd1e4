"""Read tensors from safetensors files, one at a time. Knows files and names; not which model they belong to.

    names in the model     `transformer.h.0.ln_1.weight`      what everybody asks for
    names in the files     `h.0.ln_1.weight`                  some checkpoints leave the prefix out

Nothing is read before it is asked for, and a file that holds no wanted tensor is never opened (nor fetched from the hub).
Pickled weights are refused: reading one runs whatever code it carries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
import xxhash

from pipecomp.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "model.pt", "model.bin")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(msgspec.Struct, frozen=True):
    """What a file says about one tensor before it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' spelling: F32, F16, BF16, F64
    nbytes: int


class CheckpointReader(Mapping[str, torch.Tensor]):
    """Tensors of one checkpoint by the model's own names.

    Args:
        files: file name of each stored tensor, or one file name that holds them all.
        locate: path of a file by name; may fetch it.
        prefix: what the model's names start with and the files may leave out (`transformer.`).
        aliases: other names under which a tensor may be stored (a tied weight's two names).

    Attributes:
        num_bytes_read: bytes of all tensors read so far.
    """

    def __init__(
        self,
        files: Mapping[str, str] | str,
        locate: Callable[[str], Path],
        *,
        prefix: str = "",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._files = files
        self._locate = locate
        self._prefix = prefix
        self._aliases = dict(aliases or {})
        self._index: dict[str, str] | None = None
        self.num_bytes_read = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._stored(name)
        with _open(self._locate(self._names()[stored])) as file:
            tensor: torch.Tensor = file.get_tensor(stored)
        self.num_bytes_read += tensor.nbytes
        return tensor

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Names as the files have them."""
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, each read when it is its turn."""
        for name in names:
            yield name, self[name]

    def entry(self, name: str) -> StoredTensor:
        """Shape, dtype and size of a tensor, from its file's header."""
        stored = self._stored(name)
        with _open(self._locate(self._names()[stored])) as file:
            view = file.get_slice(stored)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if dtype not in _DTYPES:
            raise ConfigError(f"tensor {name} is {dtype}; only {', '.join(_DTYPES)} can be read: use an unquantized model")
        count = 1
        for size in shape:
            count *= size
        return StoredTensor(name, shape, dtype, count * _DTYPES[dtype].itemsize)

    def digest(self, name: str) -> str:
        """xxh3_64 of a tensor's bytes as they are stored (little-endian, row-major), 16 hexadecimal digits."""
        return xxhash.xxh3_64_hexdigest(tensor_bytes(self[name]))

    def _stored(self, name: str) -> str:
        stored = self._find(name)
        if stored is None:
            raise KeyError(name)
        return stored

    def _find(self, name: str) -> str | None:
        names = self._names()
        for candidate in (name, self._aliases.get(name)):
            if candidate is None:
                continue
            for stored in (candidate, candidate.removeprefix(self._prefix)):
                if stored in names:
                    return stored
        return None

    def _names(self) -> dict[str, str]:
        if self._index is None:
            if isinstance(self._files, str):
                with _open(self._locate(self._files)) as file:
                    self._index = dict.fromkeys(file.keys(), self._files)
            else:
                self._index = dict(self._files)
        return self._index


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, row-major, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_index(path: Path) -> dict[str, str]:
    """Stored name -> file name, from a sharded checkpoint's index. Raises ConfigError."""
    try:
        weight_map = msgspec.convert(json.loads(path.read_text(encoding="utf-8"))["weight_map"], dict[str, str])
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as e:
        raise ConfigError(f"{path} is not the index of a sharded checkpoint: {e}") from e
    for file in set(weight_map.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{path} names the file {file!r}: only .safetensors files beside the index are read")
    return weight_map


def _open(path: Path) -> Any:  # noqa: ANN401 - safetensors' handle has no public type
    try:
        return safetensors.safe_open(str(path), framework="pt", device="cpu")
    except (OSError, safetensors.SafetensorError) as e:
        raise ConfigError(f"cannot read weights from {path}: {e}. Is the file whole? Download or copy it again") from e
