"""Every message that crosses between processes, as frozen tagged values. Knows ids and sizes; no sockets, time or tensors.

Control session: a worker dials the coordinator.              Data links: a worker dials a neighbour or the coordinator.

    worker                          coordinator               dialling end                         listening end
    Join                     ->                               LinkHello(next_sequence)      <->    LinkHello(next_sequence)
                             <-     Welcome | Refused         TensorMessage forward         ->
                             <-     Assignment                                              <-     TensorMessage backward
    Ready                    ->                               Ack(sequence)                 <->    Ack(sequence)
                             <-     StepPlan                                                <-     Resend
                                                              Resent                        ->
    Prepared | StepFailed    ->                               WeightsRequest                ->     (the coordinator)
                             <-     Commit | Abort                                          <-     WeightsChunk
    Committed | Aborted      ->                               WeightsChunk (trained)        ->
                             <-     EvaluationPlan
    Evaluated                ->
                             <-     SendWeights
    WeightsSent              ->
    Heartbeat                ->
                             <-     HeartbeatReply
    Spans                    ->
    Failed | Goodbye         ->
                             <-     Stop

Before a plan, machines and links are measured by the messages of `surveying`.

A message with raw buffers has a field `buffer_nbytes`: the length of each frame that follows the header. `sequence` numbers
the messages of one direction of one link from 0; the link sets it. Unknown fields are ignored, so that versions can differ
by one. Times are seconds; losses and norms are fp64.
"""

from __future__ import annotations

from typing import Any

from pipecomp.protocol.clocks import RoundTrip as RoundTrip  # noqa: PLC0414 - parts of messages are had from here too
from pipecomp.protocol.parts import LayerNorms as LayerNorms  # noqa: PLC0414
from pipecomp.protocol.parts import ReplicaAddress as ReplicaAddress  # noqa: PLC0414
from pipecomp.protocol.parts import SampleHeader as SampleHeader  # noqa: PLC0414
from pipecomp.protocol.parts import SampleRef as SampleRef  # noqa: PLC0414
from pipecomp.protocol.parts import StageAddress as StageAddress  # noqa: PLC0414
from pipecomp.protocol.parts import TensorEntry as TensorEntry  # noqa: PLC0414
from pipecomp.protocol.reports import LinkMeter as LinkMeter  # noqa: PLC0414
from pipecomp.protocol.reports import StepReport as StepReport  # noqa: PLC0414
from pipecomp.protocol.reports import StoreMeter as StoreMeter  # noqa: PLC0414
from pipecomp.protocol.reports import Traffic as Traffic  # noqa: PLC0414
from pipecomp.protocol.surveying import Echo as Echo  # noqa: PLC0414
from pipecomp.protocol.surveying import LayerFigures as LayerFigures  # noqa: PLC0414
from pipecomp.protocol.surveying import LinkSurveyed as LinkSurveyed  # noqa: PLC0414
from pipecomp.protocol.surveying import MachineSurveyed as MachineSurveyed  # noqa: PLC0414
from pipecomp.protocol.surveying import SpeedChunk as SpeedChunk  # noqa: PLC0414
from pipecomp.protocol.surveying import SpeedProbe as SpeedProbe  # noqa: PLC0414
from pipecomp.protocol.surveying import SpeedTaken as SpeedTaken  # noqa: PLC0414
from pipecomp.protocol.surveying import SpeedTold as SpeedTold  # noqa: PLC0414
from pipecomp.protocol.surveying import SpeedTurn as SpeedTurn  # noqa: PLC0414
from pipecomp.protocol.surveying import SurveyLink as SurveyLink  # noqa: PLC0414
from pipecomp.protocol.surveying import SurveyMachine as SurveyMachine  # noqa: PLC0414
from pipecomp.protocol.tagged import Tagged
from pipecomp.types import Kind

PROTOCOL_VERSION = 1


# ---------------------------------------------------------------- joining


class Join(Tagged, frozen=True, kw_only=True):
    """A worker asks to take part. An empty hash claims nothing; one that is given must equal the coordinator's."""

    protocol_version: int
    version: str
    worker: str
    host: str
    process_id: int
    data_address: str  # what neighbours dial
    device: str
    num_cores: int
    memory_nbytes: int
    message_memory_nbytes: int | None = None  # what this worker gives to messages, where its user has said so
    message_disk_nbytes: int | None = None
    keeps_messages: bool = False  # in a folder of its own, to find them again
    config_hash: str = ""
    model_hash: str = ""
    tokenizer_hash: str = ""


class Refused(Tagged, frozen=True, kw_only=True):
    """The worker may not join; `reason` names both values that differ and what to do."""

    worker: str
    reason: str


class Welcome(Tagged, frozen=True, kw_only=True):
    """The worker is in; it waits for its assignment."""

    run: str
    worker: str
    weights_address: str  # where the coordinator serves and collects weights, as seen from the coordinator
    heartbeat_interval_s: float
    heartbeat_timeout_s: float


