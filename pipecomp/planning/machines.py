"""What the machines of a cluster can do, as a person writes it down or a probe measures it. Pure; reads no file.

    [[workers]]                     # in the order in which they hold the model, one replica after the other
    name = "garage"                 # for the table
    block = { forward_s = 0.051, backward_s = 0.154 }     # one transformer block, one microbatch of this run
    memory = "16GB"                 # what a worker may take
    up = "20mbit"                   # what the machine can send, to all
    down = "100mbit"                # and receive
    latency_ms = 15                 # one way

    [[links]]                       # where a way between two machines is slower than both their connections
    sender = "garage"
    receiver = "cellar"
    rate = "10mbit"
    latency_ms = 20                 # on top of the sender's own

`multiply_adds_per_s = 2e11` may stand in place of `block`: of a forward pass; a backward takes twice as long. What is left out is
not limited: no `memory` is any memory, no `up` any rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from pipecomp.errors import ConfigError
from pipecomp.planning.setting import Path
from pipecomp.planning.work import LayerWork
from pipecomp.types import Rank
from pipecomp.units import parse_rate, parse_size

_FINITE: Final = 1e300
AboveZero = Annotated[float, msgspec.Meta(gt=0, le=_FINITE)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=_FINITE)]


class LayerSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer, one microbatch."""

    forward_s: NonNegative
    backward_s: NonNegative
    weights_s: NonNegative = 0.0
    """The part of `backward_s` that may be left for later, with `cluster.num_deferred`; at most `backward_s`."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker's machine."""

    name: str = ""
    block: LayerSeconds | None = None
    head: LayerSeconds | None = None
    """Default: as long as its multiply-adds take at the block's speed; likewise the embedding."""
    embedding: LayerSeconds | None = None
    multiply_adds_per_s: AboveZero | None = None
    updates_per_s: AboveZero | None = None
    """Parameters that the optimizer steps a second. Default: no time."""
    coded_values_per_s: AboveZero | None = None
    """Activations encoded and decoded a second, both ends together. Default: no time."""
    handling_s: NonNegative = 0.0
    """Around each action of a stage: taking its input, handing on its result. Beside what coding takes."""
    memory: str | None = None
    up: str | None = None
    down: str | None = None
    latency_ms: NonNegative = 0.0

    @property
    def memory_nbytes(self) -> float:
        return math.inf if self.memory is None else parse_size(self.memory, f"memory of {self.name}")

    @property
    def up_nbytes_per_s(self) -> float:
        return math.inf if self.up is None else parse_rate(self.up, f"up of {self.name}")

    @property
    def down_nbytes_per_s(self) -> float:
        return math.inf if self.down is None else parse_rate(self.down, f"down of {self.name}")

    def seconds(self, layer: LayerWork, block: LayerWork, *, num_tokens: float, recompute: bool) -> LayerSeconds:
        """Of one layer of `kind` and cost, for one microbatch of `num_tokens`; `block` is the model's usual layer."""
        measured = {"block": self.block, "head": self.head, "embedding": self.embedding}.get(layer.kind)
        if measured is not None:
            return measured
        if self.block is not None:
            ratio = layer.cost / block.cost if block.cost else 0.0
            return LayerSeconds(self.block.forward_s * ratio, self.block.backward_s * ratio)  # of the others nothing waits
        assert self.multiply_adds_per_s is not None
        forward_s = layer.cost * num_tokens / self.multiply_adds_per_s
        weights_s = forward_s if layer.kind == "block" else 0.0
        return LayerSeconds(forward_s, (3 if recompute else 2) * forward_s, weights_s)


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All machines of a cluster, by place."""

    workers: tuple[Machine, ...]


class Way(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From one machine to another."""

    sender: str
    receiver: str
    rate: str | None = None
    latency_ms: NonNegative = 0.0
    """One way, on top of the sender's own."""

    @property
    def path(self) -> Path:
        """The same for a step on paper."""
        rate = math.inf if self.rate is None else parse_rate(self.rate, f"rate from {self.sender} to {self.receiver}")
        return Path(rate, self.latency_ms / 1000)


Ways = Mapping[tuple[Rank, Rank], Way]
"""By sender and receiver: ranks, or places among all machines where there are several replicas."""


