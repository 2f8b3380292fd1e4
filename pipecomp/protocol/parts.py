"""Values that stand inside messages: stages, tensors, samples, norms. Knows ids and sizes; no message that carries them."""

from __future__ import annotations

import msgspec


class StageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage is."""

    stage: int
    rank: int
    first_layer: int
    end_layer: int
    worker: str
    data_address: str
    needs_input_gradient: bool  # some trainable parameter lies in an earlier stage
    message_nbytes: int = 0  # what the stage's worker can keep of messages, for each end of a link that it holds


class ReplicaAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the same stages in another replica."""

    replica: int
    worker: str
    data_address: str


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint tensor that the coordinator can send."""

    name: str
    dtype: str  # safetensors' names: F32, BF16, F16
    shape: tuple[int, ...]
    nbytes: int
    content_hash: str  # xxh3-64 of its bytes, hexadecimal


class SampleRef(msgspec.Struct, frozen=True, array_like=True):
    sample_id: int
    length: int


class SampleHeader(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a TensorMessage."""

    sample_id: int
    version: int  # of the message the values are coded against; 0: none (first visit, or a codec without messages)
    num_rows: int  # real positions; padding does not travel
    checksum: int = 0  # of that message as both ends keep it, xxh3-64; 0 where there is none
    is_kept: bool = False  # both ends keep what this visit leaves, once the step commits


class LayerNorms(msgspec.Struct, frozen=True, array_like=True):
    """Squared gradient norms (fp64) of one layer's trainable parameters, in order of definition."""

    layer: int
    squared_norms: tuple[float, ...]
