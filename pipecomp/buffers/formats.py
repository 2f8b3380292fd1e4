"""How a message is kept: its bytes, their checksum, and back. Knows tensors and kernels; knows no steps, files or links.

    values (L, H) fp32 --pack--> StoredMessage(version, checksum, shape, payload) --unpack--> values (L, H) fp32

Both ends of a link pack what they agree on with the same format, and read back what they packed: so a coarse format makes both
messages coarse in the same way (law 2). The checksum is of the packed bytes; it travels with every later visit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipecomp.errors import CorruptPayload, NonFiniteValues
from pipecomp.native import ops
from pipecomp.types import TensorSpec

MessageDtype = Literal["fp32", "bf16", "int8", "int4"]
ByteArray = npt.NDArray[np.uint8]

_LAYOUTS = {"int8": ops.Layout(8, 64), "int4": ops.Layout(4, 64)}
_LARGEST = {"int8": 1e38, "int4": 1e38}


class StoredMessage(NamedTuple):
    """One sample's message as it is kept, and as it travels whole."""

    version: int  # the step that left it
    checksum: int  # xxh3-64 of the payload
    spec: TensorSpec
    payload: ByteArray  # (format.nbytes(spec),) uint8, read-only by agreement


class MessageFormat(NamedTuple):
    """fp32 as it is; bf16 rounded to nearest, ties to even; int8 and int4 quantized in groups of 64 with bf16 scales."""

    dtype: MessageDtype

    def nbytes(self, spec: TensorSpec) -> int:
        """Exact bytes of a packed message."""
        if self.dtype in _LAYOUTS:
            return ops.payload_nbytes(spec.num_values, _LAYOUTS[self.dtype])
        return spec.num_values * (4 if self.dtype == "fp32" else 2)

    def pack(self, version: int, values: torch.Tensor) -> StoredMessage:
        """Keep (L, H) fp32 `values`. The payload shares their memory in fp32, so they must not change afterwards."""
        spec = TensorSpec(values.shape[0], values.shape[1])
        payload = self._packed(values.contiguous(), spec)
        return StoredMessage(version, checksum(payload), spec, payload)

    def unpack(self, stored: StoredMessage) -> torch.Tensor:
        """(L, H) fp32; shares the payload's memory in fp32. Raises CorruptPayload where no `pack` wrote the payload."""
        rows, columns = stored.spec.num_rows, stored.spec.num_columns
        payload = stored.payload
        if payload.size != self.nbytes(stored.spec):
            raise CorruptPayload(f"a message of {self.nbytes(stored.spec)} bytes was expected, got {payload.size}")
        if self.dtype in _LAYOUTS:
            values = torch.empty((rows, columns), dtype=torch.float32)
            ops.decode(payload, _LAYOUTS[self.dtype], out=values.numpy().reshape(-1))
            return values
        if not payload.flags.writeable or payload.ctypes.data % 4:  # torch takes aligned memory that may be written
            payload = payload.copy()
        raw = torch.from_numpy(payload)
        if self.dtype == "fp32":
            return raw.view(torch.float32).view(rows, columns)
        return raw.view(torch.bfloat16).view(rows, columns).float()

    def warm_up(self) -> None:
        """Compile, or load, the kernels that packing and unpacking call."""
        if self.dtype in _LAYOUTS:
            ops.warm_up(_LAYOUTS[self.dtype], has_message=False)

    def _packed(self, values: torch.Tensor, spec: TensorSpec) -> ByteArray:
        if self.dtype == "fp32":
            return values.numpy().reshape(-1).view(np.uint8)
        if self.dtype == "bf16":
            return values.bfloat16().view(torch.uint8).numpy().reshape(-1)
        payload = np.empty(self.nbytes(spec), np.uint8)
        try:
            ops.encode(values.numpy().reshape(-1), _LAYOUTS[self.dtype], out=payload)
        except NonFiniteValues:  # a sum that overflowed: both ends hold the same, and the next visit is sent afresh
            limit = _LARGEST[self.dtype]
            bounded = torch.nan_to_num(values, nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)
            ops.encode(bounded.numpy().reshape(-1), _LAYOUTS[self.dtype], out=payload)
        return payload


def checksum(payload: ByteArray) -> int:
    """xxh3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(payload.data)


def is_intact(stored: StoredMessage) -> bool:
    """Whether the payload has the checksum that it was stored with."""
    return checksum(stored.payload) == stored.checksum
