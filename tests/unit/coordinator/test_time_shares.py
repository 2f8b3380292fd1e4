"""Where a step's time went, from drawn timelines: every wait is split among its causes, and the shares add up."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator import events as e
from coordinator.accounts import MAX_PENDING_SPANS, Accounts, LinkWait, Times, split_step
from coordinator.shares import time_lines, time_of
from pipecomp.protocol.clocks import RemoteClock, RoundTrip
from pipecomp.protocol.spans import Doing, Span, Subject, pack
from pipecomp.types import Kind

SECOND = 10**9
VALUES = LinkWait("0/0-1", Kind.FORWARD, "w0")
# One letter of a drawing is a second. `s` is the store's part of a codec's work; `-` a wait, `.` nothing.
DOINGS = {
    "W": Doing.WEIGHTS,
    "F": Doing.FORWARD, "B": Doing.BACKWARD, "e": Doing.ENCODE, "d": Doing.DECODE, "s": Doing.STORE, "r": Doing.RECEIVE,
    "-": Doing.WAIT, "l": Doing.WAIT_ENCODED, "n": Doing.NORMS, "v": Doing.VOTE, "o": Doing.OPTIMIZER, "t": Doing.TIED,
    "=": Doing.STEP,
}  # fmt: skip


def drawn(*lanes: str, step: int = 1) -> list[Span]:
    """Spans of microbatch 0 going from stage 0 to stage 1: a run of one letter is one span."""
    spans = []
    for lane in lanes:
        start = 0
        for at in range(1, len(lane) + 1):
            if at == len(lane) or lane[at] != lane[start]:
                if lane[start] in DOINGS:
                    spans.append(span(DOINGS[lane[start]], start, at, step=step))
                start = at
    return spans


def span(doing: Doing, start: float, end: float, *, step: int = 1, kind: Kind = Kind.FORWARD, part: int = 0) -> Span:
    computes = doing in (Doing.FORWARD, Doing.BACKWARD, Doing.WEIGHTS)
    stage, link = (0, "") if computes else (1, "0/0-1")
    about = Subject(kind, link, step, stage, part)
    return Span(doing, "lane", about, round(start * SECOND), round(end * SECOND))


def test_a_wait_is_split_into_bubble_coding_link_and_coding_again():
    times = split_step(
        {
            "w0": drawn("FFF.......", "....ee....", "=========="),
            "w1": drawn("---------F", ".......rd.", "=========="),
        }
    )  # fmt: skip
    #                    0123456789  computed at 3, encoded at 6, here at 8, decoded at 9
    assert times["w1"] == Times(10, 1, {VALUES: 2.0}, store_s=0, coding_s=3 + 1, bubble_s=3, num_steps=1)
    assert times["w1"].other_s == pytest.approx(0)


def test_gradients_of_weights_that_waited_are_computing():
    times = split_step({"w0": drawn("FFF.BB.WW.", "==========")})
    assert times["w0"] == Times(10, 3 + 2 + 2, {}, store_s=0, coding_s=0, bubble_s=0, num_steps=1)


def test_the_senders_own_time_counts_for_itself():
    times = split_step({"w0": drawn("FFF.lll...", "....ee....", "==========")})
    assert times["w0"] == Times(10, 3, {}, store_s=0, coding_s=3, bubble_s=0, num_steps=1)
    assert times["w0"].other_s == pytest.approx(4)


def test_what_was_here_before_it_was_wanted_is_no_link_time():
    times = split_step(
        {
            "w0": drawn("F.........", ".e........", "=========="),
            "w1": drawn("......--F.", "...r...d..", "=========="),
        }
    )  # fmt: skip
    assert times["w1"] == Times(10, 1, {VALUES: 0.0}, store_s=0, coding_s=2, bubble_s=0, num_steps=1)


def test_a_link_that_begins_before_the_wait_counts_from_the_wait_on():
    times = split_step(
        {
            "w0": drawn("F.........", ".e........", "=========="),
            "w1": drawn("...------F", ".......rd.", "=========="),
        }
    )  # fmt: skip
    assert times["w1"].links_s == {VALUES: 5.0}


def test_a_codec_that_waits_for_its_store_is_told_apart():
    times = split_step(
        {
            "w0": drawn("F.........", ".eeee.....", "..ss......", "=========="),
            "w1": drawn("---------F", ".....rddd.", ".......s..", "=========="),
        }
    )  # fmt: skip
    assert times["w1"] == Times(10, 1, {VALUES: 1.0}, store_s=2 + 1, coding_s=2 + 2, bubble_s=1, num_steps=1)


def test_waiting_for_the_last_values_to_be_encoded_is_coding_or_the_store():
    times = split_step({"w0": drawn("FF.lllll..", "..eeeeee..", "....sss...", "==========")})
    assert (times["w0"].coding_s, times["w0"].store_s) == (2.0, 3.0)


def test_who_is_done_first_waits_for_the_others_and_then_for_the_vote():
    times = split_step({"w0": drawn("FFFFFFnvvo", "=========="), "w1": drawn("FFn......", "...vvvvvvo", "==========")})
    assert times["w1"].bubble_s == 4.0  # until w0 has its gradients, at 7
    assert times["w1"].other_s == pytest.approx(1 + 2 + 1)  # norms, vote, optimizer
    assert times["w0"].bubble_s == 0.0


def test_a_gradient_comes_back_from_the_stage_after():
    behind = Subject(Kind.BACKWARD, "0/0-1", 1, 0, 0)
    workers = {
        "w1": [
            Span(Doing.BACKWARD, "c", Subject(Kind.BACKWARD, "", 1, 1, 0), 0, 4),
            Span(Doing.ENCODE, "k", behind, 5, 6),
            Span(Doing.STEP, "c", Subject(step=1), 0, 10),
        ],
        "w0": [
            Span(Doing.WAIT, "c", behind, 0, 9),
            Span(Doing.RECEIVE, "in", behind, 7, 8),
            Span(Doing.STEP, "c", Subject(step=1), 0, 10),
        ],
    }
    times = split_step(workers)["w0"]
    assert {wait: round(s * 1e9) for wait, s in times.links_s.items()} == {LinkWait("0/0-1", Kind.BACKWARD, "w1"): 2}
    assert (round(times.bubble_s * 1e9), round(times.coding_s * 1e9)) == (4, 2 + 1)


def test_a_tied_gradient_is_bubble_until_the_other_end_begins_and_then_the_link():
    def tied(doing: Doing, start: int, end: int, part: int = 0) -> Span:
        return Span(doing, "lane", Subject(Kind.TIED, "0/tied", 1, 0, part), start * SECOND, end * SECOND)

    workers = {
        "w0": [
            tied(Doing.TIED, 0, 10), tied(Doing.ENCODE, 0, 1), tied(Doing.ENCODE, 1, 2, 8),
            tied(Doing.RECEIVE, 5, 6), tied(Doing.RECEIVE, 8, 9, 8), *drawn("==========="),
        ],
        "w1": [tied(Doing.ENCODE, 3, 4), tied(Doing.ENCODE, 4, 5, 8), *drawn("===========")],
    }  # fmt: skip
    times = split_step(workers)["w0"]
    assert times.links_s == {LinkWait("0/tied", Kind.TIED, "w1"): 5.0}  # from 4 to 9
    assert (times.bubble_s, times.coding_s) == (3.0, 2.0)


def test_a_wait_whose_sender_told_nothing_is_other():
    times = split_step({"w1": drawn("-----F....", "==========")})
    assert times["w1"].other_s == pytest.approx(9)


def test_whatever_the_order_of_things_shares_are_never_negative_and_add_up():
    """A sender's clock may be off, so that what it says can contradict what the receiver says."""
    draw = np.random.default_rng(5)
    for _ in range(300):
        ends = np.sort(draw.uniform(0, 10, 8))
        early, late = (np.sort(draw.uniform(-2, 12, 6)) for _ in range(2))
        times = split_step(
            {
                "w0": [span(Doing.FORWARD, *early[:2]), span(Doing.ENCODE, *early[2:4]), span(Doing.STORE, *late[1:3])],
                "w1": [
                    span(Doing.WAIT, *ends[:2]), span(Doing.FORWARD, *ends[2:4]), span(Doing.WAIT_ENCODED, *ends[4:6]),
                    span(Doing.VOTE, *ends[6:]), span(Doing.RECEIVE, *late[4:]), span(Doing.NORMS, *early[4:]),
                    span(Doing.STEP, 0, 10),
                ],
            }
        )["w1"]  # fmt: skip
        parts = [times.computing_s, *times.links_s.values(), times.store_s, times.coding_s, times.bubble_s, times.other_s]
        assert min(parts) >= -1e-9
        assert sum(parts) == pytest.approx(times.total_s)


