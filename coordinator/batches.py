"""Which samples each step and each evaluation plan holds, as plans with token buffers. Knows data sets and messages; no workers.

A step's batch is a function of its number (law 12): step s is batch (s - 1) mod n of epoch (s - 1) div n, n batches an epoch.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from coordinator.events import BatchSize
from pipecomp.config import TrainConfig
from pipecomp.data.batching import epoch_order, eval_batches, num_batches
from pipecomp.data.replicas import assign_replicas, deal, interleave, share_out
from pipecomp.data.samples import Dataset, Int64Array, Sample
from pipecomp.protocol.messages import EvaluationPlan, SampleRef, StepPlan

EVALUATION_MICROBATCHES = 32
"""Microbatches in one evaluation plan of one replica: enough to fill a pipeline, few enough that their tokens are few bytes."""

Microbatches = list[list[int]]


class Wanted(NamedTuple):
    """Which token buffers a worker needs: ids where the embedding is, labels where the head is."""

    input_ids: bool
    labels: bool


class Batches:
    """Plans over a training and an evaluation data set; the latter may be missing. Every replica has plans of its own: of its
    own samples in training, of a part of each stretch in an evaluation."""

    def __init__(
        self,
        train: Dataset,
        held_out: Dataset | None,
        config: TrainConfig,
        num_replicas: int = 1,
        *,
        train_apart: bool = False,
    ) -> None:
        """`train_apart`: each replica's loss is the mean over its own tokens of a step, not over all replicas'. Raises
        ConfigError where there are fewer training samples than replicas."""
        self._train_apart = train_apart
        self._num_replicas = num_replicas
        self._replicas = assign_replicas(train.table.ids, num_replicas)
        self._train = train
        self._held_out = held_out
        self._config = config
        self._epoch = -1
        self._epoch_order: Int64Array = np.zeros(0, np.int64)
        self.steps_per_epoch = num_batches(len(train), config.batch_size)
        self.total_steps = config.max_steps or config.num_train_epochs * self.steps_per_epoch
        """`max_steps` overrides the number of epochs in both directions, as the Hugging Face trainer has it."""
        self._evaluation_parts = [] if held_out is None else _evaluation_parts(held_out, config, num_replicas)

    @property
    def evaluation_sizes(self) -> tuple[BatchSize, ...]:
        if self._held_out is None:
            return ()
        return tuple(_size(self._held_out, part) for part in self._evaluation_parts)

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each training sample, (num_samples,)."""
        return self._train.table.lengths

    @property
    def replica_sizes(self) -> tuple[int, ...]:
        """Training samples of each replica."""
        return tuple(np.bincount(self._replicas, minlength=self._num_replicas).tolist())

    def size(self, step: int) -> BatchSize:
        """What the batch of `step` holds, over all replicas."""
        return _size(self._train, [microbatch for share in self._shares(step) for microbatch in share])

    def num_microbatches(self, step: int) -> tuple[int, ...]:
        """Of each replica in `step`; 0 where the batch has none of its samples."""
        return tuple(len(share) for share in self._shares(step))

    def usual_lengths(self) -> tuple[int, ...]:
        """Of the samples of a training microbatch that is as large, padding included, as the median one of its epoch."""
        lengths = self._train.table.lengths
        steps = range(1, self.steps_per_epoch + 1)
        microbatches = [each for step in steps for share in self._shares(step) for each in share]
        microbatches.sort(key=lambda each: len(each) * int(lengths[each].max()))
        return tuple(int(length) for length in lengths[microbatches[len(microbatches) // 2]])

    def step_plan(
        self, *, epoch: int, step: int, learning_rate: float, wanted: Wanted, replica: int = 0
    ) -> tuple[StepPlan, list[memoryview]]:
        """The plan of `step` for a worker of `replica` that wants these buffers."""
        shares = self._shares(step)
        microbatches = shares[replica]
        samples, refs = _samples(self._train, microbatches)
        buffers = _buffers(samples, wanted)
        size = _size(self._train, microbatches) if self._train_apart else self.size(step)
        plan = StepPlan(
            epoch=epoch,
            step=step,
            learning_rate=learning_rate,
            num_targets=max(1, size.targets),
            microbatches=refs,
            first_microbatch=sum(map(len, shares[:replica])),
            has_input_ids=wanted.input_ids,
            has_labels=wanted.labels,
            buffer_nbytes=tuple(len(buffer) for buffer in buffers),
        )
        return plan, buffers

    def evaluation_plan(
        self, *, epoch: int, evaluation: int, part: int, wanted: Wanted, replica: int = 0
    ) -> tuple[EvaluationPlan, list[memoryview]]:
        """What `replica` evaluates of part number `part` of the held-out data."""
        assert self._held_out is not None
        samples, refs = _samples(self._held_out, deal(self._evaluation_parts[part], self._num_replicas)[replica])
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

    def _shares(self, step: int) -> list[Microbatches]:
        """The microbatches of `step`, replica by replica."""
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        if epoch != self._epoch:
            order = epoch_order(self._config.seed, epoch, len(self._train))
            self._epoch_order = interleave(order, self._replicas)
            self._epoch = epoch
        start = batch * self._config.batch_size
        indices = self._epoch_order[start : start + self._config.batch_size].tolist()
        return share_out(indices, self._replicas, self._num_replicas, self._config.num_microbatches)


def _evaluation_parts(held_out: Dataset, config: TrainConfig, num_replicas: int) -> list[Microbatches]:
    """The held-out data in its own order, in microbatches as large as training's."""
    per_batch = min(config.num_microbatches * num_replicas, config.batch_size)
    batches = eval_batches(held_out, batch_size=config.batch_size, num_microbatches=per_batch)
    in_part = max(1, EVALUATION_MICROBATCHES * num_replicas // per_batch)
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
    buffers: list[memoryview] = []
    if not samples:
        return [memoryview(b"") for _ in range(wanted.input_ids + wanted.labels)]
    if wanted.input_ids:
        buffers.append(_joined([sample.input_ids for sample in samples]))
    if wanted.labels:
        buffers.append(_joined([sample.labels for sample in samples]))
    return buffers


def _joined(arrays: list[np.ndarray]) -> memoryview:
    return memoryview(np.concatenate(arrays).astype("<i4").tobytes())
