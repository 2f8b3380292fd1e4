"""All that is read before workers are let in: model, tokenizer, data, the split. Knows files, data sets and models; no sockets.

Everything here may take minutes and runs in a thread of its own, never in the event loop (law 9).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from coordinator.batches import Batches, Wanted
from coordinator.budgets import capacity_nbytes
from coordinator.events import RunTerms, StageSplit
from pipecomp.config import RunConfig, config_hash
from pipecomp.data.classes import choose_classes, number_classes
from pipecomp.data.loading import load_dataset
from pipecomp.data.records import DataSettings
from pipecomp.data.samples import Dataset
from pipecomp.data.splitting import hold_out
from pipecomp.data.tokenizer import load_tokenizer, tokenizer_files, tokenizer_hash
from pipecomp.errors import ConfigError
from pipecomp.models import open_model, with_classes
from pipecomp.models.base import CLASSIFICATION, Model
from pipecomp.partition import StagePlan, plan_stages
from pipecomp.protocol.messages import Assignment, Join, ReplicaAddress, StageAddress, TensorEntry
from pipecomp.runtime.rehearsal import CODED_KINDS, make_codec, make_schedule
from pipecomp.runtime.stores import count_ends
from pipecomp.types import Kind, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_HELD_OUT = 256
"""Samples held out of the training file when the run file does not say how many."""


class PreparedRun(NamedTuple):
    """One run, read and cut."""

    config: RunConfig
    model: Model
    stage_plan: StagePlan
    batches: Batches
    num_samples: int
    num_held_out: int
    entries: dict[str, TensorEntry]  # of every checkpoint tensor there is; what it lacks is random, as all is with random weights
    tokenizer_files: dict[str, bytes]
    terms: RunTerms
    notes: tuple[str, ...] = ()
    """What a person should know of model and data before training, a line each."""

    def seat(self, place: int) -> tuple[int, int]:
        """Replica and rank of a worker, by its place among all."""
        return divmod(place, self.terms.num_ranks)

    def wanted(self, rank: int) -> Wanted:
        """Which token buffers the worker of `rank` needs."""
        ranks = self.stage_plan.ranks
        return Wanted(input_ids=ranks[0] == rank, labels=ranks[-1] == rank)

    def assignment(self, run: str, epoch: int, place: int, joins: Sequence[Join], num_threads: int) -> Assignment:
        """What the worker at `place` holds; `joins` by place."""
        replica, rank = self.seat(place)
        own = joins[replica * self.terms.num_ranks :][: self.terms.num_ranks]
        peers = tuple(
            ReplicaAddress(replica=number, worker=join.worker, data_address=join.data_address)
            for number, join in enumerate(joins[rank :: self.terms.num_ranks])
        )
        tensors = tuple(self.entries[name] for name in self._names(rank) if name in self.entries)
        return Assignment(
            run=run,
            epoch=epoch,
            replica=replica,
            rank=rank,
            stages=self._addresses(own),
            peers=peers if len(peers) > 1 else (),
            tied=self.stage_plan.tied,
            config=msgspec.to_builtins(self.config),
            model_config=dict(self.model.config),
            random_weights=self.model.weights is None,
            tensors=tensors,
            model_hash=self.model.hash,
            num_threads=num_threads,
        )

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that the worker of `rank` may send back; a tied weight's alias is none of them."""
        shards = [shard for shard, holder in zip(self.stage_plan.shards, self.stage_plan.ranks, strict=True) if holder == rank]
        return {
            p.name: p.shape
            for p in self.model.plan.parameters
            if any(shard.first_layer <= p.layer < shard.end_layer for shard in shards)
        }

    def _names(self, rank: int) -> list[str]:
        shards = [shard for shard, holder in zip(self.stage_plan.shards, self.stage_plan.ranks, strict=True) if holder == rank]
        return list(dict.fromkeys(name for shard in shards for name in self.model.checkpoint_names(shard)))

    def _addresses(self, joins: Sequence[Join]) -> tuple[StageAddress, ...]:
        first_trainable = min((p.layer for p in self.model.plan.parameters if p.trainable), default=len(self.model.plan.layers))
        num_ends = count_ends(self.stage_plan.ranks)
        return tuple(
            StageAddress(
                stage=stage,
                rank=rank,
                first_layer=shard.first_layer,
                end_layer=shard.end_layer,
                worker=joins[rank].worker,
                data_address=joins[rank].data_address,
                needs_input_gradient=first_trainable < shard.first_layer,
                message_nbytes=capacity_nbytes(self.config, joins[rank], num_ends[rank]),
            )
            for stage, (shard, rank) in enumerate(zip(self.stage_plan.shards, self.stage_plan.ranks, strict=True))
        )


