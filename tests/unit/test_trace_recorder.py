"""Noting spans: when, in which lane, about what, within which bounds, and at no cost where nobody listens."""

from __future__ import annotations

import contextlib
import threading

import pytest

from pipecomp.protocol.spans import Doing, Span, Subject
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.trace import COMPUTE, DEAF, Recorder, StepNotes
from pipecomp.types import Kind

ABOUT = Subject(Kind.FORWARD, "0/0-1", 3, 1, 2)


class HandClock:
    """Nanoseconds that a test turns."""

    def __init__(self) -> None:
        self.now = 100

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def recorder(clock: HandClock) -> Recorder:
    return Recorder(clock)


def test_a_function_is_noted_as_it_runs(recorder: Recorder, clock: HandClock) -> None:
    def work(seconds: int, *, more: int) -> str:
        clock.now += seconds + more
        return "done"

    timed = recorder.timed(Doing.FORWARD, ABOUT, work, lane=COMPUTE)
    clock.now = 200
    assert timed(20, more=3) == "done"
    assert recorder.take() == ([Span(Doing.FORWARD, COMPUTE, ABOUT, 200, 223)], 0)


async def test_a_function_without_a_lane_is_in_that_of_its_thread(recorder: Recorder) -> None:
    thread = ComputeThread()
    name = await thread.run(recorder.timed(Doing.ENCODE, ABOUT, lambda: threading.current_thread().name))
    thread.close()
    assert [span.lane for span in recorder.take()[0]] == [name]
    assert name.startswith("compute")


def test_a_function_that_fails_is_noted_too(recorder: Recorder) -> None:
    with pytest.raises(ZeroDivisionError):
        recorder.timed(Doing.DECODE, ABOUT, lambda: 1 / 0)()
    assert [span.doing for span in recorder.take()[0]] == [Doing.DECODE]


def test_a_block_is_noted_however_it_ends(recorder: Recorder, clock: HandClock) -> None:
    with contextlib.suppress(KeyError), recorder.during(Doing.WAIT, COMPUTE, ABOUT):
        clock.now += 7
        raise KeyError
    assert recorder.take() == ([Span(Doing.WAIT, COMPUTE, ABOUT, 100, 107)], 0)


def test_what_a_store_waits_is_about_what_runs_in_its_thread(recorder: Recorder, clock: HandClock) -> None:
    clock.now = 10**9

    def decode() -> None:
        clock.now += 500
        recorder.waited_for_store(300e-9)
        clock.now += 5

    recorder.timed(Doing.DECODE, ABOUT, decode, lane="codec_1")()
    recorder.waited_for_store(0.0)
    (store, outer, elsewhere), _ = recorder.take()
    assert store == Span(Doing.STORE, threading.current_thread().name, ABOUT, 10**9 + 200, 10**9 + 500)
    assert outer == Span(Doing.DECODE, "codec_1", ABOUT, 10**9, 10**9 + 505)
    assert elsewhere.about == Subject()


def test_what_was_taken_is_not_taken_again(recorder: Recorder) -> None:
    recorder.add(Doing.IDLE, COMPUTE, ABOUT, 0)
    assert len(recorder.take()[0]) == 1
    assert recorder.take() == ([], 0)


def test_a_list_that_nobody_takes_stays_bounded_and_counts_what_it_drops(clock: HandClock) -> None:
    recorder = Recorder(clock, capacity=3)
    for start in range(5):
        recorder.add(Doing.IDLE, COMPUTE, ABOUT, start)
    spans, num_dropped = recorder.take()
    assert ([span.start_ns for span in spans], num_dropped) == ([0, 1, 2], 2)
    recorder.add(Doing.IDLE, COMPUTE, ABOUT, 9)
    assert recorder.take()[1] == 0


def test_all_threads_may_note_at_once() -> None:
    recorder = Recorder()
    timed = recorder.timed(Doing.ENCODE, ABOUT, int)
    threads = [threading.Thread(target=lambda: [timed() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.take()[0]) == 2000


def test_nobody_listening_costs_a_function_nothing() -> None:
    def work() -> None:
        pass

    assert DEAF.timed(Doing.FORWARD, ABOUT, work) is work
    with DEAF.during(Doing.WAIT, COMPUTE, ABOUT):
        DEAF.add(Doing.IDLE, COMPUTE, ABOUT, 0)
        DEAF.waited_for_store(1.0)
    assert DEAF.take() == ([], 0)


# ---------------------------------------------------------------- around the actions


def test_a_step_holds_its_vote_and_idle_time_lies_between_steps(recorder: Recorder, clock: HandClock) -> None:
    notes = StepNotes(recorder)
    for step in (1, 2):
        clock.now += 10  # idle
        notes.begin(Subject(step=step))
        clock.now += 50  # actions
        notes.prepared()
        clock.now += 5  # vote
        notes.decided(step)
        clock.now += 20  # optimizer
        notes.end(Doing.STEP, step)
    assert [(span.doing, span.about.step, span.start_ns, span.end_ns) for span in recorder.take()[0]] == [
        (Doing.IDLE, 1, 100, 110), (Doing.VOTE, 1, 160, 165), (Doing.STEP, 1, 110, 185),
        (Doing.IDLE, 2, 185, 195), (Doing.VOTE, 2, 245, 250), (Doing.STEP, 2, 195, 270),
    ]  # fmt: skip


def test_a_step_that_is_aborted_before_it_began_here_leaves_no_note(recorder: Recorder, clock: HandClock) -> None:
    notes = StepNotes(recorder)
    notes.begin(Subject(step=1))
    clock.now += 3
    notes.end(Doing.ABORTED, 1)
    notes.end(Doing.ABORTED, 2)
    assert [(span.doing, span.about.step) for span in recorder.take()[0]] == [(Doing.IDLE, 1), (Doing.ABORTED, 1)]
