"""What happens to a worker and what it decides: plain values. Knows messages; no sockets, no tensors, no time."""

from __future__ import annotations

import msgspec

from pipecomp.protocol.messages import (
    Abort,
    Assignment,
    Commit,
    EvaluationPlan,
    LayerNorms,
    LinkSurveyed,
    MachineSurveyed,
    Message,
    StepPlan,
    StepReport,
    SurveyLink,
    SurveyMachine,
    Traffic,
)


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    pass


# ---------------------------------------------------------------- events


class MessageReceived(_Value, frozen=True, kw_only=True):
    """The coordinator says something. `buffers` are handed on untouched."""

    message: Message
    buffers: tuple[memoryview, ...] = ()


class Loaded(_Value, frozen=True, kw_only=True):
    """Weights and links of the assignment are here."""

    num_parameters: int
    num_trainable: int
    peak_memory_nbytes: int


class StepPrepared(_Value, frozen=True, kw_only=True):
    """The running step's gradients are complete."""

    step: int
    loss_sums: tuple[float, ...]
    layer_norms: tuple[LayerNorms, ...]


class StepRefused(_Value, frozen=True, kw_only=True):
    """The running step met values that cannot be encoded."""

    step: int
    stage: int
    reason: str


class StepCommitted(_Value, frozen=True, kw_only=True):
    step: int
    report: StepReport


class StepAborted(_Value, frozen=True, kw_only=True):
    step: int


class EvaluationFinished(_Value, frozen=True, kw_only=True):
    evaluation: int
    loss_sums: tuple[float, ...]
    num_correct: tuple[int, ...]
    traffic: tuple[Traffic, ...]


class WeightsUploaded(_Value, frozen=True, kw_only=True):
    num_tensors: int
    traffic: tuple[Traffic, ...]


class Surveyed(_Value, frozen=True, kw_only=True):
    """What was to be measured has been."""

    found: MachineSurveyed | LinkSurveyed


class WorkFailed(_Value, frozen=True, kw_only=True):
    """Something here went wrong for good."""

    activity: str
    reason: str


class LinkFailed(_Value, frozen=True, kw_only=True):
    """A neighbour cannot be reached."""

    link: str
    peer_worker: str
    reason: str


class CoordinatorGone(_Value, frozen=True, kw_only=True):
    """The coordinator is silent, or its connection is closed."""

    reason: str


class LeaveRequested(_Value, frozen=True, kw_only=True):
    """This worker's own user wants it to end."""

    reason: str


Event = (
    MessageReceived
    | Loaded
    | StepPrepared
    | StepRefused
    | StepCommitted
    | StepAborted
    | EvaluationFinished
    | WeightsUploaded
    | Surveyed
    | WorkFailed
    | LinkFailed
    | CoordinatorGone
    | LeaveRequested
)


# ---------------------------------------------------------------- effects


class Send(_Value, frozen=True, kw_only=True):
    """Say something to the coordinator."""

    message: Message


class Load(_Value, frozen=True, kw_only=True):
    assignment: Assignment


class RunStep(_Value, frozen=True, kw_only=True):
    plan: StepPlan
    buffers: tuple[memoryview, ...]


class ApplyCommit(_Value, frozen=True, kw_only=True):
    """Apply the prepared step with the learning rate of its plan."""

    commit: Commit
    learning_rate: float


class ApplyAbort(_Value, frozen=True, kw_only=True):
    """Stop whatever runs of the step and forget it."""

    abort: Abort


class RunEvaluation(_Value, frozen=True, kw_only=True):
    plan: EvaluationPlan
    buffers: tuple[memoryview, ...]


class UploadWeights(_Value, frozen=True, kw_only=True):
    pass


class Survey(_Value, frozen=True, kw_only=True):
    """Measure this machine, or a link."""

    order: SurveyMachine | SurveyLink


class Finish(_Value, frozen=True, kw_only=True):
    """End the process."""

    exit_code: int
    reason: str


Effect = Send | Load | RunStep | ApplyCommit | ApplyAbort | RunEvaluation | UploadWeights | Survey | Finish
