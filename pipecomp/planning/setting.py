"""What a step on paper depends on: seconds, bytes, rates. Pure values; knows no model or codec.

Times are seconds, sizes bytes, rates bytes a second. A host is the machine of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from pipecomp.types import Rank


class StageCost(msgspec.Struct, frozen=True):
    """Compute of one stage for one microbatch."""

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    """The part of `backward_s` that may be left for later: gradients of weights."""


class LinkCost(msgspec.Struct, frozen=True):
    """What one microbatch sends between a stage and the one after it, headers included; the forward way and back."""

    forward_nbytes: float
    backward_nbytes: float
    forward_coding_s: float = 0.0
    """From a result to its first byte and from its last byte to its values, beside compute; adds to the latency."""
    backward_coding_s: float = 0.0


class Host(msgspec.Struct, frozen=True):
    """How a machine is connected. All that it sends shares the uplink, all that it receives the downlink."""

    uplink_nbytes_per_s: float = math.inf
    downlink_nbytes_per_s: float = math.inf
    latency_s: float = 0.0
    """One way, of everything it sends."""


class Path(msgspec.Struct, frozen=True):
    """What holds between two machines besides their own up- and downlinks, one way."""

    nbytes_per_s: float = math.inf
    """Shared by all that goes from the one to the other."""
    latency_s: float = 0.0
    """On top of the sender's own."""


class Processor(msgspec.Struct, frozen=True):
    """Ranks on one machine that has fewer cores than they would use."""

    ranks: tuple[Rank, ...]
    num_at_once: float
    """So many of them compute at full speed; more share it evenly."""


class Setting(msgspec.Struct, frozen=True):
    """Stages on machines.

    Args:
        stages: in the order in which a microbatch visits them.
        ranks: for each stage the rank that holds it; 0 .. max without gaps, as in `Schedule.actions`.
        links: one less than the stages; `links[i]` is between stage i and stage i + 1. Of no meaning where both are on one
            rank: nothing is sent then.
        hosts: one for each rank.
        paths: by (sender, receiver), for pairs of ranks that are slower than their hosts.
        processors: of ranks that share a machine's cores; each rank in one at most. Others have their machine to themselves.

    Raises:
        ValueError: the numbers of stages, ranks, links and hosts do not fit each other, or one is negative, or a rate 0.
    """

    stages: tuple[StageCost, ...]
    ranks: tuple[Rank, ...]
    links: tuple[LinkCost, ...]
    hosts: tuple[Host, ...]
    paths: Mapping[tuple[Rank, Rank], Path] = msgspec.field(default_factory=dict)
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages or len(self.ranks) != len(self.stages) or len(self.links) != len(self.stages) - 1:
            raise ValueError(
                f"{len(self.stages)} stages need as many ranks and one link less, got {len(self.ranks)} ranks, "
                f"{len(self.links)} links"
            )
        if sorted(set(self.ranks)) != list(range(len(self.hosts))):
            raise ValueError(f"ranks {list(self.ranks)} need a host each, 0 .. {max(self.ranks)}; got {len(self.hosts)} hosts")
        amounts = [s for stage in self.stages for s in (stage.forward_s, stage.backward_s)]
        amounts += [n for link in self.links for n in (link.forward_nbytes, link.backward_nbytes)]
        amounts += [s for link in self.links for s in (link.forward_coding_s, link.backward_coding_s)]
        amounts += [host.latency_s for host in self.hosts] + [path.latency_s for path in self.paths.values()]
        if not all(0 <= stage.weights_s <= stage.backward_s for stage in self.stages):
            raise ValueError("gradients of weights are a part of a backward pass")
        if not all(0 <= amount < math.inf for amount in amounts):
            raise ValueError("seconds and bytes are finite and not negative")
        rates = [rate for host in self.hosts for rate in (host.uplink_nbytes_per_s, host.downlink_nbytes_per_s)]
        if not all(rate > 0 for rate in [*rates, *(path.nbytes_per_s for path in self.paths.values())]):
            raise ValueError("rates are above zero")
        sharing = [rank for processor in self.processors for rank in processor.ranks]
        if len(set(sharing)) != len(sharing) or not all(processor.num_at_once > 0 for processor in self.processors):
            raise ValueError("processors need ranks of their own and to run more than none of them at once")

    def latency_s(self, sender: Rank, receiver: Rank) -> float:
        """From a message's last byte leaving to its arrival."""
        path = self.paths.get((sender, receiver))
        return self.hosts[sender].latency_s + (0.0 if path is None else path.latency_s)


def even_setting(num_stages: int, stage: StageCost, link: LinkCost, host: Host = Host()) -> Setting:  # noqa: B008  # frozen
    """Equal stages, one on each of as many equal machines."""
    return Setting(
        stages=(stage,) * num_stages,
        ranks=tuple(map(Rank, range(num_stages))),
        links=(link,) * (num_stages - 1),
        hosts=(host,) * num_stages,
    )
