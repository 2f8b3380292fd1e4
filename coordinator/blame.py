"""Who broke the run, when several report trouble at once. Pure; time is an argument.

One dead worker makes many cries: its neighbours lose their links, its connection breaks, `launch` reaps it. The first cry
opens a case; a better one about the same worker replaces its reason; rumours give way to any better evidence.

    RUMOUR    a neighbour cannot reach it         waits a heartbeat timeout, for silence may name the other end
    GONE      its connection or process ended     waits a moment for its own last words
    CERTAIN   its own words, a signal, silence    decides at once
"""

from __future__ import annotations

import enum
from typing import NamedTuple

LAST_WORDS_S = 1.0
"""How long an ended connection or process waits for a better reason."""


class Evidence(enum.IntEnum):
    RUMOUR = 0
    GONE = 1
    CERTAIN = 2


class Charge(NamedTuple):
    """One worker under suspicion."""

    worker: str
    reason: str
    evidence: Evidence
    decided_at: float


class Blame:
    """At most one open case; once decided it stays."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._patience_s = {
            Evidence.RUMOUR: heartbeat_timeout_s + LAST_WORDS_S,
            Evidence.GONE: LAST_WORDS_S,
            Evidence.CERTAIN: 0.0,
        }
        self.charge: Charge | None = None

    def accuse(self, worker: str, reason: str, evidence: Evidence, now: float) -> None:
        """Add what was heard about `worker`."""
        new = Charge(worker, reason, evidence, now + self._patience_s[evidence])
        old = self.charge
        if old is None or (evidence > old.evidence and (old.evidence is Evidence.RUMOUR or old.worker == worker)):
            self.charge = new

    def is_decided(self, now: float) -> bool:
        return self.charge is not None and now >= self.charge.decided_at
