"""Which flows an order of actions makes, and what each goes through. Pure; knows actions and settings, no time.

A flow is one direction of one link between two stages: `(stage that sends, forward or backward)`. It sends one message at a
time, in the order in which the sender computed. Where one rank holds both stages there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipecomp.planning.setting import Setting
from pipecomp.schedules import Action, ActionKind, needs
from pipecomp.types import Rank, StageIndex

ResourceKind = Literal["uplink", "downlink", "path"]


class Flow(NamedTuple):
    """One direction of one link."""

    stage: StageIndex
    """That sends."""
    kind: ActionKind
    sender: Rank
    receiver: Rank
    nbytes: float
    """Of each message."""
    latency_s: float
    resources: tuple[int, ...]
    """Positions in `Network.resources`."""
    num_messages: int

    @property
    def link(self) -> int:
        """Link i is between stage i and stage i + 1."""
        return self.stage if self.kind is ActionKind.FORWARD else self.stage - 1

    @property
    def key(self) -> tuple[StageIndex, ActionKind]:
        return self.stage, self.kind


class Resource(NamedTuple):
    """Something of a finite rate that messages go through."""

    kind: ResourceKind
    ranks: tuple[Rank, ...]
    """Whose it is; sender and receiver of a path."""
    nbytes_per_s: float


class Network(NamedTuple):
    """All flows of a step and all they go through."""

    flows: tuple[Flow, ...]
    resources: tuple[Resource, ...]
    takers: dict[Action, Action]
    """The action that takes each action's result in; the last ones of a step have none."""


def lay_out(actions: Sequence[Sequence[Action]], setting: Setting) -> Network:
    """The network of a step; only what some action waits for is sent."""
    last_stage = len(setting.stages) - 1
    takers = {needed: action for order in actions for action in order if (needed := needs(action, last_stage)) is not None}
    positions: dict[Resource, int] = {}

    num_messages: dict[tuple[StageIndex, ActionKind], int] = {}
    receivers: dict[tuple[StageIndex, ActionKind], Rank] = {}
    for given, taker in takers.items():
        receiver = setting.ranks[taker.stage]
        if receiver != setting.ranks[given.stage]:
            key = (given.stage, given.kind)
            num_messages[key] = num_messages.get(key, 0) + 1
            receivers[key] = receiver
    flows = []
    for (stage, kind), receiver in sorted(receivers.items(), key=lambda each: (each[0][1] is ActionKind.BACKWARD, each[0][0])):
        sender = setting.ranks[stage]
        through = [each for each in _passed(setting, sender, receiver) if each.nbytes_per_s < math.inf]
        forward = kind is ActionKind.FORWARD
        link = setting.links[stage if forward else stage - 1]
        nbytes = link.forward_nbytes if forward else link.backward_nbytes
        coding_s = link.forward_coding_s if forward else link.backward_coding_s
        latency_s = setting.latency_s(sender, receiver) + coding_s
        passed = tuple(positions.setdefault(each, len(positions)) for each in through)
        flows.append(Flow(stage, kind, sender, receiver, nbytes, latency_s, passed, num_messages[stage, kind]))
    return Network(tuple(flows), tuple(positions), takers)


def _passed(setting: Setting, sender: Rank, receiver: Rank) -> list[Resource]:
    found = [
        Resource("uplink", (sender,), setting.hosts[sender].uplink_nbytes_per_s),
        Resource("downlink", (receiver,), setting.hosts[receiver].downlink_nbytes_per_s),
    ]
    path = setting.paths.get((sender, receiver))
    if path is not None:
        found.append(Resource("path", (sender, receiver), path.nbytes_per_s))
    return found
