"""One sample's tensors as the flat arrays that kernels take. Knows tensors and arrays; knows no codec.

What is wrong with a tensor is refused here, by name, so that no codec meets it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from pipecomp.errors import CodecError, CorruptPayload, NonFiniteValues
from pipecomp.native import blocks
from pipecomp.types import TensorSpec

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]


def spec_of(values: torch.Tensor) -> TensorSpec:
    """Shape of a sample; CodecError unless it is (L, H) fp32 in this machine's memory."""
    if values.dtype != torch.float32 or values.dim() != 2:
        raise CodecError(f"a sample must be an (L, H) float32 tensor, got {tuple(values.shape)} {values.dtype}")
    if values.device.type != "cpu":
        raise CodecError(f"a sample must be in the processor's memory to be encoded, got one on {values.device}")
    num_rows, num_columns = values.shape
    return TensorSpec(num_rows, num_columns)


def flat(values: torch.Tensor) -> FloatArray:
    """(L, H) fp32 -> (L * H,), without a copy if the tensor is contiguous."""
    values = values.detach() if values.requires_grad else values
    array: FloatArray = values.contiguous().numpy().reshape(-1)
    return array


def flat_message(message: torch.Tensor | None, spec: TensorSpec) -> FloatArray | None:
    """The same for a message, which must have the shape of its sample."""
    if message is None:
        return None
    found = spec_of(message)
    if found != spec:
        raise CodecError(f"a message must have its sample's shape {spec}, got {found}")
    return flat(message)


def new(spec: TensorSpec) -> tuple[torch.Tensor, FloatArray]:
    """An (L, H) fp32 tensor that nobody else has, its values undefined, and its memory as a flat array."""
    array = blocks.empty(spec.num_values)
    values = torch.from_numpy(array).view(spec.num_rows, spec.num_columns)
    return values, values.numpy().reshape(-1)


def check_out(out: ByteArray, nbytes: int) -> None:
    """CodecError unless an encoder may write its `nbytes` bytes to `out`."""
    if out.dtype != np.uint8 or out.shape != (nbytes,) or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(f"out must be {nbytes} writable contiguous bytes, got {out.dtype} {out.shape}")


def check_buffer(buffer: ByteArray, nbytes: int) -> None:
    """CorruptPayload unless a buffer has the size that its encoder gives it."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise CodecError(f"an encoded buffer must be flat uint8, got {buffer.dtype} {buffer.shape}")
    if buffer.size != nbytes:
        raise CorruptPayload(f"an encoded buffer of {nbytes} bytes was expected, got {buffer.size}")


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. The sum of a sample with such a value is not finite; only then look at each."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def check_finite(values: torch.Tensor) -> None:
    """NonFiniteValues, saying where, unless all values are finite."""
    if not is_finite(values):
        bad = torch.nonzero(~torch.isfinite(values.reshape(-1)))
        where = int(bad[0, 0])
        shown = float(values.reshape(-1)[where])
        raise NonFiniteValues(f"value {where} is {shown} ({len(bad)} of {values.numel()} values are not finite)")
