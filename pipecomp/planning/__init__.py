"""How long a step takes before anything has run: compute, messages and links on paper. Pure; knows no clock, model or socket.

    setting = even_setting(
        8,
        StageCost(forward_s=0.051, backward_s=0.154),
        LinkCost(forward_nbytes=665_600, backward_nbytes=1_280_000),
        Host(uplink_nbytes_per_s=11.95e6, downlink_nbytes_per_s=11.95e6),
    )
    best = ideal(setting, num_microbatches=32)
    best.label, best.step.duration_s, best.step.bound

- `Setting`: stages, ranks, links, hosts (up- and downlink, latency), paths between pairs, processors that ranks share.
  `even_setting` makes one of equals.
- `simulate_step(actions, setting)`: one order of actions, as a `Step`: its duration, timeline (`schedules.format_grid` draws
  it), transfers, loads, and the bound that rules it. `step.py` says what rules a step, `_play.py` how links are shared.
- `compare`, `ideal`: the same for all shipped schedules, the fastest first.
- `with_exchange_s`: a step with an exchange of gradients between replicas at its end.

`schedules.simulate`, with one cost for all, makes orders; this measures them.
"""

from pipecomp.planning._play import Transfer
from pipecomp.planning.choice import Candidate, compare, ideal, shipped_schedules
from pipecomp.planning.replicas import with_exchange_s
from pipecomp.planning.setting import Host, LinkCost, Path, Processor, Setting, StageCost, even_setting
from pipecomp.planning.step import BoundKind, Load, Step, simulate_step

__all__ = [
    "BoundKind",
    "Candidate",
    "Host",
    "LinkCost",
    "Load",
    "Path",
    "Processor",
    "Setting",
    "StageCost",
    "Step",
    "Transfer",
    "compare",
    "even_setting",
    "ideal",
    "shipped_schedules",
    "simulate_step",
    "with_exchange_s",
]
