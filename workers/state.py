"""What a worker does next, and nothing else: events in, effects out. Knows messages and phases; no sockets, time, tensors or
threads. Everything about phases and transitions is in this file.

                 Welcome            Assignment          Loaded
    JOINING ------------> WAITING ------------> LOADING -------> IDLE
                                                                  |
         StepPlan         StepPrepared / StepRefused     Commit   |         StepCommitted
    IDLE ---------> RUNNING ------------------> PREPARED -------> COMMITTING -------------> IDLE
                       |  Abort                    |  Abort                  StepAborted
                       +---------------------------+------------> ABORTING ---------------> IDLE
    IDLE --EvaluationPlan--> EVALUATING --> IDLE          IDLE --SendWeights--> UPLOADING --> IDLE
    WAITING --SurveyMachine, SurveyLink--> SURVEYING --> WAITING
    anywhere --Stop--> STOPPED          anywhere --failure--> FAILED

A plan that arrives while the step before it is being committed or aborted waits, and so does its abort: another worker may
have refused the step before it began here. What the table does not allow is the
coordinator's fault: RemoteProtocolError, which ends the worker with a Failed message.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipecomp.errors import LocalProtocolError, RemoteProtocolError
from pipecomp.protocol import messages as m
from workers import events as e


class Phase(enum.Enum):
    JOINING = "joining"
    WAITING = "waiting for its assignment"
    SURVEYING = "measuring for a plan"
    LOADING = "loading"
    IDLE = "idle"
    RUNNING = "running a step"
    PREPARED = "waiting for commit or abort"
    COMMITTING = "committing"
    ABORTING = "aborting"
    EVALUATING = "evaluating"
    UPLOADING = "sending weights"
    STOPPED = "stopped"
    FAILED = "failed"


_P = Phase
TRANSITIONS: Mapping[tuple[Phase, type], Phase] = MappingProxyType(
    {
        (_P.JOINING, m.Welcome): _P.WAITING,
        (_P.WAITING, m.Assignment): _P.LOADING,
        (_P.WAITING, m.SurveyMachine): _P.SURVEYING,
        (_P.WAITING, m.SurveyLink): _P.SURVEYING,
        (_P.SURVEYING, e.Surveyed): _P.WAITING,
        (_P.LOADING, e.Loaded): _P.IDLE,
        (_P.IDLE, m.StepPlan): _P.RUNNING,
        (_P.RUNNING, e.StepPrepared): _P.PREPARED,
        (_P.RUNNING, e.StepRefused): _P.PREPARED,
        (_P.PREPARED, m.Commit): _P.COMMITTING,
        (_P.RUNNING, m.Abort): _P.ABORTING,
        (_P.PREPARED, m.Abort): _P.ABORTING,
        (_P.COMMITTING, e.StepCommitted): _P.IDLE,
        (_P.ABORTING, e.StepAborted): _P.IDLE,
        (_P.IDLE, m.EvaluationPlan): _P.EVALUATING,
        (_P.EVALUATING, e.EvaluationFinished): _P.IDLE,
        (_P.IDLE, m.SendWeights): _P.UPLOADING,
        (_P.UPLOADING, e.WeightsUploaded): _P.IDLE,
    }
)
"""Where each event leads; every pair that is not here and not handled in every phase is an error."""

_BUSY_ENDING = (_P.COMMITTING, _P.ABORTING)
_ENDED = (_P.STOPPED, _P.FAILED)


class WorkerState:
    """The worker's state machine; `handle` is the only thing that changes it."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.phase = Phase.JOINING
        self.assignment: m.Assignment | None = None
        self.welcome: m.Welcome | None = None
        self.plan: m.StepPlan | None = None
        self._queued: e.MessageReceived | None = None
        self._queued_abort: m.Abort | None = None

    def handle(self, event: e.Event, *, now: float) -> list[e.Effect]:
        """React to one event.

        Raises:
            RemoteProtocolError: the coordinator said what it may not say now.
            LocalProtocolError: this process reported what cannot be.
        """
        del now  # nothing here depends on time; liveness is the session's
        if self.phase in _ENDED:
            return []
        everywhere = _EVERYWHERE.get(_subject(event))
        if everywhere is not None:
            return everywhere(self, event)
        if isinstance(event, e.MessageReceived) and self._must_wait(event):
            return []
        if isinstance(event, e.StepPrepared | e.StepRefused) and self.phase is Phase.ABORTING:
            return []  # crossed with the coordinator's Abort
        target = TRANSITIONS.get((self.phase, _subject(event)))
        if target is None:
            raise self._not_allowed(event)
        self.phase = target
        return self._enter(event)

    # ------------------------------------------------------------ entering a phase

    def _enter(self, event: e.Event) -> list[e.Effect]:
        match event:
            case e.MessageReceived(message=message, buffers=buffers):
                return self._told(message, buffers)
            case e.Loaded():
                return self._then_queued(
                    m.Ready(
                        epoch=self._epoch,
                        num_parameters=event.num_parameters,
                        num_trainable=event.num_trainable,
                        peak_memory_nbytes=event.peak_memory_nbytes,
                    )
                )
            case e.StepPrepared(step=step, loss_sums=loss_sums, layer_norms=norms):
                self._check_step(step)
                return [e.Send(message=m.Prepared(epoch=self._epoch, step=step, loss_sums=loss_sums, layer_norms=norms))]
            case e.StepRefused(step=step, stage=stage, reason=reason):
                self._check_step(step)
                return [e.Send(message=m.StepFailed(epoch=self._epoch, step=step, stage=stage, reason=reason))]
            case e.StepCommitted(step=step, report=report):
                return self._then_queued(m.Committed(epoch=self._epoch, step=step, report=report))
            case e.StepAborted(step=step):
                return self._then_queued(m.Aborted(epoch=self._epoch, step=step))
            case e.EvaluationFinished():
                return self._then_queued(
                    m.Evaluated(
                        epoch=self._epoch,
                        evaluation=event.evaluation,
                        loss_sums=event.loss_sums,
                        num_correct=event.num_correct,
                        traffic=event.traffic,
                    )
                )
            case e.Surveyed(found=found):
                return [e.Send(message=found)]
            case e.WeightsUploaded(num_tensors=count, traffic=traffic):
                return self._then_queued(m.WeightsSent(epoch=self._epoch, num_tensors=count, traffic=traffic))
        raise LocalProtocolError(f"no effect is known for {event}")

    def _told(self, message: m.Message, buffers: tuple[memoryview, ...]) -> list[e.Effect]:
        match message:
            case m.Welcome():
                self.welcome = message
                return []
            case m.Assignment():
                self.assignment = message
                return [e.Load(assignment=message)]
            case m.SurveyMachine() | m.SurveyLink():
                return [e.Survey(order=message)]
            case m.StepPlan():
                self._check_epoch(message.epoch)
                self.plan = message
                return [e.RunStep(plan=message, buffers=buffers)]
            case m.Commit():
                plan = self._check_step(message.step)
                return [e.ApplyCommit(commit=message, learning_rate=plan.learning_rate)]
            case m.Abort():
                self._check_step(message.step)
                return [e.ApplyAbort(abort=message)]
            case m.EvaluationPlan():
                self._check_epoch(message.epoch)
                return [e.RunEvaluation(plan=message, buffers=buffers)]
            case m.SendWeights():
                return [e.UploadWeights()]
        raise RemoteProtocolError(f"a worker does not take {type(message).__name__}")

    # ------------------------------------------------------------ in every phase

    def _stop(self, event: e.Event) -> list[e.Effect]:
        assert isinstance(event, e.MessageReceived)
        assert isinstance(event.message, m.Stop)
        self.phase = Phase.STOPPED
        goodbye = e.Send(message=m.Goodbye(worker=self.worker, reason=event.message.reason))
        return [goodbye, e.Finish(exit_code=1 if event.message.failed else 0, reason=event.message.reason)]

    def _refused(self, event: e.Event) -> list[e.Effect]:
        assert isinstance(event, e.MessageReceived)
        assert isinstance(event.message, m.Refused)
        self.phase = Phase.FAILED
        return [e.Finish(exit_code=1, reason=f"the coordinator refused {self.worker}: {event.message.reason}")]

    def _heard(self, event: e.Event) -> list[e.Effect]:
        return []

    def _failed(self, event: e.Event) -> list[e.Effect]:
        assert isinstance(event, e.WorkFailed)
        self.phase = Phase.FAILED
        failed = m.Failed(worker=self.worker, stages=self._stages, activity=event.activity, reason=event.reason)
        return [e.Send(message=failed), e.Finish(exit_code=1, reason=f"{event.activity}: {event.reason}")]

    def _link_failed(self, event: e.Event) -> list[e.Effect]:
        """Only the coordinator can tell which end is at fault; it answers with Stop."""
        assert isinstance(event, e.LinkFailed)
        return [e.Send(message=m.LinkLost(link=event.link, peer_worker=event.peer_worker, reason=event.reason))]

    def _coordinator_gone(self, event: e.Event) -> list[e.Effect]:
        """It may be there and only have been silent for too long: then it hears why this worker left."""
        assert isinstance(event, e.CoordinatorGone)
        self.phase = Phase.FAILED
        goodbye = m.Goodbye(worker=self.worker, reason=event.reason)
        return [e.Send(message=goodbye), e.Finish(exit_code=1, reason=event.reason)]

    def _leave(self, event: e.Event) -> list[e.Effect]:
        assert isinstance(event, e.LeaveRequested)
        self.phase = Phase.FAILED
        goodbye = m.Goodbye(worker=self.worker, reason=event.reason)
        return [e.Send(message=goodbye), e.Finish(exit_code=130, reason=event.reason)]

    # ------------------------------------------------------------ checks

    def _must_wait(self, event: e.MessageReceived) -> bool:
        """Keep work that comes while the last step is still being ended."""
        message, queued = event.message, None if self._queued is None else self._queued.message
        if self.phase not in _BUSY_ENDING:
            return False
        if isinstance(message, m.Abort) and isinstance(queued, m.StepPlan) and message.step == queued.step:
            self._queued_abort = message
            return True
        if not isinstance(message, m.StepPlan | m.EvaluationPlan | m.SendWeights):
            return False
        if self._queued is not None:
            raise RemoteProtocolError(f"two plans wait while {self.worker} is {self.phase.value}")
        self._queued = event
        return True

    def _then_queued(self, message: m.Message) -> list[e.Effect]:
        """Report, then start what waited; a step that was aborted meanwhile is only forgotten."""
        effects: list[e.Effect] = [e.Send(message=message)]
        event, self._queued = self._queued, None
        abort, self._queued_abort = self._queued_abort, None
        if event is None:
            return effects
        if abort is not None and isinstance(event.message, m.StepPlan):
            self._check_epoch(event.message.epoch)
            self.plan, self.phase = event.message, Phase.ABORTING
            return [*effects, e.ApplyAbort(abort=abort)]
        return [*effects, *self.handle(event, now=0.0)]

    def _check_step(self, step: int) -> m.StepPlan:
        if self.plan is None or self.plan.step != step:
            raise RemoteProtocolError(f"step {step} is not the one running here ({self.plan and self.plan.step})")
        return self.plan

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise RemoteProtocolError(f"a plan of assignment epoch {epoch}; this worker is in epoch {self._epoch}")

    @property
    def _epoch(self) -> int:
        return -1 if self.assignment is None else self.assignment.epoch

    @property
    def _stages(self) -> tuple[int, ...]:
        if self.assignment is None:
            return ()
        return tuple(s.stage for s in self.assignment.stages if s.rank == self.assignment.rank)

    def _not_allowed(self, event: e.Event) -> LocalProtocolError | RemoteProtocolError:
        if isinstance(event, e.MessageReceived):
            return RemoteProtocolError(f"{type(event.message).__name__} is not allowed while {self.worker} is {self.phase.value}")
        return LocalProtocolError(f"{type(event).__name__} cannot happen while {self.worker} is {self.phase.value}")


_Anywhere = Callable[[WorkerState, e.Event], list[e.Effect]]
_EVERYWHERE: Mapping[type, _Anywhere] = MappingProxyType(
    {
        m.Stop: WorkerState._stop,
        m.Refused: WorkerState._refused,
        m.HeartbeatReply: WorkerState._heard,
        e.WorkFailed: WorkerState._failed,
        e.LinkFailed: WorkerState._link_failed,
        e.CoordinatorGone: WorkerState._coordinator_gone,
        e.LeaveRequested: WorkerState._leave,
    }
)


def _subject(event: e.Event) -> type:
    """What the table is keyed by: the message's type for a message, else the event's."""
    return type(event.message) if isinstance(event, e.MessageReceived) else type(event)
