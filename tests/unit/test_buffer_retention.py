"""What a link keeps within its capacity: whoever came first, until the data set moves on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.buffers.retention import Retained, Retention
from pipecomp.errors import LocalProtocolError
from pipecomp.types import SampleId

KEPT, REFUSED = Retained(True), Retained(False)


def run(retention: Retention, *steps: list[int], first: int = 1, nbytes: int = 10) -> list[Retained]:
    """Each step visits its samples and commits."""
    told = []
    for step, samples in enumerate(steps, first):
        told += [retention.visit(step, SampleId(sample), nbytes) for sample in samples]
        retention.commit(step)
    return told


def test_samples_are_kept_while_there_is_room_and_refused_after() -> None:
    retention = Retention(30)
    assert run(retention, [1, 2], [3, 4]) == [KEPT, KEPT, KEPT, REFUSED]
    assert (retention.nbytes, retention.num_kept) == (30, 3)


def test_what_is_kept_stays_kept_epoch_after_epoch() -> None:
    retention = Retention(40)
    epoch = [[1, 2], [3, 4], [5, 6], [7, 8]]
    run(retention, *epoch)
    for number in range(1, 6):
        assert run(retention, *epoch, first=1 + 4 * number) == [KEPT] * 4 + [REFUSED] * 4


def test_a_data_set_that_moved_on_makes_room() -> None:
    retention = Retention(20)
    run(retention, [1], [2], [1], [2])  # a sample comes every second step
    assert run(retention, [3], [4], [3], first=5) == [REFUSED, REFUSED, REFUSED]  # 1 was last seen in step 3
    assert run(retention, [3], [4], first=8) == [Retained(True, (SampleId(1),)), Retained(True, (SampleId(2),))]
    assert retention.nbytes == 20


def test_nothing_is_evicted_before_any_sample_came_twice() -> None:
    retention = Retention(20)
    assert run(retention, [1], [2], *([n] for n in range(3, 100)))[2:] == [REFUSED] * 97


def test_a_few_early_revisits_say_nothing_of_the_rest() -> None:
    """At the start of a second, shuffled epoch some samples come back at once; the others are not idle for that."""
    retention = Retention(180)
    run(retention, *([n] for n in range(20)))
    assert run(retention, [17], [19], [16], [18], first=21) == [KEPT, REFUSED, KEPT, REFUSED]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kept", [1, 3, 10, 50, 99])
def test_shuffled_epochs_keep_their_whole_share(seed: int, kept: int) -> None:
    rng, retention, samples = random.Random(seed), Retention(10 * kept), list(range(100))
    for epoch in range(6):
        rng.shuffle(samples)
        told = run(retention, *([sample] for sample in samples), first=1 + 100 * epoch)
        assert [each for each in told if each.evicted] == []
        assert sum(each.keep for each in told) == kept


def test_a_row_that_changes_its_size_is_accounted_anew() -> None:
    retention = Retention(30)
    run(retention, [1, 2])
    assert retention.visit(2, SampleId(1), 20) == KEPT
    retention.commit(2)
    assert retention.nbytes == 30
    assert retention.visit(3, SampleId(1), 5) == KEPT
    retention.commit(3)
    assert retention.nbytes == 15


def test_a_row_that_no_longer_fits_is_refused_and_its_old_one_goes() -> None:
    retention = Retention(30)
    run(retention, [1, 2])
    assert retention.visit(2, SampleId(1), 21) == Retained(False, (SampleId(1),))
    assert retention.visit(2, SampleId(3), 20) == KEPT
    retention.commit(2)
    assert retention.nbytes == 30


def test_an_aborted_step_leaves_no_trace() -> None:
    retention = Retention(20)
    run(retention, [1])
    assert retention.visit(2, SampleId(2), 10) == KEPT
    assert retention.visit(2, SampleId(1), 11) == Retained(False, (SampleId(1),))
    retention.abort(2)
    retention.commit(2)
    assert (retention.nbytes, retention.num_kept) == (10, 1)
    assert run(retention, [1, 2, 3], first=3) == [KEPT, KEPT, REFUSED]


def test_a_forgotten_sample_makes_room() -> None:
    retention = Retention(10)
    run(retention, [1])
    retention.forget(SampleId(1))
    retention.forget(SampleId(7))
    assert run(retention, [2, 1], first=2) == [KEPT, REFUSED]


def test_a_sample_is_visited_once_a_step() -> None:
    retention = Retention(10)
    retention.visit(1, SampleId(1), 10)
    with pytest.raises(LocalProtocolError, match="sample 1 was already visited in step 1"):
        retention.visit(1, SampleId(1), 10)


def test_an_eviction_gives_no_room_to_another_step_before_it_is_certain() -> None:
    retention = Retention(20)
    run(retention, [1], [2], [1], [2])
    assert retention.visit(9, SampleId(3), 4) == Retained(True, (SampleId(1),))
    assert retention.visit(10, SampleId(1), 10) == Retained(True, (SampleId(2),))
    assert retention.visit(10, SampleId(4), 6) == REFUSED
    retention.commit(10)
    retention.abort(9)
    assert retention.nbytes == 10


calls = st.lists(
    st.tuples(
        st.sampled_from(["visit", "visit", "visit", "visit", "commit", "commit", "abort", "forget"]),
        st.integers(0, 2),  # which open step
        st.integers(0, 7),  # which sample
        st.integers(0, 60),
    ),
    max_size=120,
)


@given(calls, st.integers(0, 150))
def test_the_capacity_holds_whatever_happens(calls: list[tuple[str, int, int, int]], capacity: int) -> None:
    """The receiver's side: it stores what it is told to keep and drops what it is told to."""
    retention, open_steps, next_step = Retention(capacity), [1, 2, 3], 4
    held: dict[int, int] = {}
    staged: dict[int, dict[int, int | None]] = {}
    for call, which, sample, nbytes in calls:
        step = open_steps[which]
        changes = staged.setdefault(step, {})
        if call == "visit":
            if changes.get(sample) is not None or ("refused", sample) in changes:
                continue
            told = retention.visit(step, SampleId(sample), nbytes)
            for evicted in told.evicted:
                changes.setdefault(evicted, None)
            if told.keep:
                changes[sample] = nbytes
            else:
                changes["refused", sample] = None
        elif call == "forget":
            retention.forget(SampleId(sample))
            held.pop(sample, None)
        else:
            if call == "commit":
                retention.commit(step)
                for key, value in changes.items():
                    if value is None:
                        held.pop(key, None)
                    else:
                        held[key] = value
            else:
                retention.abort(step)
            del staged[step]
            open_steps[which], next_step = next_step, next_step + 1
        assert sum(held.values()) == retention.nbytes <= capacity
        assert len(held) == retention.num_kept