class Assignment(Tagged, frozen=True, kw_only=True):
    """What a worker holds and how the run goes. The same for all workers but for `rank` and `tensors`."""

    run: str
    epoch: int  # assignment epoch; messages of another epoch are refused
    replica: int
    rank: int
    stages: tuple[StageAddress, ...]  # all stages of the replica in order; those with this rank are the worker's
    peers: tuple[ReplicaAddress, ...] = ()  # this rank in every replica, in order, the worker itself among them
    tied: str  # "none" | "local" (embedding and head on one worker) | "exchange" (their gradients cross, kind tied)
    config: dict[str, Any]  # the resolved RunConfig as plain values
    model_config: dict[str, Any]  # transformers' configuration as plain values
    random_weights: bool
    tensors: tuple[TensorEntry, ...]  # of this worker's stages; empty with random weights
    model_hash: str
    num_threads: int  # torch threads; 0: the worker decides


class Ready(Tagged, frozen=True, kw_only=True):
    """The worker has its weights and its links."""

    epoch: int
    num_parameters: int
    num_trainable: int
    peak_memory_nbytes: int


# ---------------------------------------------------------------- steps


class StepPlan(Tagged, frozen=True, kw_only=True):
    """One optimizer step. Buffers: `input_ids` and `labels` (int32, little-endian, samples joined without padding, in order
    of microbatches) where the receiving worker needs them. A classifier's labels are one for each sample: its class."""

    epoch: int
    step: int  # never repeats, aborted steps included
    learning_rate: float
    num_targets: int  # label tokens of the whole batch, after the shift, or classes; the loss is divided by it
    microbatches: tuple[tuple[SampleRef, ...], ...]  # of the receiver's replica; none where the batch has no sample of it
    first_microbatch: int = 0  # microbatches of the replicas before it: numbers them through for chance
    has_input_ids: bool
    has_labels: bool
    buffer_nbytes: tuple[int, ...]


class Prepared(Tagged, frozen=True, kw_only=True):
    """The worker's gradients are complete; it can commit or abort. `loss_sums` (one a microbatch) only from the head."""

    epoch: int
    step: int
    loss_sums: tuple[float, ...]
    layer_norms: tuple[LayerNorms, ...]


class StepFailed(Tagged, frozen=True, kw_only=True):
    """The step cannot be prepared here (values not finite, say); the coordinator aborts it everywhere."""

    epoch: int
    step: int
    stage: int
    reason: str


class Commit(Tagged, frozen=True, kw_only=True):
    """Apply the step: scale the gradients by `clip_coefficient`, step the optimizer, make staged messages current."""

    epoch: int
    step: int
    gradient_norm: float  # of the receiver's replica, where each has its own
    clip_coefficient: float
    freeze: bool = False  # from the next step on Adam's second moments stay as they are, and momenta are exchanged
    average: bool = False  # then average the replicas' changes of parameters since they were the same


class Abort(Tagged, frozen=True, kw_only=True):
    """Forget the step: gradients and staged messages."""

    epoch: int
    step: int
    reason: str
    average: bool = False  # as in Commit


class Committed(Tagged, frozen=True, kw_only=True):
    epoch: int
    step: int
    report: StepReport


class Aborted(Tagged, frozen=True, kw_only=True):
    epoch: int
    step: int


class EvaluationPlan(Tagged, frozen=True, kw_only=True):
    """Forward passes only; touches no message and no weight. Buffers as in StepPlan."""

    epoch: int
    evaluation: int  # never repeats
    microbatches: tuple[tuple[SampleRef, ...], ...]
    has_input_ids: bool
    has_labels: bool
    buffer_nbytes: tuple[int, ...]


class Evaluated(Tagged, frozen=True, kw_only=True):
    """`loss_sums` (one a microbatch) only from the head; `traffic` as in StepReport."""

    epoch: int
    evaluation: int
    loss_sums: tuple[float, ...]
    num_correct: tuple[int, ...] = ()  # samples classified rightly, beside each loss sum; empty where labels are tokens
    traffic: tuple[Traffic, ...]


# ---------------------------------------------------------------- life and end


class Heartbeat(Tagged, frozen=True, kw_only=True):
    sent_at_s: float
    activity: str  # for people: "forward of microbatch 3 on stage 1, step 17"
    step: int
    memory_nbytes: int
    round_trips: tuple[RoundTrip, ...] = ()  # that have ended since the last heartbeat


class HeartbeatReply(Tagged, frozen=True, kw_only=True):
    sent_at_s: float
    answered_at_s: float = 0.0  # by the coordinator's clock


class Spans(Tagged, frozen=True, kw_only=True):
    """What the worker did, and when by its own clock. Buffers: one, as `pipecomp.protocol.spans` lays it out."""

    names: tuple[str, ...]  # of lanes and links; records say which
    num_dropped: int  # spans since the last message that found no room at the worker
    buffer_nbytes: tuple[int, ...]


class SendWeights(Tagged, frozen=True, kw_only=True):
    """Send the trained tensors of your stages over the weights link."""

    epoch: int


class WeightsSent(Tagged, frozen=True, kw_only=True):
    epoch: int
    num_tensors: int
    traffic: tuple[Traffic, ...]


