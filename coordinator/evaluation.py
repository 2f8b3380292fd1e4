"""Passes over the held-out data, one plan after the other. Pure; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping

from coordinator.events import BatchSize, Effect, EvaluationEnded, Log, Peer, RunTerms, SendEvaluation, TrafficReported
from coordinator.vote import mean_loss
from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.messages import Evaluated


class Evaluation:
    """The evaluations of a run. Plan numbers never repeat, over all evaluations."""

    def __init__(self, terms: RunTerms, workers: Mapping[Peer, str], epoch: int) -> None:
        self._sizes = terms.evaluation_sizes
        self._workers = workers
        self._epoch = epoch
        self._number = 0
        self._part = 0
        self._answers: dict[Peer, Evaluated] = {}
        self._loss_sums: list[float] = []
        self._num_correct: list[int] = []
        self._step = 0
        self._started_at = 0.0
        self.is_running = False
        self.cut_short = False
        """Leave the parts out that are not planned yet."""
        self.failure = ""
        """Why there is no use in going on; empty while there is."""

    def start(self, step: int, now: float) -> list[Effect]:
        """Begin a pass after `step` steps."""
        self._step, self._started_at = step, now
        self._part, self._loss_sums, self._num_correct = 0, [], []
        self.is_running = True
        return self._plan()

    def on_evaluated(self, peer: Peer, message: Evaluated, now: float) -> list[Effect]:
        if not self.is_running or message.evaluation != self._number or peer in self._answers:
            raise RemoteProtocolError(f"said Evaluated for plan {message.evaluation}, which waits for no answer of it")
        if len(message.num_correct) not in (0, len(message.loss_sums)):
            counts = f"{len(message.num_correct)} counts of right classes beside {len(message.loss_sums)} losses"
            raise RemoteProtocolError(f"said Evaluated for plan {message.evaluation} with {counts}")
        self._answers[peer] = message
        effects: list[Effect] = [Log(TrafficReported(self._workers[peer], message.traffic))]
        if len(self._answers) < len(self._workers):
            return effects
        self._loss_sums += [loss for peer in self._workers for loss in self._answers[peer].loss_sums]
        self._num_correct += [count for peer in self._workers for count in self._answers[peer].num_correct]
        self._part += 1
        if self._part < len(self._sizes) and not self.cut_short:
            return [*effects, *self._plan()]
        self.is_running = False
        return [*effects, *self._result(now)]

    def _plan(self) -> list[Effect]:
        self._number += 1
        self._answers = {}
        return [SendEvaluation(self._epoch, self._number, self._part)]

    def _result(self, now: float) -> list[Effect]:
        if self._part < len(self._sizes):
            return []
        total = BatchSize(*(sum(column) for column in zip(*self._sizes, strict=True)))
        loss = mean_loss(self._loss_sums, total.targets)
        if not math.isfinite(loss):
            advice = "try a lower train.learning_rate" if self._step else "are these the right weights for this tokenizer?"
            self.failure = f"the held-out loss after {self._step} steps is {loss}; {advice}"
        accuracy = sum(self._num_correct) / total.samples if self._num_correct else None
        return [Log(EvaluationEnded(self._step, loss, total, now - self._started_at, accuracy))]
