"""Who takes part: lets workers in or says why not, gives them places, and keeps what each was last heard doing. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from coordinator.events import Peer, RunTerms, StageSplit
from pipecomp.protocol.messages import PROTOCOL_VERSION, Join
from pipecomp.protocol.session import Session

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Member:
    """One worker that was let in. `Roster` and the state machine change it, nobody else."""

    __slots__ = ("activity", "join", "left", "peer", "place", "replica", "session", "stages")

    def __init__(self, peer: Peer, join: Join, session: Session) -> None:
        self.peer = peer
        self.join = join
        self.session = session
        self.place = -1
        """Among all workers of the run: those of replica 0 by rank, then those of replica 1, ..."""
        self.replica: int | None = None  # where there are several
        self.stages: tuple[StageSplit, ...] = ()
        self.activity = "waiting for the other workers"
        self.left = False

    @property
    def name(self) -> str:
        return self.join.worker

    def describe(self) -> str:
        """For people: name, host, process, and the stages it holds."""
        text = f"{self.name} (host {self.join.host}, process {self.join.process_id}"
        if self.replica is not None:
            text += f", replica {self.replica}"
        for split in self.stages:
            last = split.end_layer - 1
            layers = f"layer {last}" if split.first_layer == last else f"layers {split.first_layer}-{last}"
            text += f", stage {split.stage}: {layers}"
        return text + ")"


class Identity(NamedTuple):
    """What this coordinator calls itself."""

    run: str
    version: str
    weights_address: str


class Roster:
    """The members of one run, at most `num_workers`."""

    def __init__(self, num_workers: int, version: str, *, is_on_disk: bool) -> None:
        """`is_on_disk`: whether the run keeps messages on disk."""
        self.num_workers = num_workers
        self._version = version
        self._is_on_disk = is_on_disk
        self._members: dict[Peer, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_full(self) -> bool:
        return len(self._members) == self.num_workers

    @property
    def members(self) -> list[Member]:
        """By place once they have one, before that in order of joining."""
        return sorted(self._members.values(), key=lambda member: member.place)

    @property
    def present(self) -> list[Member]:
        return [member for member in self.members if not member.left]

    def member(self, peer: Peer) -> Member | None:
        return self._members.get(peer)

    def named(self, name: str) -> Member | None:
        return next((member for member in self._members.values() if member.name == name), None)

    def objection(self, join: Join, terms: RunTerms) -> str:
        """Why `join` cannot be let in, with both values and what to do; empty when it can."""
        if join.protocol_version != PROTOCOL_VERSION:
            return (
                f"worker {join.worker!r} speaks protocol version {join.protocol_version}, this coordinator speaks "
                f"{PROTOCOL_VERSION}; install the same pipecomp on both (here: {self._version}, there: {join.version})"
            )
        if join.version != self._version:
            return (
                f"worker {join.worker!r} runs pipecomp {join.version}, this coordinator runs {self._version}; "
                "install the same version on both"
            )
        if not _NAME.fullmatch(join.worker):
            return (
                f"worker name {join.worker!r} cannot be used; choose 1 to 64 letters, digits, '.', '_' or '-' with --name"
            )
        if join.keeps_messages and not self._is_on_disk:
            return (
                f"worker {join.worker!r} has --store-folder, and messages.store = 'memory' keeps nothing in a folder; leave the "
                "option out, or set messages.store = 'disk' or 'tiered'"
            )
        return self._hash_objection(join, terms) or self._place_objection(join)

    def _hash_objection(self, join: Join, terms: RunTerms) -> str:
        rows = (
            ("configuration", join.config_hash, terms.config_hash, "give it the hash that is printed here, or none"),
            ("model", join.model_hash, terms.model_hash, "give it the same model folder, or none"),
            ("tokenizer", join.tokenizer_hash, terms.tokenizer_hash, "give it the same tokenizer, or none"),
        )
        for what, theirs, ours, advice in rows:
            if theirs and theirs != ours:
                return f"worker {join.worker!r} has {what} hash {theirs}, this coordinator has {ours}; {advice}"
        return ""

    def _place_objection(self, join: Join) -> str:
        other = self.named(join.worker)
        if other is not None:
            return (
                f"a worker named {join.worker!r} from host {other.join.host} (process {other.join.process_id}) is in this "
                f"run already; start the one on host {join.host} (process {join.process_id}) with another --name"
            )
        if self.is_full:
            names = ", ".join(member.name for member in self.members)
            return (
                f"worker {join.worker!r} is one too many: all {self.num_workers} places of this run are taken ({names}); "
                "raise cluster.num_stages or cluster.num_replicas for more"
            )
        return ""

    def admit(self, peer: Peer, join: Join, session: Session) -> None:
        self._members[peer] = Member(peer, join, session)

    def seat(self, terms: RunTerms) -> None:
        """Give places by name, `worker-10` after `worker-9`, so that they do not depend on who joined first."""
        for place, member in enumerate(sorted(self._members.values(), key=_natural_order)):
            replica, rank = divmod(place, terms.num_ranks)
            member.place = place
            member.replica = replica if terms.num_replicas > 1 else None
            member.stages = tuple(split for split in terms.stages if split.rank == rank)


def _natural_order(member: Member) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", member.name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