def parse_figures(tree: dict[str, Any], num_stages: int, source: str, *, num_replicas: int = 1) -> tuple[Machine, ...]:
    """Check a parsed file.

    Args:
        tree: of TOML or JSON; what else a plan's own JSON holds is ignored.
        num_stages: of the run file.
        source: what to call the file.
        num_replicas: of the run file: the machines of the first replica come first, by stage, then those of the second.

    Raises:
        ConfigError: names the worker and the key that cannot be, and says what is allowed.
    """
    if not isinstance(tree.get("workers"), list):
        raise ConfigError(f"{source}: no workers; write a table [[workers]] for each machine (docs/planning.md has an example)")
    machines = []
    for index, values in enumerate(tree["workers"]):
        where = f"{source}: worker {index}"
        try:
            machine = msgspec.convert(values, Machine)
        except msgspec.ValidationError as e:
            raise ConfigError(f"{where}: {e}; allowed: {', '.join(Machine.__struct_fields__)}") from e
        machines.append(_check(machine, index, where))
    if len(machines) != num_stages * num_replicas:
        raise ConfigError(_wrong_number(source, len(machines), num_stages, num_replicas))
    return tuple(machines)


def _wrong_number(source: str, number: int, num_stages: int, num_replicas: int) -> str:
    if num_replicas == 1:
        return (
            f"{source} has {number} workers, the run file cluster.num_stages = {num_stages}: give one [[workers]] for "
            f"each, or set cluster.num_stages = {number}"
        )
    return (
        f"{source} has {number} workers, the run file cluster.num_stages = {num_stages} in each of cluster.num_replicas = "
        f"{num_replicas}: give one [[workers]] for each of the {num_stages * num_replicas}, first the {num_stages} of the first "
        "replica, then those of the next"
    )


def parse_ways(tree: dict[str, Any], machines: Sequence[Machine], source: str) -> Ways:
    """Check `[[links]]` of a parsed file. Raises ConfigError as `parse_figures` does."""
    ranks = {machine.name: Rank(rank) for rank, machine in enumerate(machines)}
    found: dict[tuple[Rank, Rank], Way] = {}
    if not isinstance(tree.get("links", []), list):
        raise ConfigError(f"{source}: write a table [[links]], with two brackets each side, for each way between two workers")
    for index, values in enumerate(tree.get("links", [])):
        where = f"{source}: link {index}"
        try:
            way = msgspec.convert(values, Way)
        except msgspec.ValidationError as e:
            raise ConfigError(f"{where}: {e}; allowed: {', '.join(Way.__struct_fields__)}") from e
        for name in (way.sender, way.receiver):
            if name not in ranks:
                raise ConfigError(f"{where}: there is no worker {name!r}; there are: {', '.join(ranks)}")
        if way.rate is not None:
            parse_rate(way.rate, f"{where}: rate")
        if way.sender == way.receiver or (ranks[way.sender], ranks[way.receiver]) in found:
            fault = "is there twice" if way.sender != way.receiver else "ends where it begins"
            raise ConfigError(f"{where}: the way from {way.sender} to {way.receiver} {fault}")
        found[ranks[way.sender], ranks[way.receiver]] = way
    return found


def _check(machine: Machine, index: int, where: str) -> Machine:
    if (machine.block is None) == (machine.multiply_adds_per_s is None):
        raise ConfigError(
            f"{where}: give either block = {{ forward_s = ..., backward_s = ... }} or multiply_adds_per_s, so that its speed is "
            "known"
        )
    for kind in ("block", "head", "embedding"):
        seconds = getattr(machine, kind)
        if seconds is not None and seconds.weights_s > seconds.backward_s:
            raise ConfigError(f"{where}: {kind}: weights_s = {seconds.weights_s:g} is a part of backward_s: make it smaller")
    if machine.memory is not None:
        parse_size(machine.memory, f"{where}: memory")
    for key, rate in (("up", machine.up), ("down", machine.down)):
        if rate is not None:
            parse_rate(rate, f"{where}: {key}")
    return machine if machine.name else msgspec.structs.replace(machine, name=f"worker-{index}")
