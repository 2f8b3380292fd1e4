"""The optimizer steps of a run: plans, votes, commits and aborts. Pure; time is an argument.

    IDLE --plan--> VOTING --all Prepared--> Commit (and the next plan with it)
                      |
                      +--StepFailed, or not finite--> ABORTING --all Aborted--> the next plan

A commit is under way until every worker says Committed; the next step may be voted on meanwhile, not decided.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from coordinator.events import Effect, Log, MomentsFrozen, Peer, RunTerms, Send, SendStep, StepAborted, StepCommitted
from coordinator.rates import learning_rate
from coordinator.vote import MUST_BE_THE_SAME, Verdict, count_votes
from coordinator.warmup import WarmUp
from pipecomp.config import RunConfig
from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.messages import Abort, Aborted, Commit, Committed, Prepared, StepFailed, StepReport


class Round(enum.Enum):
    """Where the newest step stands."""

    IDLE = "idle"
    VOTING = "voting"
    ABORTING = "aborting"


class _PendingCommit:
    """A step that was decided and that not every worker has reported yet."""

    def __init__(self, step: int, verdict: Verdict, rate: float, step_time_s: float) -> None:
        self.step = step
        self.verdict = verdict
        self.rate = rate
        self.step_time_s = step_time_s
        self.reports: dict[str, StepReport] = {}


class Training:
    """Steps 1 .. total_steps. A step's batch is a function of its number, so an aborted step uses its batch up."""

    def __init__(self, config: RunConfig, terms: RunTerms, workers: Mapping[Peer, str], epoch: int) -> None:
        self._config = config.train
        self._local_steps = config.replicas.local_steps if terms.num_replicas > 1 else 0
        self._num_apart = 0  # steps that replicas have taken since they were the same
        self._warm_up = WarmUp(config.train, terms.total_steps)
        self._terms = terms
        self._workers = workers  # in rank order
        self._epoch = epoch
        self._round = Round.IDLE
        self._votes: dict[Peer, Prepared] = {}
        self._aborted: set[Peer] = set()
        self._pending: _PendingCommit | None = None
        self._aborts_in_a_row = 0
        self._started_at = 0.0
        self.step = 0
        """The newest step that was planned."""
        self.num_committed = 0
        self.stop_after_step = False
        self.failure = ""
        """Why training cannot go on; empty while it can."""

    @property
    def is_idle(self) -> bool:
        """Nothing is planned and nothing is under way."""
        return self._round is Round.IDLE and self._pending is None

    @property
    def is_complete(self) -> bool:
        return self.step >= self._terms.total_steps

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the newest step is one to evaluate after."""
        every = self._config.eval_steps
        return bool(self._terms.evaluation_sizes) and (
            self.is_complete or (every is not None and self.step % every == 0)
        )

    def start(self, now: float) -> list[Effect]:
        """Plan the next step."""
        self.step += 1
        self._round = Round.VOTING
        self._votes = {}
        self._started_at = now
        return [SendStep(self._epoch, self.step, self._rate())]

    def on_prepared(self, peer: Peer, message: Prepared, now: float) -> list[Effect]:
        self._expect_current(message)
        if self._round is Round.ABORTING:
            return []  # it crossed with our Abort
        if peer in self._votes:
            raise RemoteProtocolError(f"said Prepared twice for step {message.step}")
        self._votes[peer] = message
        return self._decide(now)

    def on_step_failed(self, peer: Peer, message: StepFailed) -> list[Effect]:
        self._expect_current(message)
        if self._round is Round.ABORTING:
            return []
        return self._abort(f"{self._workers[peer]}, stage {message.stage}: {message.reason}")

    def on_committed(self, peer: Peer, message: Committed, now: float) -> list[Effect]:
        pending, worker = self._pending, self._workers[peer]
        if pending is None or message.step != pending.step or worker in pending.reports:
            raise RemoteProtocolError(f"said Committed for step {message.step}, which waits for no commit of it")
        pending.reports[worker] = message.report
        if len(pending.reports) < len(self._workers):
            return []
        self._pending = None
        self.num_committed += 1
        self._warm_up.hear(sum(pending.reports[name].second_moment for name in self._first_replica))
        if fault := self._difference(pending):
            return self._give_up(fault)
        return [Log(self._record(pending)), *self._decide(now)]

    def on_aborted(self, peer: Peer, message: Aborted, now: float) -> list[Effect]:
        if self._round is not Round.ABORTING or message.step != self.step or peer in self._aborted:
            raise RemoteProtocolError(f"said Aborted for step {message.step}, which waits for no abort of it")
        self._aborted.add(peer)
        if len(self._aborted) < len(self._workers):
            return []
        self._round = Round.IDLE
        return [] if self.failure or self._pauses() else self.start(now)

    def _decide(self, now: float) -> list[Effect]:
        if self._round is not Round.VOTING or self._pending is not None or len(self._votes) < len(self._workers):
            return []
        verdict = count_votes(
            {worker: self._votes[peer] for peer, worker in self._workers.items()},
            self._terms.num_microbatches(self.step),
            num_targets=self._terms.batch_size(self.step).targets,
            max_grad_norm=self._config.max_grad_norm,
            train_apart=self._local_steps > 0,
        )
        if verdict.objection:
            return self._abort(verdict.objection)
        if verdict.fault:
            return self._give_up(verdict.fault)
        self._round = Round.IDLE
        self._aborts_in_a_row = 0
        self._pending = _PendingCommit(self.step, verdict, self._rate(), now - self._started_at)
        freezes = self._warm_up.ends_with(self.num_committed)
        self._num_apart += 1
        averages = self._take_average()
        commits = [
            Commit(
                epoch=self._epoch,
                step=self.step,
                gradient_norm=norm,
                clip_coefficient=clip,
                freeze=freezes,
                average=averages,
            )
            for norm, clip in zip(verdict.norms, verdict.clips, strict=True)
        ]
        effects: list[Effect] = [
            Send(peer, commits[place // self._terms.num_ranks]) for place, peer in enumerate(self._workers)
        ]
        if freezes:
            effects.append(Log(MomentsFrozen(self.step, self._warm_up.change)))
        return [*effects, *([] if self._pauses() else self.start(now))]

    def _take_average(self) -> bool:
        """Whether replicas that train apart are to average after this step: they have gone far enough, or their parameters
        are asked for."""
        is_due = 0 < self._local_steps <= self._num_apart or (self._local_steps > 0 < self._num_apart and self._pauses())
        if is_due:
            self._num_apart = 0
        return is_due

    def _abort(self, reason: str) -> list[Effect]:
        self._round = Round.ABORTING
        self._aborted = set()
        self._aborts_in_a_row += 1
        if self._aborts_in_a_row > self._config.max_aborted_steps:
            self.failure = (
                f"{self._aborts_in_a_row} steps in a row had to be aborted, the last one (step {self.step}) because "
                f"{reason}; try a lower train.learning_rate or more bits, or raise train.max_aborted_steps"
            )
        averages = not self.failure and self._take_average()
        abort = Abort(epoch=self._epoch, step=self.step, reason=reason, average=averages)
        return [Log(StepAborted(self.step, reason)), *(Send(peer, abort) for peer in self._workers)]

    def _give_up(self, fault: str) -> list[Effect]:
        self.failure = f"step {self.step}: {fault}"
        self._round = Round.IDLE
        return []

    def _difference(self, pending: _PendingCommit) -> str:
        """Which replicas' parameters are not the same after a step; empty where they are, or were not looked at."""
        names = list(self._workers.values())
        for place, worker in enumerate(names):
            first = names[place % self._terms.num_ranks]
            ours, theirs = pending.reports[first].parameters_hash, pending.reports[worker].parameters_hash
            if ours != theirs:
                return (
                    f"{worker} (replica {place // self._terms.num_ranks}) has parameters of hash {theirs or '(none)'} after step "
                    f"{pending.step}, {first} (replica 0) of hash {ours or '(none)'}{MUST_BE_THE_SAME}"
                )
        return ""

    @property
    def _first_replica(self) -> list[str]:
        return list(self._workers.values())[: self._terms.num_ranks]

    def _expect_current(self, message: Prepared | StepFailed) -> None:
        if self._round is Round.IDLE or message.step != self.step:
            name = type(message).__name__
            raise RemoteProtocolError(f"said {name} for step {message.step}; the coordinator is at step {self.step}")

    def _pauses(self) -> bool:
        return self.stop_after_step or self.is_complete or self.evaluation_is_due

    def _rate(self) -> float:
        return learning_rate(self._config, self.step, self._terms.total_steps)

    def _record(self, pending: _PendingCommit) -> StepCommitted:
        return StepCommitted(
            step=pending.step,
            train_epoch=(pending.step - 1) // self._terms.steps_per_epoch,
            loss=pending.verdict.loss,
            learning_rate=pending.rate,
            gradient_norm=pending.verdict.gradient_norm,
            clip_coefficient=pending.verdict.clip_coefficient,
            size=self._terms.batch_size(pending.step),
            step_time_s=pending.step_time_s,
            reports=pending.reports,
        )
