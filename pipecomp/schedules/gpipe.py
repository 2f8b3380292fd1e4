"""GPipe: all forwards, then all backwards. Indices only.

    rank 0  0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
    rank 1  .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3
    rank 2  .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3

Every stage holds all microbatches at once. No forward ever waits for a backward, so a link's round trip is paid once a step.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, figure 2c; with
backwards in the order of the microbatches, as torch.distributed.pipelining has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pipecomp.schedules._rules import check_options
from pipecomp.schedules._simulate import Costs, merge_stage_orders
from pipecomp.schedules._stage_order import stage_order
from pipecomp.schedules.base import Action, Schedule
from pipecomp.types import Rank

# Only a rank that holds several stages depends on these: a link about as busy as the ranks is what pipecomp is for.
_EXPECTED: Final = Costs(forward=1, backward=2, link=3)


class GPipe(Schedule):
    """All forwards, then all backwards. Takes no options."""

    name = "gpipe"

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> GPipe:
        check_options(cls.name, options, known=())
        return cls()

    def actions(self, ranks: Sequence[Rank], num_microbatches: int) -> list[list[Action]]:
        orders = [stage_order(stage, num_microbatches, depth=num_microbatches) for stage in range(len(ranks))]
        return merge_stage_orders(orders, ranks, _EXPECTED)


PLUGIN = GPipe
