"""What a schedule is: for each rank, the order of its actions in one step. Indices only; no time, no tensors, no sockets.

The words are those of torch.distributed.pipelining: an action `2F0` is the forward of stage 2 for microbatch 0, `2B0` its
backward. A rank may hold several stages (`ranks[stage]` says which rank holds a stage). In every schedule each stage's
backwards run in the order of the microbatches, so that gradients are summed in that order (law 1).
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipecomp.types import MicrobatchIndex, Rank, StageIndex


class ActionKind(enum.Enum):
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"
    """The part of a backward pass that a stage may leave for later. In no schedule's order: it is computed where a rank would
    wait, and at the latest when the run file's `num_deferred` is reached."""


class Action(NamedTuple):
    """One piece of compute; prints as `2F0` (stage 2, forward, microbatch 0)."""

    stage: StageIndex
    kind: ActionKind
    microbatch: MicrobatchIndex

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class Schedule(abc.ABC):
    """Orders the actions of every rank."""

    name: str

    @classmethod
    @abc.abstractmethod
    def from_options(cls, options: Mapping[str, object]) -> Schedule:
        """Build from a run file's options (`num_in_flight` for `1f1b`). Raises ConfigError for one that is not known."""

    @abc.abstractmethod
    def actions(self, ranks: Sequence[Rank], num_microbatches: int) -> list[list[Action]]:
        """The ordered actions of each rank, index = rank.

        Args:
            ranks: for each stage the rank that holds it; rank numbers are 0 .. max without gaps. `[0, 1, 2, 0]` is three
                ranks whose first also holds the last stage.
            num_microbatches: at least 1; may be fewer than the stages.
        """
