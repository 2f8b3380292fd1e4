"""The plans that a run sends: every sample of the data is in one of them, whatever the sizes (law 8)."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.batches import EVALUATION_MICROBATCHES, Batches, Wanted
from pipecomp.config import TrainConfig
from pipecomp.data.samples import Counts, Dataset, Tokenized, assemble

BOTH = Wanted(input_ids=True, labels=True)
SIZES = [(101, 4, 3), (97, 1, 1), (7, 8, 8), (1, 8, 2), (257, 5, 2)]
by_size = pytest.mark.parametrize(("num_samples", "batch_size", "num_microbatches"), SIZES)


def dataset(num_samples: int) -> Dataset:
    """Samples of one to five tokens; those of one token have nothing to predict."""
    sequences = [
        Tokenized(np.full(1 + number % 5, number, np.int32), np.ones(1 + number % 5, np.bool_))
        for number in range(num_samples)
    ]
    return assemble(sequences, "settings", Counts())


def batches(num_samples: int, batch_size: int, num_microbatches: int) -> Batches:
    config = TrainConfig(batch_size=batch_size, num_microbatches=num_microbatches, num_train_epochs=1)
    return Batches(dataset(num_samples), dataset(num_samples), config)


@by_size
def test_every_sample_is_trained_once_an_epoch(num_samples: int, batch_size: int, num_microbatches: int) -> None:
    run, seen, tokens = batches(num_samples, batch_size, num_microbatches), [], 0
    for step in range(1, run.total_steps + 1):
        plan, buffers = run.step_plan(epoch=1, step=step, learning_rate=0.1, wanted=BOTH)
        seen += [ref.sample_id for part in plan.microbatches for ref in part]
        tokens += len(buffers[0]) // 4
        assert plan.num_targets >= 1
    whole = dataset(num_samples)
    assert sorted(seen) == sorted(sample.id for sample in whole)
    assert tokens == whole.num_tokens


@by_size
def test_every_held_out_sample_is_evaluated_once(num_samples: int, batch_size: int, num_microbatches: int) -> None:
    run, seen, targets = batches(num_samples, batch_size, num_microbatches), [], 0
    for part, size in enumerate(run.evaluation_sizes):
        plan, _ = run.evaluation_plan(epoch=1, evaluation=part + 1, part=part, wanted=BOTH)
        assert len(plan.microbatches) <= max(EVALUATION_MICROBATCHES, num_microbatches)
        ids = [ref.sample_id for refs in plan.microbatches for ref in refs]
        assert len(ids) == size.samples
        seen += ids
        targets += size.targets
    whole = dataset(num_samples)
    assert sorted(seen) == sorted(sample.id for sample in whole)
    assert targets == whole.num_targets


def test_a_batch_in_which_nothing_is_to_be_predicted_is_trained_all_the_same() -> None:
    lonely = assemble([Tokenized(np.array([5], np.int32), np.ones(1, np.bool_))], "settings", Counts())
    run = Batches(lonely, None, TrainConfig(batch_size=8, num_microbatches=4))
    plan, _ = run.step_plan(epoch=1, step=1, learning_rate=0.1, wanted=BOTH)
    assert [[ref.length for ref in part] for part in plan.microbatches] == [[1]]
    assert plan.num_targets == 1  # the loss is divided by it
    assert run.evaluation_sizes == ()


def test_a_steps_plan_is_a_function_of_its_number_whatever_was_planned_before() -> None:
    def make() -> Batches:
        return Batches(dataset(11), None, TrainConfig(batch_size=4, num_microbatches=2, num_train_epochs=3, seed=3))

    def refs(run: Batches, step: int) -> object:
        return run.step_plan(epoch=1, step=step, learning_rate=0.1, wanted=BOTH)[0].microbatches

    fresh = {step: refs(make(), step) for step in range(1, 10)}
    assert len({str(plan) for plan in fresh.values()}) == 9
    walked = make()
    assert all(refs(walked, step) == fresh[step] for step in (9, 1, 5, 2, 2, 8, 3, 4, 7, 6))
