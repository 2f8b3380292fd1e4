"""The order of one stage's own actions: some forwards ahead, then backward and forward in turn. Indices only."""

from __future__ import annotations

from pipecomp.schedules.base import Action, ActionKind
from pipecomp.types import MicrobatchIndex, StageIndex


def stage_order(stage: int, num_microbatches: int, *, depth: int) -> list[Action]:
    """`depth` forwards, then a backward and a forward in turn, then the backwards that are left.

        depth 2 of 4 microbatches:   F0 F1 B0 F2 B1 F3 B2 B3

    At most `depth` microbatches are ever between forward and backward. A depth of all microbatches is GPipe's order.
    """
    forwards = [Action(StageIndex(stage), ActionKind.FORWARD, MicrobatchIndex(m)) for m in range(num_microbatches)]
    backwards = [Action(StageIndex(stage), ActionKind.BACKWARD, MicrobatchIndex(m)) for m in range(num_microbatches)]
    depth = min(depth, num_microbatches)
    order = forwards[:depth]
    for backward, forward in zip(backwards, forwards[depth:], strict=False):
        order += [backward, forward]
    return order + backwards[num_microbatches - depth :]
