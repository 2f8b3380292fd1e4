"""The whole life of a run as one pure machine. Knows workers, steps and their order; no sockets, clocks, chance or tensors.

`handle(event, now=...)` is the only mutator and answers with effects for the service to carry out. Time is an argument.

    PREPARING -> WAITING -> LOADING -> EVALUATING <-> TRAINING -> COLLECTING -> STOPPING -> DONE
        any of them, at the first failure or the second Ctrl-C                              -> FAILED

What happens inside a phase is in modules of its own: `training` (two-phase commit), `evaluation`, `collection`, `roster`
(who may join) and `blame` (whom a failure is laid on).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from coordinator import events as e
from coordinator.blame import Blame, Evidence
from coordinator.collection import Collection
from coordinator.evaluation import Evaluation
from coordinator.events import Effect, Event, Log, Peer, RunTerms, Send
from coordinator.roster import Identity, Member, Roster
from coordinator.training import Training
from pipecomp.config import RunConfig
from pipecomp.errors import LocalProtocolError, RemoteProtocolError
from pipecomp.protocol import messages as m
from pipecomp.protocol import spans
from pipecomp.protocol.session import PeerSilent, Session, loading_timeout_s

ASSIGNMENT_EPOCH = 1
GOODBYE_TIMEOUT_S = 5.0
"""How long a good end waits for the workers to leave."""
INTERRUPTED = 130


class Phase(enum.Enum):
    PREPARING = "preparing"  # model and data are being read
    WAITING = "waiting"  # for workers
    LOADING = "loading"  # workers load their weights and dial their neighbours
    TRAINING = "training"
    EVALUATING = "evaluating"
    COLLECTING = "collecting"  # trained weights come back and are saved
    STOPPING = "stopping"  # workers were told to leave
    DONE = "done"
    FAILED = "failed"


_P = Phase
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        _P.PREPARING: frozenset({_P.WAITING, _P.FAILED}),
        _P.WAITING: frozenset({_P.LOADING, _P.FAILED}),
        _P.LOADING: frozenset({_P.EVALUATING, _P.TRAINING, _P.FAILED}),
        _P.TRAINING: frozenset({_P.EVALUATING, _P.COLLECTING, _P.STOPPING, _P.FAILED}),
        _P.EVALUATING: frozenset({_P.TRAINING, _P.COLLECTING, _P.STOPPING, _P.FAILED}),
        _P.COLLECTING: frozenset({_P.STOPPING, _P.FAILED}),
        _P.STOPPING: frozenset({_P.DONE, _P.FAILED}),
        _P.DONE: frozenset(),
        _P.FAILED: frozenset(),
    }
)
_ENDED = frozenset({Phase.DONE, Phase.FAILED})


class CoordinatorState:
    """One run of one coordinator."""

    def __init__(self, config: RunConfig, identity: Identity) -> None:
        self._config = config
        self._identity = identity
        num_workers = config.cluster.num_stages * config.cluster.num_replicas
        self._roster = Roster(num_workers, identity.version, is_on_disk=config.messages.is_on_disk)
        self._blame = Blame(config.cluster.heartbeat_timeout_s)
        self._early: dict[Peer, m.Join] = {}  # joins that came before the terms
        self._ready: set[Peer] = set()
        self._terms: RunTerms | None = None
        self._training: Training | None = None
        self._evaluation: Evaluation | None = None
        self._collection: Collection | None = None
        self._deadline = 0.0  # of WAITING and of STOPPING
        self._stop_requested = False
        self._effects: list[Effect] = []
        self.phase = Phase.PREPARING

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Take one event; the effects are to be carried out in order."""
        if self.phase in _ENDED:
            return []
        match event:
            case e.MessageReceived():
                self._on_message(event, now)
            case e.PeerDisconnected(peer, reason):
                self._on_disconnect(peer, reason, now)
            case e.ProcessDied(worker, description, by_signal):
                self._on_process_died(worker, description, by_signal, now)
            case e.TermsReady(terms):
                self._on_terms(terms, now)
            case e.StageStored() | e.ModelSaved():
                self._on_stored(event, now)
            case e.WorkFailed(reason):
                self._fail(reason)
            case e.WeightsLinkFailed(worker, reason):
                self._on_weights_link_failed(worker, reason, now)
            case e.StopRequested(urgent):
                self._on_stop(urgent, now)
            case e.Tick():
                self._check_silence(now)
        self._check_blame(now)
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------ workers come

    def _on_terms(self, terms: RunTerms, now: float) -> None:
        self._terms = terms
        self._deadline = now + self._config.cluster.join_timeout_s
        self._enter(Phase.WAITING)
        early, self._early = self._early, {}
        for peer, join in early.items():
            self._on_join(peer, join, now)

    def _on_join(self, peer: Peer, join: m.Join, now: float) -> None:
        if self._terms is None:
            self._early[peer] = join
            return
        objection = self._roster.objection(join, self._terms)
        if objection:
            self._effects += [Send(peer, m.Refused(worker=join.worker, reason=objection)), e.Disconnect(peer)]
            self._log(e.WorkerTurnedAway(join.worker, objection))
            return
        cluster = self._config.cluster
        patience_s = loading_timeout_s(cluster.heartbeat_timeout_s)
        self._roster.admit(peer, join, Session(cluster.heartbeat_interval_s, patience_s, now))
        welcome = m.Welcome(
            run=self._identity.run,
            worker=join.worker,
            weights_address=self._identity.weights_address,
            heartbeat_interval_s=cluster.heartbeat_interval_s,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
        )
        self._effects.append(Send(peer, welcome))
        self._log(e.WorkerJoined(join.worker, join.host, len(self._roster), self._roster.num_workers))
        if self._roster.is_full:
            self._assign(self._terms)

    def _assign(self, terms: RunTerms) -> None:
        self._roster.seat(terms)
        members = self._roster.members
        workers = {member.peer: member.name for member in members}
        self._training = Training(self._config, terms, workers, ASSIGNMENT_EPOCH)
        self._evaluation = Evaluation(terms, workers, ASSIGNMENT_EPOCH)
        first_replica = dict(list(workers.items())[: terms.num_ranks])  # all replicas' weights are the same
        self._collection = Collection(first_replica, ASSIGNMENT_EPOCH)
        for member in members:
            member.activity = "loading its weights"
        self._enter(Phase.LOADING)
        joins = tuple(member.join for member in members)
        self._effects.append(e.Assign(ASSIGNMENT_EPOCH, tuple(workers), joins))

    def _on_ready(self, member: Member, message: m.Ready, now: float) -> None:
        if self.phase is not Phase.LOADING or member.peer in self._ready:
            raise RemoteProtocolError(f"said Ready while the run is {self.phase.value}")
        self._ready.add(member.peer)
        self._log(
            e.WorkerLoaded(
                member.name, message.num_parameters, message.num_trainable, message.peak_memory_nbytes
            )
        )
        if len(self._ready) < self._roster.num_workers:
            return
        for each in self._roster.members:
            each.session.be_patient(self._config.cluster.heartbeat_timeout_s, now)
        if self._terms is not None and self._terms.evaluation_sizes:
            self._evaluate(now)
        else:
            self._train(now)

    # ------------------------------------------------------------ messages

    def _on_message(self, event: e.MessageReceived, now: float) -> None:
        peer, message, buffers = event
        member = self._roster.member(peer)
        if member is None:
            if isinstance(message, m.Join) and peer not in self._early:
                self._on_join(peer, message, now)
            elif isinstance(message, m.Heartbeat):
                self._effects.append(Send(peer, m.HeartbeatReply(sent_at_s=message.sent_at_s, answered_at_s=now)))
            else:
                self._effects.append(e.Disconnect(peer))
            return
        member.session.heard(now)
        try:
            self._expect_epoch(message)
            if isinstance(message, m.Spans):
                self._log(e.SpansReported(member.name, spans.received(message.names, b"".join(buffers)), message.num_dropped))
            else:
                self._dispatch(member, message, now)
        except RemoteProtocolError as error:
            self._accuse(member, f"it broke the protocol: it {error}", Evidence.CERTAIN, now)

    def _dispatch(self, member: Member, message: m.ControlMessage, now: float) -> None:
        match message:
            case m.Heartbeat():
                member.activity = message.activity or member.activity
                self._effects.append(Send(member.peer, m.HeartbeatReply(sent_at_s=message.sent_at_s, answered_at_s=now)))
                if message.round_trips:
                    self._log(e.ClockRead(member.name, message.round_trips))
            case m.Failed():
                member.activity = message.activity or member.activity
                self._accuse(member, message.reason, Evidence.CERTAIN, now)
            case m.LinkLost():
                self._on_link_lost(member, message, now)
            case m.Goodbye():
                self._on_goodbye(member, message, now)
            case m.Ready():
                self._on_ready(member, message, now)
            case _:
                self._dispatch_work(member, message, now)

    def _dispatch_work(self, member: Member, message: m.ControlMessage, now: float) -> None:
        training, evaluation, collection = self._training, self._evaluation, self._collection
        if training is None or evaluation is None or collection is None:
            raise RemoteProtocolError(f"sent {type(message).__name__} while the run is {self.phase.value}")
        match message:
            case m.Prepared():
                self._effects += training.on_prepared(member.peer, message, now)
            case m.StepFailed():
                self._effects += training.on_step_failed(member.peer, message)
            case m.Committed():
                self._effects += training.on_committed(member.peer, message, now)
            case m.Aborted():
                self._effects += training.on_aborted(member.peer, message, now)
            case m.Evaluated():
                self._effects += evaluation.on_evaluated(member.peer, message, now)
            case m.WeightsSent():
                self._effects += collection.on_sent(member.peer, message)
            case _:
                raise RemoteProtocolError(f"sent {type(message).__name__}, which no worker may send now")
        self._go_on(training, evaluation, now)

    def _expect_epoch(self, message: m.ControlMessage) -> None:
        epoch = getattr(message, "epoch", ASSIGNMENT_EPOCH)
        if epoch != ASSIGNMENT_EPOCH:
            raise RemoteProtocolError(f"answered for assignment epoch {epoch}; this is {ASSIGNMENT_EPOCH}")

    # ------------------------------------------------------------ what comes next

    def _go_on(self, training: Training, evaluation: Evaluation, now: float) -> None:
        """Leave TRAINING or EVALUATING once nothing of it is under way."""
        if self.phase is Phase.TRAINING and training.is_idle:
            if training.failure:
                self._fail(training.failure)
            elif training.evaluation_is_due and not self._stop_requested:
                self._evaluate(now)
            else:
                self._collect(now)
        elif self.phase is Phase.EVALUATING and not evaluation.is_running:
            if evaluation.failure:
                self._fail(evaluation.failure)
            elif training.is_complete or self._stop_requested:
                self._collect(now)
            else:
                self._train(now)

    def _train(self, now: float) -> None:
        assert self._training is not None
        self._enter(Phase.TRAINING)
        self._effects += self._training.start(now)

    def _evaluate(self, now: float) -> None:
        assert self._evaluation is not None
        assert self._training is not None
        self._enter(Phase.EVALUATING)
        self._effects += self._evaluation.start(self._training.step, now)

    def _collect(self, now: float) -> None:
        """Bring the weights home, unless nothing was trained or the person does not want them."""
        assert self._training is not None
        assert self._collection is not None
        if self._training.num_committed == 0 and self._stop_requested:
            self._interrupt()
        elif self._config.train.save_model:
            self._enter(Phase.COLLECTING)
            self._effects += self._collection.next()
        else:
            self._stop(now)

    def _on_stored(self, event: e.StageStored | e.ModelSaved, now: float) -> None:
        if self.phase is not Phase.COLLECTING or self._collection is None:
            raise LocalProtocolError(f"{event} while the run is {self.phase.value}")
        if isinstance(event, e.StageStored):
            self._effects += self._collection.next()
            return
        self._log(e.ModelStored(event.folder))
        self._stop(now)

    # ------------------------------------------------------------ the end

    def _stop(self, now: float) -> None:
        """The good end: tell everyone, then wait a moment for all goodbyes."""
        reason = "the person stopped the run" if self._stop_requested else "training is complete"
        self._tell_all(m.Stop(reason=reason, failed=False))
        self._deadline = now + GOODBYE_TIMEOUT_S
        self._enter(Phase.STOPPING)
        self._finish_if_alone()

    def _leave_alone(self, now_at_last: bool) -> None:
        """Everything is done and saved; do not wait for goodbyes any longer."""
        if now_at_last:
            for member in self._roster.present:
                member.left = True
            self._finish_if_alone()

    def _finish_if_alone(self) -> None:
        if self.phase is Phase.STOPPING and not self._roster.present:
            self._enter(Phase.DONE)
            self._effects.append(e.Finish(0, "", self._stop_requested and not self._is_complete()))

    def _is_complete(self) -> bool:
        return self._training is not None and self._training.is_complete

    def _on_stop(self, urgent: bool, now: float) -> None:
        if self.phase is Phase.STOPPING:
            self._leave_alone(urgent)
            return
        if self.phase is Phase.COLLECTING and not urgent:
            return  # it is saving already
        if urgent or self._training is None or self.phase is Phase.LOADING:
            self._interrupt()
            return
        assert self._evaluation is not None
        if not self._stop_requested:
            self._log(e.StopNoted())
        self._stop_requested = self._training.stop_after_step = self._evaluation.cut_short = True
        self._go_on(self._training, self._evaluation, now)

    def _interrupt(self) -> None:
        stop = m.Stop(reason="the person stopped the run", failed=True)
        self._tell_all(stop)
        self._effects += [Send(peer, stop) for peer in self._early]
        self._enter(Phase.FAILED)
        self._effects.append(e.Finish(INTERRUPTED, "interrupted; nothing was saved", stopped_early=True))

    def _fail(self, cause: str) -> None:
        if self.phase in _ENDED:
            return
        stop = m.Stop(reason=cause, failed=True)
        self._tell_all(stop)
        self._effects += [Send(peer, stop) for peer in self._early]
        self._enter(Phase.FAILED)
        self._effects.append(e.Finish(1, cause, stopped_early=True))

    # ------------------------------------------------------------ workers go

    def _on_goodbye(self, member: Member, message: m.Goodbye, now: float) -> None:
        if self.phase is not Phase.STOPPING:
            self._leave(member, f"it left the run: {message.reason}", Evidence.CERTAIN, now)
            return
        member.left = True
        self._finish_if_alone()

    def _on_disconnect(self, peer: Peer, reason: str, now: float) -> None:
        self._early.pop(peer, None)
        member = self._roster.member(peer)
        if member is None or member.left:
            return
        if self.phase is Phase.STOPPING:
            member.left = True
            self._finish_if_alone()
            return
        self._leave(member, f"its connection ended without a goodbye ({reason})", Evidence.GONE, now)

    def _on_process_died(self, worker: str, description: str, by_signal: bool, now: float) -> None:
        member = self._roster.named(worker)
        if self.phase is Phase.STOPPING:
            if member is not None:
                member.left = True
            self._finish_if_alone()
            return
        evidence = Evidence.CERTAIN if by_signal else Evidence.GONE
        if member is not None:
            self._accuse(member, description, evidence, now)
        else:
            self._blame.accuse(worker, f"{worker} failed before it joined: {description}", evidence, now)

    def _on_link_lost(self, member: Member, message: m.LinkLost, now: float) -> None:
        peer = self._roster.named(message.peer_worker)
        if self.phase is Phase.STOPPING or peer is None or peer.left:
            return
        reason = f"{member.name} cannot reach it over link {message.link}: {message.reason}"
        self._accuse(peer, reason, Evidence.RUMOUR, now)

    def _on_weights_link_failed(self, worker: str, reason: str, now: float) -> None:
        member = self._roster.named(worker)
        if member is not None and not member.left and self.phase is not Phase.STOPPING:
            self._accuse(member, reason, Evidence.GONE, now)

    def _leave(self, member: Member, reason: str, evidence: Evidence, now: float) -> None:
        member.left = True
        self._accuse(member, reason, evidence, now)

    def _accuse(self, member: Member, reason: str, evidence: Evidence, now: float) -> None:
        activity = f", last heard {member.activity}" if member.activity else ""
        self._blame.accuse(member.name, f"{member.describe()} failed{activity}: {reason}", evidence, now)

    def _check_silence(self, now: float) -> None:
        if self.phase is Phase.WAITING and now >= self._deadline:
            joined = ", ".join(member.name for member in self._roster.members) or "none"
            self._fail(
                f"{len(self._roster)} of {self._roster.num_workers} workers joined within "
                f"{self._config.cluster.join_timeout_s:g} s ({joined}); start the others, or raise cluster.join_timeout_s"
            )
        if self.phase is Phase.STOPPING:
            self._leave_alone(now >= self._deadline)
        if self.phase is Phase.STOPPING:
            return
        for member in self._roster.present:
            for effect in member.session.poll(now):  # the coordinator answers heartbeats and sends none of its own
                if isinstance(effect, PeerSilent):
                    self._leave(member, f"no heartbeat for {effect.silence_s:.1f} s", Evidence.CERTAIN, now)

    def _check_blame(self, now: float) -> None:
        charge = self._blame.charge
        if charge is not None and self._blame.is_decided(now):
            guilty = self._roster.named(charge.worker)
            if guilty is not None and charge.evidence is not Evidence.RUMOUR:
                guilty.left = True
            self._fail(charge.reason)

    # ------------------------------------------------------------ small things

    def _tell_all(self, message: m.ControlMessage) -> None:
        self._effects += [Send(member.peer, message) for member in self._roster.present]

    def _log(self, record: e.Record) -> None:
        self._effects.append(Log(record))

    def _enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise LocalProtocolError(f"the run cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase
        self._log(e.PhaseEntered(phase.value))