class ReadRun(NamedTuple):
    """A run as its files say it, before the weights are looked at."""

    opened: Model
    """As its folder or hub has it."""
    model: Model
    """The same with the classes of the data, where it classifies."""
    tokenizer: Any
    train: Dataset
    held_out: Dataset | None
    batches: Batches
    stage_plan: StagePlan
    notes: tuple[str, ...]


def read_run(config: RunConfig, cache_folder: Path | None) -> ReadRun:
    """Read all but the weights, and split the model.

    Raises:
        ConfigError: the run file names something that cannot be used.
    """
    make_schedule(config)  # refused here, not in every worker
    for kind in CODED_KINDS:
        make_codec(config, kind)
    model = opened = open_model(config.model)
    if model.plan.task != config.model.task:
        raise ConfigError(
            f"model.task = {config.model.task!r}: {model.plan.family} models are trained for {model.plan.task} only; set "
            f"model.task = {model.plan.task!r}, or choose another model"
        )
    if not any(p.trainable for p in model.plan.parameters):
        raise ConfigError(f"model.freeze = {list(config.model.freeze)} leaves no parameter to train")
    if config.data.tokenizer is not None:
        tokenizer = load_tokenizer(config.data.tokenizer)
    else:
        tokenizer = load_tokenizer(config.model.name, config.model.revision)
    if config.data.max_length > model.plan.max_positions:
        raise ConfigError(
            f"data.max_length = {config.data.max_length} is more than the {model.plan.max_positions} positions of the model"
        )
    train, held_out = _read_data(config, tokenizer, cache_folder)
    notes = _notes(config, model, train)
    if model.plan.task == CLASSIFICATION:
        model, train, held_out = _with_classes(config, opened, train, held_out)
        notes.append(f"classes: {', '.join(model.config['id2label'].values())}")
    train, held_out = _divide(config, train, held_out)
    for dataset in (train, held_out):
        _check_tokens(dataset, model.plan.vocab_size)
    replicas = config.cluster.num_replicas
    train_apart = replicas > 1 and config.replicas.local_steps > 0
    batches = Batches(train, held_out, config.train, replicas, train_apart=train_apart)
    return ReadRun(opened, model, tokenizer, train, held_out, batches, split_model(config, model, train), tuple(notes))


def prepare_run(config: RunConfig, cache_folder: Path | None) -> PreparedRun:
    """Read everything.

    Raises:
        ConfigError: the run file names something that cannot be used.
    """
    run = read_run(config, cache_folder)
    terms = terms_of(config, run)
    return PreparedRun(
        config,
        run.model,
        run.stage_plan,
        run.batches,
        len(run.train),
        len(run.held_out) if run.held_out is not None else 0,
        _entries(run.model),
        tokenizer_files(run.tokenizer),
        terms,
        run.notes,
    )


def terms_of(config: RunConfig, run: ReadRun) -> RunTerms:
    """What workers are held against, and how long the run is."""
    return RunTerms(
        config_hash=config_hash(config),
        model_hash=run.opened.hash,  # what a worker's own folder has, whatever classes the data gives the model
        tokenizer_hash=tokenizer_hash(run.tokenizer),
        stages=tuple(
            StageSplit(stage, rank, shard.first_layer, shard.end_layer)
            for stage, (shard, rank) in enumerate(zip(run.stage_plan.shards, run.stage_plan.ranks, strict=True))
        ),
        steps_per_epoch=run.batches.steps_per_epoch,
        total_steps=run.batches.total_steps,
        batch_size=run.batches.size,
        evaluation_sizes=run.batches.evaluation_sizes,
        num_replicas=config.cluster.num_replicas,
        num_microbatches=run.batches.num_microbatches,
    )


def _read_data(config: RunConfig, tokenizer: Any, cache_folder: Path | None) -> tuple[Dataset, Dataset | None]:  # noqa: ANN401
    """All of `data.train`, and all of `data.eval` where there is one."""
    data = config.data
    settings = DataSettings(
        format=data.format,
        text_column=data.text_column,
        label_column=data.label_column if config.model.task == CLASSIFICATION else None,
        max_length=data.max_length,
        packing=data.packing,
    )
    train = load_dataset(Path(data.train), tokenizer, settings, cache_folder=cache_folder)
    if data.eval is None:
        return train, None
    return train, load_dataset(Path(data.eval), tokenizer, settings, cache_folder=cache_folder)


