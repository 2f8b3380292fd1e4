"""Liveness of the control session: when to send a heartbeat, and when silence means loss. Knows times; no sockets or clocks.

A session is heard whenever any message comes. Heartbeats are sent every `interval_s` whatever else is sent, since they carry
what the worker is doing. Silence is reported once; a session that is heard again after that is not revived.

    looks at the time   | | | | | |         pause          | | | |      a process that was frozen, or got no core, heard nothing
    silence counts      -------->|                         |------->    meanwhile, whatever was said: its patience begins anew
"""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from typing import NamedTuple


class SessionState(enum.Enum):
    ALIVE = "alive"
    SILENT = "silent"


class Heard(NamedTuple):
    """Event: a message came."""


class TimePassed(NamedTuple):
    """Event: look at the time."""


class SendHeartbeat(NamedTuple):
    """Effect: a heartbeat is due."""


class PeerSilent(NamedTuple):
    """Effect: nothing was heard for `silence_s`, longer than allowed. Given once."""

    silence_s: float


SessionEvent = Heard | TimePassed
SessionEffect = SendHeartbeat | PeerSilent

_AFTER_TIMEOUT: Mapping[SessionState, SessionState] = types.MappingProxyType(
    {SessionState.ALIVE: SessionState.SILENT, SessionState.SILENT: SessionState.SILENT}
)


LOADING_TIMEOUT_S = 30.0
"""The least patience until a worker has built its layers: both ends read and build then, which a busy machine makes slow, and
nothing is lost but time if one of them is gone. A connection that breaks is told at once in any case."""


def loading_timeout_s(timeout_s: float) -> float:
    """The patience before a worker is ready, where that of a run under way is `timeout_s`."""
    return max(timeout_s, LOADING_TIMEOUT_S)


class Session:
    """One end of a control session. `poll` it several times in each `timeout_s`."""

    def __init__(self, interval_s: float, timeout_s: float, now: float) -> None:
        self.state = SessionState.ALIVE
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._heard_at = now
        self._looked_at = now
        self._send_at = now

    def be_patient(self, timeout_s: float, now: float) -> None:
        """From now on silence is loss after `timeout_s`; what there was of it does not count."""
        self._timeout_s = timeout_s
        self._heard_at = now

    def handle(self, event: SessionEvent, *, now: float) -> list[SessionEffect]:
        """Take one event at time `now` (seconds of a clock that never goes back)."""
        if self.state is SessionState.SILENT:
            return []
        if isinstance(event, Heard):
            self._heard_at = now
            return []
        if now - self._looked_at >= self._timeout_s / 2:
            self._heard_at = now
        self._looked_at = now
        silence_s = now - self._heard_at
        if silence_s >= self._timeout_s:
            self.state = _AFTER_TIMEOUT[self.state]
            return [PeerSilent(silence_s)]
        if now < self._send_at:
            return []
        # From now, not from when it was due: a late loop sends one heartbeat, not all those it missed.
        self._send_at = now + self._interval_s
        return [SendHeartbeat()]

    def heard(self, now: float) -> None:
        """A message came."""
        self.handle(Heard(), now=now)

    def poll(self, now: float) -> tuple[SessionEffect, ...]:
        """What is due at `now`."""
        return tuple(self.handle(TimePassed(), now=now))

    def next_deadline(self) -> float:
        """When to call `poll` next; infinity once the peer was found silent."""
        if self.state is SessionState.SILENT:
            return float("inf")
        return min(self._send_at, self._heard_at + self._timeout_s)
