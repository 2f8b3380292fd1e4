"""The trained weights' way home: one worker after the other in rank order, so that one stage at a time is in memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.events import Effect, Log, Peer, SaveModel, Send, StoreStage, TrafficReported
from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.messages import SendWeights, WeightsSent


class Collection:
    """Whose turn it is. A worker's tensors arrive over its weights link; WeightsSent says how many there were."""

    def __init__(self, workers: Mapping[Peer, str], epoch: int) -> None:
        self._workers = workers
        self._epoch = epoch
        self._order = list(workers)
        self._turn = -1
        self._is_storing = False

    def next(self) -> list[Effect]:
        """Ask the next worker, or complete the model after the last one."""
        self._turn += 1
        self._is_storing = False
        if self._turn < len(self._order):
            return [Send(self._order[self._turn], SendWeights(epoch=self._epoch))]
        return [SaveModel()]

    def on_sent(self, peer: Peer, message: WeightsSent) -> list[Effect]:
        if self._is_storing or not 0 <= self._turn < len(self._order) or self._order[self._turn] != peer:
            raise RemoteProtocolError("said WeightsSent out of turn")
        self._is_storing = True
        worker = self._workers[peer]
        return [Log(TrafficReported(worker, message.traffic)), StoreStage(peer, worker, message.num_tensors)]