# ---------------------------------------------------------------- from reports to totals


def report(worker: str, *spans: Span) -> e.SpansReported:
    return e.SpansReported(worker, pack(spans), 0)


def moved(spans: list[Span], by_s: float) -> list[Span]:
    by = round(by_s * SECOND)
    return [s._replace(start_ns=s.start_ns + by, end_ns=s.end_ns + by) for s in spans]


def test_workers_whose_clocks_differ_are_compared_on_ours():
    accounts = Accounts()
    clocks = {"w0": RemoteClock(), "w1": RemoteClock()}
    clocks["w0"].take(RoundTrip(5000.0, 105.0, 5000.0))  # 4895 s ahead of ours
    clocks["w1"].take(RoundTrip(30.0, 105.0, 30.0))  # 75 s behind
    w0 = moved(drawn("FFF.......", "....ee....", "=========="), 5000)
    w1 = moved(drawn("---------F", ".......rd.", "=========="), 30)
    accounts.take([report("w0", *w0), report("w1", *w1)], clocks, [1])
    assert accounts.totals()["w1"] == Times(10, 1, {VALUES: 2.0}, store_s=0, coding_s=4, bubble_s=3, num_steps=1)


def test_a_step_counts_once_it_is_over_and_in_whatever_pieces_it_came():
    accounts = Accounts()
    spans = drawn("FFF.lll...", "....ee....", "==========")
    accounts.take([report("w0", *spans[:2])], {}, [])
    accounts.take([report("w0", *spans[2:])], {}, [])
    assert accounts.totals() == {}
    accounts.take([], {}, [1])
    accounts.take([report("w0", *drawn("FFFFF.....", "==========", step=2))], {}, [2])
    assert accounts.totals()["w0"] == Times(20, 8, {}, store_s=0, coding_s=3, bubble_s=0, num_steps=2)


