"""How a plan measures machines that are elsewhere: a pure machine. Knows workers, what they found and their order; no sockets,
clocks or models.

    GATHERING -> MACHINES -> LINKS -> STOPPING -> DONE          all join; all measure themselves at once; one link after another
        any of them, at the first failure       -> FAILED

A link is measured by the worker that dials it in a run, both ways, while nothing else is sent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from coordinator import events as e
from coordinator.events import Effect, Event, Peer, RunTerms, Send
from coordinator.roster import Member, Roster
from pipecomp.config import ClusterConfig
from pipecomp.errors import LocalProtocolError
from pipecomp.protocol import messages as m
from pipecomp.protocol.session import PeerSilent, Session, loading_timeout_s

GOODBYE_TIMEOUT_S = 5.0
INTERRUPTED = 130
LINK_S = 4.0
"""Of sending, each way over each link."""
_DONE = "the plan is made; start the worker again to train"


class Phase(enum.Enum):
    GATHERING = "gathering"
    MACHINES = "measuring machines"
    LINKS = "measuring links"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"


_P = Phase
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        _P.GATHERING: frozenset({_P.MACHINES, _P.FAILED}),
        _P.MACHINES: frozenset({_P.LINKS, _P.STOPPING, _P.FAILED}),
        _P.LINKS: frozenset({_P.STOPPING, _P.FAILED}),
        _P.STOPPING: frozenset({_P.DONE, _P.FAILED}),
        _P.DONE: frozenset(),
        _P.FAILED: frozenset(),
    }
)


class Surveyed(NamedTuple):
    """What a survey has found."""

    joins: tuple[m.Join, ...]
    """By place."""
    machines: tuple[m.MachineSurveyed, ...]
    links: Mapping[tuple[int, int], m.LinkSurveyed]
    """By places, the one that dialled first."""


class SurveyState:
    """One survey. `handle` is the only thing that changes it."""

    def __init__(
        self,
        cluster: ClusterConfig,
        terms: RunTerms,
        version: str,
        *,
        pairs: Sequence[tuple[int, int]],
        order: Callable[[Sequence[m.Join], int], m.SurveyMachine],
        say: Callable[[str], None],
    ) -> None:
        """`pairs`: places whose workers exchange tensors, the one that dials first. `order`: what the worker at a place is to
        measure, from the joins of all by place. `say` is told how far it is."""
        self._cluster = cluster
        self._terms = terms
        self._order = order
        self._say = say
        num_workers = cluster.num_stages * cluster.num_replicas
        self._roster = Roster(num_workers, version, is_on_disk=True)  # where messages are kept makes no difference here
        self._deadline: float | None = None  # of GATHERING and of STOPPING
        self._found: dict[int, m.MachineSurveyed] = {}  # by place, as below
        self._links: dict[tuple[int, int], m.LinkSurveyed] = {}
        self._to_measure = list(pairs)
        self._effects: list[Effect] = []
        self.phase = Phase.GATHERING

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Take one event; the effects are to be carried out in order."""
        if self.phase not in (Phase.DONE, Phase.FAILED):
            if self._deadline is None:
                self._deadline = now + self._cluster.join_timeout_s
            match event:
                case e.MessageReceived(peer, message):
                    self._on_message(peer, message, now)
                case e.PeerDisconnected(peer, reason):
                    self._on_disconnect(peer, reason)
                case e.StopRequested():
                    self._end("interrupted", INTERRUPTED)
                case e.Tick():
                    self._on_tick(now)
        effects, self._effects = self._effects, []
        return effects

    def results(self) -> Surveyed:
        """Raises LocalProtocolError before it is over."""
        if self.phase is not Phase.DONE:
            raise LocalProtocolError(f"a survey that is {self.phase.value} has no results")
        joins = tuple(member.join for member in self._roster.members)
        return Surveyed(joins, tuple(self._found[place] for place in range(len(joins))), dict(self._links))

    # ------------------------------------------------------------ workers come, and measure

    def _on_message(self, peer: Peer, message: m.ControlMessage, now: float) -> None:
        if isinstance(message, m.Heartbeat):
            self._effects.append(Send(peer, m.HeartbeatReply(sent_at_s=message.sent_at_s, answered_at_s=now)))
        member = self._roster.member(peer)
        if member is None:
            if isinstance(message, m.Join):
                self._on_join(peer, message, now)
            elif not isinstance(message, m.Heartbeat):
                self._effects.append(e.Disconnect(peer))
            return
        member.session.heard(now)
        match message:
            case m.Heartbeat() | m.Spans():
                pass
            case m.MachineSurveyed() if self.phase is Phase.MACHINES and member.place not in self._found:
                self._found[member.place] = message
                self._say(f"{member.name} has measured its machine ({len(self._found)} of {self._roster.num_workers})")
                if len(self._found) == self._roster.num_workers:
                    self._next_link(now)
            case m.LinkSurveyed() if self.phase is Phase.LINKS and member.place == self._to_measure[0][0]:
                self._links[self._to_measure.pop(0)] = message
                self._next_link(now)
            case _ if self.phase is Phase.STOPPING:  # all is found; whatever it is, it is the last word
                member.left = True
                self._finish_if_alone()
            case m.Failed(reason=reason) | m.LinkLost(reason=reason) | m.Goodbye(reason=reason):
                self._fail(member, reason)
            case _:
                self._fail(member, f"it sent {type(message).__name__} while the plan is {self.phase.value}")

    def _on_join(self, peer: Peer, join: m.Join, now: float) -> None:
        objection = self._roster.objection(join, self._terms)
        if objection:
            self._effects += [Send(peer, m.Refused(worker=join.worker, reason=objection)), e.Disconnect(peer)]
            self._say(objection)
            return
        cluster = self._cluster
        session = Session(cluster.heartbeat_interval_s, loading_timeout_s(cluster.heartbeat_timeout_s), now)
        self._roster.admit(peer, join, session)
        welcome = m.Welcome(
            run="",
            worker=join.worker,
            weights_address="",
            heartbeat_interval_s=cluster.heartbeat_interval_s,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
        )
        self._effects.append(Send(peer, welcome))
        self._say(f"{join.worker} joined from {join.host} ({len(self._roster)} of {self._roster.num_workers})")
        if self._roster.is_full:
            self._roster.seat(self._terms)
            joins = [member.join for member in self._roster.members]
            self._enter(Phase.MACHINES)
            self._effects += [Send(each.peer, self._order(joins, each.place)) for each in self._roster.members]

    def _next_link(self, now: float) -> None:
        if not self._to_measure:
            self._stop(now)
            return
        if self.phase is not Phase.LINKS:
            self._enter(Phase.LINKS)
        members = self._roster.members
        dialler, other = (members[place] for place in self._to_measure[0])
        self._say(f"measuring the link between {dialler.name} and {other.name}")
        order = m.SurveyLink(worker=other.name, data_address=other.join.data_address, duration_s=LINK_S)
        self._effects.append(Send(dialler.peer, order))

    # ------------------------------------------------------------ the end

    def _stop(self, now: float) -> None:
        self._tell_all(m.Stop(reason=_DONE, failed=False))
        self._deadline = now + GOODBYE_TIMEOUT_S
        self._enter(Phase.STOPPING)
        self._finish_if_alone()

    def _finish_if_alone(self) -> None:
        if not self._roster.present:
            self._enter(Phase.DONE)
            self._effects.append(e.Finish(0, "", stopped_early=False))

    def _on_disconnect(self, peer: Peer, reason: str) -> None:
        member = self._roster.member(peer)
        if member is None or member.left:
            return
        if self.phase is Phase.STOPPING:
            member.left = True
            self._finish_if_alone()
        else:
            self._fail(member, f"its connection ended ({reason})")

    def _on_tick(self, now: float) -> None:
        assert self._deadline is not None
        if self.phase is Phase.GATHERING and now >= self._deadline:
            joined = ", ".join(member.name for member in self._roster.members) or "none"
            self._end(
                f"{len(self._roster)} of {self._roster.num_workers} workers joined within "
                f"{self._cluster.join_timeout_s:g} s ({joined}); start the others, or raise cluster.join_timeout_s"
            )
        elif self.phase is Phase.STOPPING and now >= self._deadline:
            for member in self._roster.present:
                member.left = True
            self._finish_if_alone()
        elif self.phase is not Phase.STOPPING:
            for member in self._roster.present:
                for effect in member.session.poll(now):
                    if isinstance(effect, PeerSilent):
                        self._fail(member, f"no heartbeat for {effect.silence_s:.1f} s")

    def _fail(self, member: Member, reason: str) -> None:
        member.left = True
        self._end(f"{member.describe()} failed while the plan was {self.phase.value}: {reason}")

    def _end(self, cause: str, exit_code: int = 1) -> None:
        if self.phase is Phase.FAILED:
            return
        self._tell_all(m.Stop(reason=cause, failed=True))
        self._enter(Phase.FAILED)
        self._effects.append(e.Finish(exit_code, cause, stopped_early=True))

    def _tell_all(self, message: m.ControlMessage) -> None:
        self._effects += [Send(member.peer, message) for member in self._roster.present]

    def _enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise LocalProtocolError(f"a survey cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase
