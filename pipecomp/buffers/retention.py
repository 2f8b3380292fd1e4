"""Which samples a link keeps messages of, decided at its sender and followed by its receiver. Knows steps, ids and bytes.

    room left                               kept
    kept before                             kept, at its new size; if that does not fit, evicted
    full, all others still come by          refused: the next visit is a first visit again
    full, and some have not come for long   they go, those idle longest first, and the new one is kept
    full, and some are of an earlier run    those that have not come in this one go first

An epoch visits all samples in turn. So whoever evicts the least recently used one evicts what is wanted next, and at any capacity
below the whole data set nothing is ever found. Refusing new samples instead keeps as large a share as fits, epoch after epoch.
Only a data set that moved on makes room: a sample is idle if it has not come for more than twice as many steps as the longest
time between two visits of one sample so far. That time means little before an epoch has come round, so nothing is evicted until
as many revisits were committed as samples are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from pipecomp.errors import LocalProtocolError
from pipecomp.types import SampleId


class Retained(NamedTuple):
    """What becomes of a visit's message once its step commits."""

    keep: bool
    evicted: tuple[SampleId, ...] = ()


class _Kept(NamedTuple):
    nbytes: int
    last_step: int  # 0: in an earlier run


class _OpenStep:
    """What one step would change."""

    def __init__(self) -> None:
        self.visits: dict[SampleId, int] = {}  # bytes of what is kept
        self.refused: set[SampleId] = set()
        self.evicted: set[SampleId] = set()
        self.replaced: dict[SampleId, int] = {}  # bytes that this step, and no other open one, takes away
        self.growth_nbytes = 0  # of visits, less what they replace and what is evicted

    def touches(self, sample_id: SampleId) -> bool:
        return sample_id in self.visits or sample_id in self.evicted

    def replace(self, sample_id: SampleId, nbytes: int) -> None:
        """So many bytes go with this step; all that is known of them before is void."""
        self.growth_nbytes += self.replaced.pop(sample_id, 0) - nbytes
        if nbytes:
            self.replaced[sample_id] = nbytes


class Retention:
    """The kept samples in the order of their last visit. Every call takes constant time, spread over the calls before it."""

    def __init__(self, capacity_nbytes: int) -> None:
        """`capacity_nbytes`: of all committed messages; both ends agreed on it."""
        self.capacity_nbytes = capacity_nbytes
        self._kept: OrderedDict[SampleId, _Kept] = OrderedDict()  # idle longest first
        self._nbytes = 0
        self._open: dict[int, _OpenStep] = {}
        self._longest_gap = 0  # steps
        self._num_revisits = 0

    @property
    def nbytes(self) -> int:
        """Of all committed messages that are kept; never above the capacity."""
        return self._nbytes

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def adopt(self, sample_id: SampleId, nbytes: int) -> bool:
        """A message that an earlier run left, before the first visit; False if there is no room: it has to go."""
        if self._nbytes + nbytes > self.capacity_nbytes:
            return False
        self._kept[sample_id] = _Kept(nbytes, 0)
        self._nbytes += nbytes
        return True

    def visit(self, step: int, sample_id: SampleId, nbytes: int) -> Retained:
        """A sample's new message, of `nbytes`, in `step`. Depends on nothing but the calls before it.

        Raises:
            LocalProtocolError: the sample was already visited in this step.
        """
        now = self._open.setdefault(step, _OpenStep())
        if sample_id in now.visits or sample_id in now.refused:
            raise LocalProtocolError(f"sample {sample_id} was already visited in step {step}")
        old = self._kept.get(sample_id)
        is_free = old is not None and not any(each.touches(sample_id) for each in self._open.values())
        growth = nbytes - (old.nbytes if old is not None and is_free else 0)
        missing = growth - self._room(step)
        evicted = self._idle(step, sample_id, missing) if missing > 0 else []
        if missing > 0 and not evicted:
            now.refused.add(sample_id)
            return Retained(False, () if old is None or sample_id in now.evicted else self._evict(step, [sample_id]))
        if old is not None and is_free:
            now.replace(sample_id, old.nbytes)
        now.visits[sample_id] = nbytes
        now.growth_nbytes += nbytes
        return Retained(True, self._evict(step, evicted))

    def commit(self, step: int) -> None:
        now = self._open.pop(step, None)
        if now is None:
            return
        for sample_id in now.evicted - now.visits.keys():
            self.forget(sample_id)
        for sample_id, nbytes in now.visits.items():
            old = self._kept.pop(sample_id, None)
            if old is not None:
                self._nbytes -= old.nbytes
                if old.last_step:
                    self._num_revisits += 1
                    self._longest_gap = max(self._longest_gap, step - old.last_step)
            self._kept[sample_id] = _Kept(nbytes, step)
            self._nbytes += nbytes
            self._tell_others(sample_id, nbytes)

    def abort(self, step: int) -> None:
        self._open.pop(step, None)

    def forget(self, sample_id: SampleId) -> None:
        """A kept message turned out to be lost."""
        old = self._kept.pop(sample_id, None)
        if old is not None:
            self._nbytes -= old.nbytes
            self._tell_others(sample_id, 0)

    def _room(self, step: int) -> int:
        """What `step` may grow by however the other open steps end."""
        others = sum(max(each.growth_nbytes, 0) for number, each in self._open.items() if number != step)
        return self.capacity_nbytes - self._nbytes - others - self._open[step].growth_nbytes

    def _idle(self, step: int, sample_id: SampleId, nbytes: int) -> list[SampleId]:
        """Idle samples of at least `nbytes` together; none if there are not so many."""
        is_round = self._num_revisits >= max(len(self._kept), 1)
        found, total = [], 0
        for candidate, kept in self._kept.items():
            if kept.last_step and not (is_round and step - kept.last_step > 2 * self._longest_gap):
                break
            if candidate != sample_id and not any(each.touches(candidate) for each in self._open.values()):
                found.append(candidate)
                total += kept.nbytes
                if total >= nbytes:
                    return found
        return []

    def _evict(self, step: int, sample_ids: list[SampleId]) -> tuple[SampleId, ...]:
        now = self._open[step]
        for sample_id in sample_ids:
            if not any(each.touches(sample_id) for each in self._open.values()):
                now.replace(sample_id, self._kept[sample_id].nbytes)
            now.evicted.add(sample_id)
        return tuple(sample_ids)

    def _tell_others(self, sample_id: SampleId, nbytes: int) -> None:
        """Open steps that would replace a sample's bytes replace others now."""
        for each in self._open.values():
            if sample_id in each.replaced:
                each.replace(sample_id, nbytes)
