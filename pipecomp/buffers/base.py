"""Where the per-sample messages m(xi) of one end of one link live between steps. Knows tensors and steps, not codecs or sockets.

    get      what the last committed step left
    stage    what this step would leave; readers do not see it yet
    commit   make it so            abort   forget it

Nothing staged is visible before `commit`, so an aborted step leaves no trace (law 3). All calls come from codec threads and
from the event loop, so implementations are thread-safe.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch

from pipecomp.types import SampleId


class SampleMessage(NamedTuple):
    """What both ends of a link agree a sample's activation to be."""

    version: int  # 1 after the first committed visit, one more for each later one
    values: torch.Tensor  # (L, H) fp32, read-only by agreement


class MessageBuffer(abc.ABC):
    """One end of one link's messages."""

    @abc.abstractmethod
    def get(self, sample_id: SampleId) -> SampleMessage | None:
        """The committed message, or None before the first committed visit."""

    @abc.abstractmethod
    def stage(self, step: int, sample_id: SampleId, message: SampleMessage) -> None:
        """Keep `message` aside for `step`. Raises LocalProtocolError if the sample is already staged in this step."""

    @abc.abstractmethod
    def commit(self, step: int) -> None:
        """Make all that was staged for `step` the committed messages."""

    @abc.abstractmethod
    def abort(self, step: int) -> None:
        """Drop all that was staged for `step`."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of values held now, staged ones included."""

    @abc.abstractmethod
    def digest(self) -> dict[SampleId, tuple[int, int]]:
        """For each committed sample its version and the xxh3-64 of its values' bytes; equal at both ends (law 2)."""
