"""What can happen to a run, and what the coordinator does about it. Knows messages; no sockets, time or tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, NewType

from pipecomp.protocol import messages
from pipecomp.protocol.spans import SpanBatch

Peer = NewType("Peer", int)
"""One control connection, numbered by the service. A worker that was refused and comes back is another peer."""


class BatchSize(NamedTuple):
    """What one batch holds, padding never counted."""

    samples: int
    tokens: int
    targets: int  # label tokens after the shift, or classes; the loss is divided by it


class StageSplit(NamedTuple):
    """Where one stage lies."""

    stage: int
    rank: int
    first_layer: int
    end_layer: int


class RunTerms(NamedTuple):
    """What is known of a run once its model and data are read."""

    config_hash: str
    model_hash: str
    tokenizer_hash: str
    stages: tuple[StageSplit, ...]
    steps_per_epoch: int
    total_steps: int
    batch_size: Callable[[int], BatchSize]  # of a step; pure
    num_microbatches: Callable[[int], tuple[int, ...]]  # of a step, by replica; pure
    evaluation_sizes: tuple[BatchSize, ...]  # of each plan of one evaluation; empty: nothing is held out
    num_replicas: int = 1

    @property
    def num_ranks(self) -> int:
        """Workers of one replica."""
        return 1 + max(split.rank for split in self.stages)


# ---------------------------------------------------------------- events


class MessageReceived(NamedTuple):
    peer: Peer
    message: messages.ControlMessage
    buffers: tuple[memoryview, ...] = ()


class PeerDisconnected(NamedTuple):
    """A control connection broke, or carried what no worker may send."""

    peer: Peer
    reason: str


class ProcessDied(NamedTuple):
    """`launch` reaped a worker process."""

    worker: str
    description: str  # "killed by signal 9 (SIGKILL)", "exit code 1"
    by_signal: bool


class TermsReady(NamedTuple):
    """Model and data are read; workers can be let in."""

    terms: RunTerms


class StageStored(NamedTuple):
    """All trained tensors of one worker are here and written."""

    peer: Peer


class ModelSaved(NamedTuple):
    folder: str


class WorkFailed(NamedTuple):
    """Work of the coordinator itself (reading, tokenizing, saving) ended with an error."""

    reason: str


class WeightsLinkFailed(NamedTuple):
    """A worker's weights link broke, or broke the rules."""

    worker: str
    reason: str


class StopRequested(NamedTuple):
    """The person asked to stop: after the step and with the model saved, or (`urgent`) at once."""

    urgent: bool


class Tick(NamedTuple):
    """Time passed."""


Event = (
    MessageReceived
    | PeerDisconnected
    | ProcessDied
    | TermsReady
    | StageStored
    | ModelSaved
    | WorkFailed
    | WeightsLinkFailed
    | StopRequested
    | Tick
)


# ---------------------------------------------------------------- what is worth telling a person


class WorkerJoined(NamedTuple):
    worker: str
    host: str
    num_joined: int
    num_workers: int


class WorkerTurnedAway(NamedTuple):
    worker: str
    reason: str


class WorkerLoaded(NamedTuple):
    worker: str
    num_parameters: int
    num_trainable: int
    peak_memory_nbytes: int


class PhaseEntered(NamedTuple):
    phase: str


class StopNoted(NamedTuple):
    """A person wants the run to end after the step under way."""


class StepCommitted(NamedTuple):
    """One optimizer step that every stage took."""

    step: int
    train_epoch: int  # from 0
    loss: float
    learning_rate: float
    gradient_norm: float
    clip_coefficient: float
    size: BatchSize
    step_time_s: float
    reports: Mapping[str, messages.StepReport]


class MomentsFrozen(NamedTuple):
    """The warm-up of quantized Adam has ended with `step`."""

    step: int
    change: float | None  # of second moments over the last steps; None where the run file has said when


class StepAborted(NamedTuple):
    step: int
    reason: str


class EvaluationEnded(NamedTuple):
    """`step` is the number of steps before it."""

    step: int
    loss: float
    size: BatchSize
    time_s: float
    accuracy: float | None = None  # of a classifier


class TrafficReported(NamedTuple):
    """What a worker has sent since its start; replaces what it said before."""

    worker: str
    traffic: tuple[messages.Traffic, ...]


class ModelStored(NamedTuple):
    folder: str


class ClockRead(NamedTuple):
    """Round trips between a worker's clock and ours."""

    worker: str
    round_trips: tuple[messages.RoundTrip, ...]


class SpansReported(NamedTuple):
    """What a worker did since it last said so, by its own clock."""

    worker: str
    batch: SpanBatch
    num_dropped: int


Record = (
    WorkerJoined
    | WorkerTurnedAway
    | WorkerLoaded
    | PhaseEntered
    | StopNoted
    | StepCommitted
    | MomentsFrozen
    | StepAborted
    | EvaluationEnded
    | TrafficReported
    | ModelStored
    | ClockRead
    | SpansReported
)


# ---------------------------------------------------------------- effects


class Send(NamedTuple):
    peer: Peer
    message: messages.ControlMessage


class Disconnect(NamedTuple):
    """Close a connection once what was sent has left."""

    peer: Peer


class Assign(NamedTuple):
    """Send every worker its assignment; index = place."""

    epoch: int
    peers: tuple[Peer, ...]
    joins: tuple[messages.Join, ...]


class SendStep(NamedTuple):
    """Send the plan of `step` with its token buffers to all workers."""

    epoch: int
    step: int
    learning_rate: float


class SendEvaluation(NamedTuple):
    """Send plan number `part` of the held-out data, under a number that never repeats."""

    epoch: int
    evaluation: int
    part: int


class StoreStage(NamedTuple):
    """Write the trained tensors that this worker sent; answered by StageStored or WorkFailed."""

    peer: Peer
    worker: str
    num_tensors: int


class SaveModel(NamedTuple):
    """Complete the model's folder; answered by ModelSaved or WorkFailed."""


class Log(NamedTuple):
    record: Record


class Finish(NamedTuple):
    """The run is over. An empty cause: it ended well."""

    exit_code: int
    cause: str
    stopped_early: bool


Effect = Send | Disconnect | Assign | SendStep | SendEvaluation | StoreStage | SaveModel | Log | Finish