def test_an_aborted_step_counts_for_nothing():
    accounts = Accounts()
    accounts.take([report("w0", *drawn("FFF..", "====="))], {}, [])  # step 1, never over
    accounts.take([report("w0", *drawn("F....", "=====", step=2))], {}, [2])
    assert accounts.totals()["w0"].computing_s == 1.0
    assert accounts._pending == {}


def test_evaluations_and_idle_time_between_steps_are_no_step_time():
    accounts = Accounts()
    idle = Span(Doing.IDLE, "c", Subject(step=1), 0, 99)
    evaluation = Span(Doing.WAIT, "c", Subject(Kind.EVALUATION, "0/0-1", 1), 0, 99)
    accounts.take([report("w0", idle, evaluation, *drawn("F", "=="))], {}, [1])
    assert accounts.totals()["w0"] == Times(2, 1, {}, store_s=0, coding_s=0, bubble_s=0, num_steps=1)


def test_steps_that_never_end_do_not_fill_the_memory():
    accounts = Accounts()
    many = report("w0", *[span(Doing.FORWARD, 0, 1, step=1)] * 1000)
    for step in range(1, 3 * MAX_PENDING_SPANS // 1000):
        more = report("w0", *[span(Doing.FORWARD, 0, 1, step=step)] * 1000) if step % 50 == 0 else many
        accounts.take([more], {}, [])
    assert accounts._num_pending <= MAX_PENDING_SPANS
    assert sum(len(spans) for workers in accounts._pending.values() for spans in workers.values()) == accounts._num_pending


# ---------------------------------------------------------------- in the summary


TIMES = Times(
    total_s=200.0, computing_s=142.0, links_s={VALUES: 36.0, LinkWait("0/1-2", Kind.BACKWARD, "w2"): 4.0},
    store_s=2.0, coding_s=0.0, bubble_s=12.0, num_steps=10,
)  # fmt: skip


def test_shares_of_the_summary_add_up_to_one():
    row = time_of(TIMES)
    assert row["links"] == [
        {"link": "0/0-1", "kind": "forward", "from": "w0", "share": 0.18},
        {"link": "0/1-2", "kind": "backward", "from": "w2", "share": 0.02},
    ]
    assert (row["steps"], row["step_s"], row["computing"], row["store"], row["bubble"]) == (10, 20.0, 0.71, 0.01, 0.06)
    assert row["link"] == pytest.approx(0.2)
    assert sum(row[name] for name in ("computing", "link", "store", "coding", "bubble", "other")) == pytest.approx(1.0)


def test_a_person_reads_the_largest_share_first_and_nothing_about_what_took_no_time():
    assert time_lines({"w1": time_of(TIMES)}) == (
        "w1: computing 71 %, waiting for values from w0 over the link 18 %,\n"
        "    waiting for others to compute 6 %, waiting for gradients from w2 over the link 2 %,\n"
        "    optimizer and all the rest 2 %, waiting for stored messages 1 %"
    )


def test_nothing_is_said_where_nothing_was_measured():
    assert time_lines({}) == ""
