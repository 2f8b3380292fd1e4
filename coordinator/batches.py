"""Which samples each step and each evaluation plan holds, as plans with token buffers. Knows data sets and messages; no workers.

A step's batch is a function of its number (law 12): step s is batch (s - 1) mod n of epoch (s - 1) div n, n batches an epoch.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from coordinator.events import BatchSize
from pipecomp.config import TrainConfig
from pipecomp.data.batching import eval_batches, num_batches, plan_batches
from pipecomp.data.samples import Dataset, Int64Array, Sample
from pipecomp.protocol.messages import EvaluationPlan, SampleRef, StepPlan

EVALUATION_MICROBATCHES = 32
"""Microbatches in one evaluation plan: enough to fill a pipeline, few enough that their tokens are a small message."""

Microbatches = list[list[int]]


class Wanted(NamedTuple):
    """Which token buffers a worker needs: ids where the embedding is, labels where the head is."""

    input_ids: bool
    labels: bool


class Batches:
    """Plans over a training and an evaluation data set; the latter may be missing."""

    def __init__(self, train: Dataset, held_out: Dataset | None, config: TrainConfig) -> None:
        self._train = train
        self._held_out = held_out
        self._config = config
        self._epoch = -1
        self._epoch_batches: list[Microbatches] = []
        self.steps_per_epoch = num_batches(len(train), config.batch_size)
        self.total_steps = config.max_steps or config.num_train_epochs * self.steps_per_epoch
        """`max_steps` overrides the number of epochs in both directions, as the Hugging Face trainer has it."""
        self._evaluation_parts = [] if held_out is None else _evaluation_parts(held_out, config)

    @property
    def evaluation_sizes(self) -> tuple[BatchSize, ...]:
        if self._held_out is None:
            return ()
        return tuple(_size(self._held_out, part) for part in self._evaluation_parts)

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each training sample, (num_samples,)."""
        return self._train.table.lengths

    def size(self, step: int) -> BatchSize:
        """What the batch of `step` holds."""
        return _size(self._train, self._microbatches(step))

    def usual_lengths(self) -> tuple[int, ...]:
        """Of the samples of a training microbatch that is as large, padding included, as the median one of its epoch."""
        lengths = self._train.table.lengths
        microbatches = [each for step in range(1, self.steps_per_epoch + 1) for each in self._microbatches(step)]
        microbatches.sort(key=lambda each: len(each) * int(lengths[each].max()))
        return tuple(int(length) for length in lengths[microbatches[len(microbatches) // 2]])

    def step_plan(self, *, epoch: int, step: int, learning_rate: float, wanted: Wanted) -> tuple[StepPlan, list[memoryview]]:
        """The plan of `step` for a worker that wants these buffers."""
        microbatches = self._microbatches(step)
        samples, refs = _samples(self._train, microbatches)
        buffers = _buffers(samples, wanted)
        plan = StepPlan(
            epoch=epoch,
            step=step,
            learning_rate=learning_rate,
            num_targets=max(1, _size(self._train, microbatches).targets),
            microbatches=refs,
            has_input_ids=wanted.input_ids,
            has_labels=wanted.labels,
            buffer_nbytes=tuple(len(buffer) for buffer in buffers),
        )
        return plan, buffers

    def evaluation_plan(
        self, *, epoch: int, evaluation: int, part: int, wanted: Wanted
    ) -> tuple[EvaluationPlan, list[memoryview]]:
        """Part number `part` of the held-out data."""
        assert self._held_out is not None
        samples, refs = _samples(self._held_out, self._evaluation_parts[part])
        buffers = _buffers(samples, wanted)
        plan = EvaluationPlan(
            epoch=epoch,
            evaluation=evaluation,
            microbatches=refs,
            has_input_ids=wanted.input_ids,
            has_labels=wanted.labels,
            buffer_nbytes=tuple(len(buffer) for buffer in buffers),
        )
        return plan, buffers

    @property
    def evaluation_parts(self) -> tuple[int, ...]:
        """Microbatches of each evaluation plan."""
        return tuple(len(part) for part in self._evaluation_parts)

    def _microbatches(self, step: int) -> Microbatches:
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch_batches = list(
                plan_batches(
                    self._train,
                    batch_size=self._config.batch_size,
                    num_microbatches=self._config.num_microbatches,
                    seed=self._config.seed,
                    epoch=epoch,
                )
            )
            self._epoch = epoch
        return self._epoch_batches[batch]


def _evaluation_parts(held_out: Dataset, config: TrainConfig) -> list[Microbatches]:
    """The held-out data in its own order, in microbatches as large as training's."""
    per_batch = min(config.num_microbatches, config.batch_size)
    batches = eval_batches(held_out, batch_size=config.batch_size, num_microbatches=per_batch)
    in_part = max(1, EVALUATION_MICROBATCHES // per_batch)
    parts: list[Microbatches] = []
    while part := list(itertools.islice(batches, in_part)):
        parts.append([microbatch for batch in part for microbatch in batch])
    return parts


def _size(dataset: Dataset, microbatches: Microbatches) -> BatchSize:
    indices = [index for microbatch in microbatches for index in microbatch]
    table = dataset.table
    return BatchSize(len(indices), int(table.lengths[indices].sum()), int(table.targets[indices].sum()))


def _samples(dataset: Dataset, microbatches: Microbatches) -> tuple[list[Sample], tuple[tuple[SampleRef, ...], ...]]:
    samples = [[dataset[index] for index in microbatch] for microbatch in microbatches]
    refs = tuple(tuple(SampleRef(sample.id, len(sample.input_ids)) for sample in group) for group in samples)
    return [sample for group in samples for sample in group], refs


def _buffers(samples: list[Sample], wanted: Wanted) -> list[memoryview]:
    buffers = []
    if wanted.input_ids:
        buffers.append(_joined([sample.input_ids for sample in samples]))
    if wanted.labels:
        buffers.append(_joined([sample.labels for sample in samples]))
    return buffers


def _joined(arrays: list[np.ndarray]) -> memoryview:
    return memoryview(np.concatenate(arrays).astype("<i4").tobytes())
