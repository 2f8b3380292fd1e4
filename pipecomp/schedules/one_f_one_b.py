"""1F1B: a few forwards, then one backward for each forward, so that few microbatches are held. Indices only.

The textbook's warm-up, `num_in_flight` = number of stages (here 3):

    rank 0  0F0 0F1 0F2 .   .   0B0 0F3 0B1 0F4 0B2 .   0B3 .   0B4
    rank 1  .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 1F4 1B3 .   1B4
    rank 2  .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4

How deep over slow links. A stage can start its next forward only when it holds fewer microbatches than its depth, and it
gets one back a round trip after it sent it. Let T be the time between two microbatches when all is going well, that is the
time for which the busiest rank (forward + backward) or link (one transfer, in one direction) is busy with one. From the
start of a stage's forward to the end of its backward there are, at most,

    its own forward and backward                                            T
    for each stage after it: two transfers, a forward and a backward        2 T + T

so with h stages after it, a stage that may hold 3 h + 1 microbatches never runs dry, whatever the links' rate; the
textbook's h + 1 is enough only where transfers take no time (12 microbatches, 3 stages, transfers as long as forward and
backward: 54 units of time by the default, 96 by the textbook). That is the default. It costs memory, a stage's activations
for each microbatch it holds, and, where a transfer takes longer than forward and backward, a little time once a step: stages
in the middle wait for warm-up forwards that they did not need. Latency is not in T: links with a latency far above T want
more. `num_in_flight` sets the first stage's depth, and the depths of the others fall evenly to 1 at the last.

Depths that never rise from one stage to the next cannot deadlock: a stage's k-th backward needs the next stage to have run
its (k + next depth)-th forward, which needs no more forwards here than this stage runs before its k-th backward.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2; the flushing form is
PipeDream-Flush in "Memory-Efficient Pipeline-Parallel DNN Training", 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipecomp.errors import ConfigError
from pipecomp.schedules._rules import check_options
from pipecomp.schedules._simulate import Costs, merge_stage_orders
from pipecomp.schedules._stage_order import stage_order
from pipecomp.schedules.base import Action, Schedule
from pipecomp.types import Rank


class OneFOneB(Schedule):
    """One forward, one backward, after a warm-up.

    Args:
        num_in_flight: the most microbatches that the first stage holds between forward and backward; later stages hold
            fewer, the last one 1. None: deep enough for links as slow as the slowest rank (see the module).
    """

    name = "1f1b"

    def __init__(self, num_in_flight: int | None = None) -> None:
        self.num_in_flight = num_in_flight

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> OneFOneB:
        value = check_options(cls.name, options, known=("num_in_flight",)).get("num_in_flight", "auto")
        if value == "auto":
            return cls()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"cluster.num_in_flight = {value!r}: write a number of microbatches, at least 1, or leave it out")
        return cls(value)

    def depth(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """The most microbatches that `stage` holds at once."""
        num_after = num_stages - 1 - stage
        first_depth = self._first_depth(num_stages)
        # Rounded up: (first_depth - 1) falls to 0 over the stages in even steps.
        share = -(-(first_depth - 1) * num_after // max(1, num_stages - 1))
        return min(num_microbatches, 1 + share)

    def actions(self, ranks: Sequence[Rank], num_microbatches: int) -> list[list[Action]]:
        num_stages = len(ranks)
        orders = [
            stage_order(stage, num_microbatches, depth=self.depth(stage, num_stages, num_microbatches))
            for stage in range(num_stages)
        ]
        return merge_stage_orders(orders, ranks, self._expected_costs(num_stages))

    def _first_depth(self, num_stages: int) -> int:
        return 3 * (num_stages - 1) + 1 if self.num_in_flight is None else self.num_in_flight

    def _expected_costs(self, num_stages: int) -> Costs:
        """The slowest links for which these depths suffice, by the count above: depth = 1 + h (1 + 2 link / T).

        Only a rank with several stages depends on them, to leave the right number of its first stage's forwards before its
        last stage's first one. Whole numbers, scaled so that there are no ties decided by rounding; T = forward + backward.
        """
        unit = 2 * max(1, num_stages - 1)
        return Costs(forward=unit, backward=2 * unit, link=3 * max(0, self._first_depth(num_stages) - num_stages))


PLUGIN = OneFOneB