def test_ten_thousand_samples_are_looked_at_once_each() -> None:
    """Refusing is as cheap as keeping: it looks at the one that is idle longest, not at all of them."""
    retention = Retention(10 * 5000)

    class Counted(type(retention._kept)):
        looks = 0

        def items(self):
            for item in super().items():
                Counted.looks += 1
                yield item

    retention._kept = Counted()
    for epoch in range(3):
        run(retention, *([n] for n in range(10_000)), first=1 + 10_000 * epoch)
    assert retention.num_kept == 5000
    assert Counted.looks <= 30_000


def test_what_an_earlier_run_left_is_kept_where_it_is_visited() -> None:
    retention = Retention(20)
    assert [retention.adopt(SampleId(sample), 10) for sample in (1, 2, 3)] == [True, True, False]
    assert run(retention, [1], [2], [3]) == [KEPT, KEPT, REFUSED]


def test_what_an_earlier_run_left_goes_first() -> None:
    retention = Retention(20)
    retention.adopt(SampleId(1), 10)
    retention.adopt(SampleId(2), 10)
    assert run(retention, [2], [3], [4]) == [KEPT, Retained(True, (SampleId(1),)), REFUSED]
    assert retention.nbytes == 20


def test_an_aborted_step_leaves_what_an_earlier_run_left() -> None:
    retention = Retention(10)
    retention.adopt(SampleId(1), 10)
    assert retention.visit(1, SampleId(2), 10) == Retained(True, (SampleId(1),))
    retention.abort(1)
    assert run(retention, [1], [2], first=2) == [KEPT, REFUSED]