def _divide(config: RunConfig, train: Dataset, held_out: Dataset | None) -> tuple[Dataset, Dataset | None]:
    """What is trained and what is held out, as many samples as the run file says."""
    data = config.data
    if held_out is not None:
        if data.max_eval_samples is not None:
            held_out = held_out[: data.max_eval_samples]
    else:
        default = min(MAX_HELD_OUT, max(1, len(train) // 20)) if len(train) > 1 else 0
        size = default if data.max_eval_samples is None else data.max_eval_samples
        if size >= len(train):
            raise ConfigError(
                f"data.max_eval_samples = {size}, but {data.train} gives {len(train)} samples and some must be left to train "
                "on; lower it, or name a file of its own as data.eval"
            )
        train, held_out = hold_out(train, size, config.train.seed) if size else (train, None)
    if data.max_train_samples is not None:
        several = len(np.unique(train.table.classes)) > 1
        train = train[: data.max_train_samples]
        if several and len(train) > 1 and len(np.unique(train.table.classes)) == 1:
            raise ConfigError(
                f"data.max_train_samples = {data.max_train_samples}: the first samples of {data.train} are all of one class; "
                "shuffle the file, or raise the number"
            )
    return train, held_out if held_out is not None and len(held_out) else None


def _with_classes(
    config: RunConfig, model: Model, train: Dataset, held_out: Dataset | None
) -> tuple[Model, Dataset, Dataset | None]:
    """Join what the data and the model say of classes: one order for both."""
    names = choose_classes(
        train,
        list(model.config["id2label"].values()),
        is_trained=model.weights is not None and not _new_parameters(model),
        source=config.data.train,
    )
    train = number_classes(train, names, config.data.train)
    if held_out is not None:
        held_out = number_classes(held_out, names, str(config.data.eval))
    return with_classes(model, config.model, names), train, held_out


def _notes(config: RunConfig, model: Model, train: Dataset) -> list[str]:
    notes = []
    new = _new_parameters(model)
    if new:
        notes.append(f"not in the weights of {config.model.name}, so random from train.seed: {', '.join(new)}")
        frozen = [p.name for p in model.plan.parameters if p.name in new and not p.trainable]
        if frozen:
            raise ConfigError(f"model.freeze keeps {frozen[0]} as it is, but the weights lack it and it would stay random")
    if train.counts.cut_records:
        num_cut = f"{train.counts.cut_records} of {train.counts.records} texts"
        notes.append(f"{num_cut} are longer than data.max_length = {config.data.max_length} tokens and cut there")
    return notes


def _new_parameters(model: Model) -> list[str]:
    """What the model's task needs and its weights lack; in their order."""
    reader, new = model.weights, model.plan.new_in_task
    return [] if reader is None else [p.name for p in model.plan.parameters if p.name in new and p.name not in reader]


def _check_tokens(dataset: Dataset | None, vocab_size: int) -> None:
    largest = -1 if dataset is None else int(dataset.table.input_ids.max(initial=-1))
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer gives token {largest}, the model's vocabulary ends at {vocab_size - 1}: set data.tokenizer to the "
            "model's own"
        )


def split_model(config: RunConfig, model: Model, train: Dataset) -> StagePlan:
    """The stages that the run file asks for, or the most even ones."""
    plan, tied = model.plan, model.plan.tied
    trainable = {p.name for p in plan.parameters if p.trainable}
    mean_length = train.num_tokens / len(train)
    batch_size = min(config.train.batch_size, len(train))
    rows = max(1, round(mean_length))
    return plan_stages(
        [layer.cost for layer in plan.layers],
        config.cluster.num_stages,
        tied_values=tied.num_values if tied is not None and tied.name in trainable else None,
        hidden_values_per_step=round(batch_size * mean_length) * plan.hidden_size,
        mode=config.cluster.tied_weights,
        layers=config.cluster.layers,
        tied_bits=_bits(config, Kind.TIED, TensorSpec(1, 1 << 16)),
        hidden_bits=(
            _bits(config, Kind.FORWARD, TensorSpec(rows, plan.hidden_size)),
            _bits(config, Kind.BACKWARD, TensorSpec(rows, plan.hidden_size)),
        ),
    )


def _bits(config: RunConfig, kind: Kind, spec: TensorSpec) -> float:
    """Bits a value that a run's codec for `kind` takes, for samples of the usual length."""
    codec = make_codec(config, kind)
    return float(8 * codec.encoded_nbytes(spec, first_visit=False) / spec.num_values)


def _entries(model: Model) -> dict[str, TensorEntry]:
    """What the coordinator can send of the checkpoint; reads every tensor once, for its hash."""
    reader = model.weights
    if reader is None:
        return {}
    new = _new_parameters(model)
    stored = [p for p in model.plan.parameters if p.name not in new]
    missing = [p.name for p in stored if p.name not in reader]
    if missing:
        raise ConfigError(f"the weights lack {', '.join(missing[:5])} ({len(missing)} tensors); is the model folder whole?")
    entries = {}
    for parameter in stored:
        found = reader.entry(parameter.name)
        if found.shape != parameter.shape:
            raise ConfigError(
                f"the weights do not fit the model's config.json: {parameter.name} is {found.shape}, the model needs "
                f"{parameter.shape}. Use the folder that the configuration came with"
            )
        entries[parameter.name] = TensorEntry(
            name=parameter.name,
            dtype=found.dtype,
            shape=found.shape,
            nbytes=found.nbytes,
            content_hash=reader.digest(parameter.name),
        )
    return entries