class Failed(Tagged, frozen=True, kw_only=True):
    """The worker cannot go on; it ends after this."""

    worker: str
    stages: tuple[int, ...]
    activity: str
    reason: str


class LinkLost(Tagged, frozen=True, kw_only=True):
    """A neighbour cannot be reached any more; the coordinator finds out which end is at fault."""

    link: str
    peer_worker: str
    reason: str


class Stop(Tagged, frozen=True, kw_only=True):
    """The run is over; `failed` says that it ended badly."""

    reason: str
    failed: bool


class Goodbye(Tagged, frozen=True, kw_only=True):
    """The worker leaves (after Stop, or because its own user asked for it)."""

    worker: str
    reason: str


# ---------------------------------------------------------------- data links


class LinkHello(Tagged, frozen=True, kw_only=True):
    """First message of each end on each new connection of a link; asks to go on from `next_sequence`."""

    run: str
    epoch: int
    link: str
    worker: str
    next_sequence: int


class Ack(Tagged, frozen=True, kw_only=True):
    """Every message up to and including `sequence` has been taken; its credit is free again."""

    sequence: int


class Resend(Tagged, frozen=True, kw_only=True):
    """The receiver does not hold the message that a sample was coded against; the sender should send its own, whole."""

    sequence: int
    step: int
    microbatch: int
    kind: Kind
    sample_id: int
    reason: str


class Resent(Tagged, frozen=True, kw_only=True):
    """The sender's message of a sample, as its store keeps it: the answer to Resend. Buffers: one; none where the sender has
    lost it too, and then `reason` says why."""

    sequence: int
    step: int
    microbatch: int
    kind: Kind
    sample_id: int
    version: int
    checksum: int  # xxh3-64 of the buffer
    dtype: str  # fp32 | bf16 | int8 | int4
    num_rows: int
    num_columns: int
    reason: str
    buffer_nbytes: tuple[int, ...]


class TensorMessage(Tagged, frozen=True, kw_only=True):
    """Activations (forward, evaluation) or their gradients (backward) of one microbatch. Buffers: one a sample."""

    sequence: int
    run: str
    epoch: int
    replica: int
    kind: Kind
    step: int  # for evaluation the number of the evaluation
    microbatch: int
    stage: int  # destination
    codec: str
    num_columns: int
    samples: tuple[SampleHeader, ...]
    evicted: tuple[int, ...] = ()  # samples whose messages both ends give up once the step commits
    buffer_nbytes: tuple[int, ...]


class GradientMessage(Tagged, frozen=True, kw_only=True):
    """A piece of one parameter's gradient (kind tied), or of all gradients of a rank (kind gradients). Buffers: one."""

    sequence: int
    run: str
    epoch: int
    replica: int
    kind: Kind
    step: int
    stage: int
    codec: str
    name: str  # of the parameter; for gradients "reduce" or "gather"
    offset: int  # first value of this piece in the flattened gradient
    num_values: int
    buffer_nbytes: tuple[int, ...]


class WeightsRequest(Tagged, frozen=True, kw_only=True):
    """Asks the coordinator for bytes `offset .. offset + nbytes` of a checkpoint tensor."""

    sequence: int
    name: str
    offset: int
    nbytes: int


class WeightsChunk(Tagged, frozen=True, kw_only=True):
    """Bytes of a checkpoint tensor, in either direction. Buffers: one."""

    sequence: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    total_nbytes: int
    buffer_nbytes: tuple[int, ...]


ControlMessage = (
    Join
    | Refused
    | Welcome
    | Assignment
    | Ready
    | StepPlan
    | Prepared
    | StepFailed
    | Commit
    | Abort
    | Committed
    | Aborted
    | EvaluationPlan
    | Evaluated
    | Heartbeat
    | HeartbeatReply
    | Spans
    | SendWeights
    | WeightsSent
    | Failed
    | LinkLost
    | Stop
    | Goodbye
    | SurveyMachine
    | MachineSurveyed
    | SurveyLink
    | LinkSurveyed
)
LinkMessage = LinkHello | Ack | Resend | Resent | TensorMessage | GradientMessage | WeightsRequest | WeightsChunk
SpeedMessage = SpeedProbe | Echo | SpeedChunk | SpeedTaken | SpeedTurn | SpeedTold
SequencedMessage = Resend | Resent | TensorMessage | GradientMessage | WeightsRequest | WeightsChunk
Message = ControlMessage | LinkMessage | SpeedMessage


def stage_link(replica: int, stage: int) -> str:
    """Name of the link from `stage` to `stage + 1`; the worker of `stage` dials."""
    return f"{replica}/{stage}-{stage + 1}"


def tied_link(replica: int) -> str:
    """Name of the link between embedding and head; the worker of the embedding dials."""
    return f"{replica}/tied"


def gradients_link(rank: int, replica: int, other: int) -> str:
    """Name of the link between the workers of `rank` in two replicas; the one of the lower replica dials."""
    return f"gradients/{rank}/{min(replica, other)}-{max(replica, other)}"


def weights_link(worker: str) -> str:
    """Name of the link between a worker and the coordinator's weights; the worker dials."""
    return f"weights/{worker}"
