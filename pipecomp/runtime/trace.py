"""What this worker does from when to when, noted beside the work. Knows a clock and spans; no sockets, no files, no torch.

Spans are noted where the work is: in the compute thread, in codec threads, in the event loop. All go into one list of bounded
length (law 10), which the worker's service empties with every heartbeat and at the end of every step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, TypeVar

from pipecomp.protocol.spans import Doing, Span, Subject

P = ParamSpec("P")
T = TypeVar("T")

COMPUTE = "compute"
"""The lane of what the compute thread does, and of what it has to wait for."""
CAPACITY = 1 << 16
"""Spans that are kept until they are taken: a step has about ten a microbatch and stage."""


class Recorder:
    """Notes spans; every method may be called in any thread."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns, *, capacity: int = CAPACITY) -> None:
        """`clock_ns`: the clock whose seconds the worker's heartbeats carry."""
        self.now_ns = clock_ns
        self._capacity = capacity
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._num_dropped = 0
        self._inside = threading.local()  # .about: what this thread's running function is about

    def add(self, doing: Doing, lane: str, about: Subject, start_ns: int) -> None:
        """Note what began at `start_ns` and ends now. Dropped, and counted, where too much waits to be taken."""
        span = Span(doing, lane, about, start_ns, self.now_ns())
        with self._lock:
            if len(self._spans) < self._capacity:
                self._spans.append(span)
            else:
                self._num_dropped += 1

    def timed(self, doing: Doing, about: Subject, function: Callable[P, T], *, lane: str = "") -> Callable[P, T]:
        """`function`, noted whenever it runs; in the lane of its thread unless one is given."""
        return functools.partial(self._run, doing, about, lane, function)

    def during(self, doing: Doing, lane: str, about: Subject) -> AbstractContextManager[None]:
        """Note how long the block takes, however it ends."""
        return _Block(self, doing, lane, about)

    def waited_for_store(self, seconds: float) -> None:
        """The running function of this thread has just waited so long for its store."""
        about = getattr(self._inside, "about", None) or Subject()
        self.add(Doing.STORE, threading.current_thread().name, about, self.now_ns() - int(seconds * 1e9))

    def take(self) -> tuple[list[Span], int]:
        """All spans since the last call, and how many were dropped."""
        with self._lock:
            spans, self._spans = self._spans, []
            num_dropped, self._num_dropped = self._num_dropped, 0
        return spans, num_dropped

    def _run(self, doing: Doing, about: Subject, lane: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._inside.about = about
        started_ns = self.now_ns()
        try:
            return function(*args, **kwargs)
        finally:
            self._inside.about = None
            self.add(doing, lane or threading.current_thread().name, about, started_ns)


class _Block(contextlib.AbstractContextManager[None]):
    """One `during`."""

    def __init__(self, recorder: Recorder, doing: Doing, lane: str, about: Subject) -> None:
        self._recorder, self._doing, self._lane, self._about = recorder, doing, lane, about
        self._started_ns = 0

    def __enter__(self) -> None:
        self._started_ns = self._recorder.now_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._recorder.add(self._doing, self._lane, self._about, self._started_ns)


class Deaf(Recorder):
    """Notes nothing, at next to no cost."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)

    def add(self, doing: Doing, lane: str, about: Subject, start_ns: int) -> None:
        pass

    def timed(self, doing: Doing, about: Subject, function: Callable[P, T], *, lane: str = "") -> Callable[P, T]:
        return function

    def during(self, doing: Doing, lane: str, about: Subject) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def waited_for_store(self, seconds: float) -> None:
        pass


DEAF = Deaf()


class StepNotes:
    """Notes of one pipeline what lies around its actions: whole steps, idle time between them, waiting for the vote."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._idle_since_ns = recorder.now_ns()
        self._began_ns = self._prepared_ns = 0

    def begin(self, about: Subject) -> None:
        """A plan is here: of a step, or of an evaluation."""
        self._recorder.add(Doing.IDLE, COMPUTE, about, self._idle_since_ns)
        self._began_ns = self._recorder.now_ns()

    def prepared(self) -> None:
        """The step's gradients are complete."""
        self._prepared_ns = self._recorder.now_ns()

    def decided(self, step: int) -> None:
        """The prepared step is to be committed."""
        self._recorder.add(Doing.VOTE, COMPUTE, Subject(step=step), self._prepared_ns)

    def end(self, doing: Doing, step: int) -> None:
        """The step is over; one that is aborted may never have begun here."""
        if self._began_ns:
            self._recorder.add(doing, COMPUTE, Subject(step=step), self._began_ns)
        self.idle()

    def idle(self) -> None:
        """Nothing is under way."""
        self._began_ns = 0
        self._idle_since_ns = self._recorder.now_ns()
