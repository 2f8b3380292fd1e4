"""Which replica trains which sample: as few move as can, batches stay as large as they were, and no sample is lost."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.batches import Batches, Wanted
from pipecomp.config import TrainConfig
from pipecomp.data.batching import epoch_order
from pipecomp.data.replicas import assign_replicas, deal, interleave, share_out
from pipecomp.data.samples import Counts, Dataset, Tokenized, assemble
from pipecomp.errors import ConfigError

SIZES = (1, 2, 3, 7, 64, 101, 1000)


def ids(count: int) -> np.ndarray:
    return np.unique(np.random.default_rng(count).integers(2**63, size=count, dtype=np.uint64))[::-1].copy()


def dataset(count: int) -> Dataset:
    sequences = [Tokenized(np.full(1 + n % 5, n, np.int32), np.ones(1 + n % 5, np.bool_)) for n in range(count)]
    return assemble(sequences, "settings", Counts())


@pytest.mark.parametrize("count", SIZES)
def test_replicas_have_as_many_samples_but_one(count: int) -> None:
    for replicas in range(1, min(count, 9) + 1):
        sizes = np.bincount(assign_replicas(ids(count), replicas), minlength=replicas)
        assert sizes.max() - sizes.min() <= 1
        assert sizes.sum() == count


@pytest.mark.parametrize("count", SIZES)
def test_one_more_replica_takes_its_share_and_nothing_else_moves(count: int) -> None:
    for replicas in range(1, min(count, 9)):
        before, after = assign_replicas(ids(count), replicas), assign_replicas(ids(count), replicas + 1)
        moved = before != after
        assert moved.sum() == count // (replicas + 1)
        assert set(after[moved]) <= {replicas}


def test_where_a_sample_goes_depends_on_ids_and_not_on_their_order() -> None:
    samples = ids(500)
    shuffled = np.random.default_rng(1).permutation(500)
    assert np.array_equal(assign_replicas(samples, 4)[shuffled], assign_replicas(samples[shuffled], 4))


def test_fewer_samples_than_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster.num_replicas = 4, but there are 3 training samples; lower it"):
        assign_replicas(ids(3), 4)


@pytest.mark.parametrize(("count", "replicas"), [(101, 2), (101, 3), (64, 4), (7, 7)])
def test_any_stretch_of_an_epoch_has_as_many_samples_of_each_replica(count: int, replicas: int) -> None:
    owners = assign_replicas(ids(count), replicas)
    order = interleave(epoch_order(3, 1, count), owners)
    assert sorted(order) == list(range(count))
    for start in range(0, count, 8):
        shares = np.bincount(owners[order[start : start + 8]], minlength=replicas)
        assert shares.max() - shares.min() <= 2


def test_one_replica_keeps_the_order_of_an_epoch() -> None:
    order = epoch_order(5, 2, 97)
    assert np.array_equal(interleave(order, np.zeros(97, np.int64)), order)


def test_a_replica_without_a_sample_in_the_batch_has_no_microbatches() -> None:
    assert share_out([4, 2], np.array([0, 0, 1, 0, 1]), 3, 2) == [[], [[4], [2]], []]


def test_an_evaluation_is_dealt_evenly() -> None:
    assert [len(part) for part in deal([[i] for i in range(7)], 3)] == [2, 2, 3]


@pytest.mark.parametrize(("count", "batch_size", "replicas"), [(101, 8, 2), (97, 12, 3), (17, 16, 4)])
def test_replicas_train_every_sample_once_an_epoch_and_all_know_how_many_targets_there_are(
    count: int, batch_size: int, replicas: int
) -> None:
    run = Batches(dataset(count), dataset(count), TrainConfig(batch_size=batch_size, num_microbatches=2), replicas)
    wanted, seen, held_out = Wanted(True, True), [], []
    for step in range(1, run.steps_per_epoch + 1):
        plans = [
            run.step_plan(epoch=1, step=step, learning_rate=0.1, wanted=wanted, replica=replica)[0]
            for replica in range(replicas)
        ]
        assert {plan.num_targets for plan in plans} == {max(1, run.size(step).targets)}
        assert tuple(len(plan.microbatches) for plan in plans) == run.num_microbatches(step)
        seen += [ref.sample_id for plan in plans for refs in plan.microbatches for ref in refs]
    for part in range(len(run.evaluation_sizes)):
        for replica in range(replicas):
            plan, _ = run.evaluation_plan(epoch=1, evaluation=1, part=part, wanted=wanted, replica=replica)
            held_out += [ref.sample_id for refs in plan.microbatches for ref in refs]
    everything = sorted(sample.id for sample in dataset(count))
    assert sorted(seen) == sorted(held_out) == everything


def test_a_batch_may_have_no_sample_of_a_replica() -> None:
    run = Batches(dataset(17), None, TrainConfig(batch_size=4, num_microbatches=2), 2)
    assert 0 in run.num_microbatches(run.steps_per_epoch)
    empty = run.num_microbatches(run.steps_per_epoch).index(0)
    plan, buffers = run.step_plan(
        epoch=1, step=run.steps_per_epoch, learning_rate=0.1, wanted=Wanted(True, True), replica=empty
    )
    assert plan.microbatches == ()
    assert [len(buffer) for buffer in buffers] == [0, 0]
