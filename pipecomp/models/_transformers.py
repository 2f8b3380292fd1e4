"""Shards cut out of transformers' own models. Knows torch, transformers and names; no files, no sockets.

The whole model is built on the meta device (shapes, no memory), the modules of a shard are copied out of it, and only they
are ever materialized. What runs between them is in the family's plugin and follows the whole model's `forward` op for op,
transformers' mask and loss functions included, so that a split model has the bits of the whole one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import xxhash
from torch import nn

from pipecomp.errors import ConfigError
from pipecomp.models._checkpoint import CheckpointReader
from pipecomp.models._deferral import Deferral, defer_linear
from pipecomp.models._family import BlockContext, Layer, ModelFamily, TransformersConfig
from pipecomp.models._plan import frozen_names, make_plan
from pipecomp.models.base import CLASSIFICATION, Batch, LayerSeeds, Model, ModelPlan, StageModule
from pipecomp.types import Shard

_GENERATOR = threading.Lock()
"""Dropout draws from the device's one default generator. Where several workers share a process (tests do), seeding a layer
and drawing for it must not interleave with another worker's."""


class TransformersStage(StageModule):
    """Some consecutive layers of a model."""

    def __init__(self, model: TransformersModel, shard: Shard) -> None:
        super().__init__()
        num_layers = len(model.plan.layers)
        self.shard = shard
        self.is_first = shard.first_layer == 0
        self.is_last = shard.end_layer == num_layers
        self.labels_are_classes = model.plan.task == CLASSIFICATION
        self.tied_alias_shares_storage = self.is_first and self.is_last and model.plan.tied is not None
        self._family = model.family
        self._transformers_config = model.transformers_config
        self._max_positions = model.plan.max_positions
        self._vocab_size = model.plan.vocab_size
        self._has_dropout = any(getattr(model.transformers_config, key) for key in model.family.dropout_keys)
        self._paths = model.paths[shard.first_layer : shard.end_layer]
        self.layers = copy.deepcopy(nn.ModuleList(model.meta_layer(i) for i in range(shard.first_layer, shard.end_layer)))
        self.rotary = model.make_rotary()
        if model.plan.tied is not None and self.is_last:  # the copy above kept the two uses of a tied weight one Parameter
            weight = self.projection.weight
            self.projection.weight = nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
        for name, parameter in self.named_checkpoint_parameters():
            parameter.requires_grad_(name not in model.frozen)

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding; only where `is_first`."""
        module = self.layers[0][0]  # type: ignore[index]  # a ModuleList of ModuleLists
        assert isinstance(module, nn.Embedding)
        return module

    @property
    def projection(self) -> nn.Linear:
        """The output projection; only where `is_last`."""
        module = self.layers[-1][-1]  # type: ignore[index]
        assert isinstance(module, nn.Linear)
        return module

    def forward_layers(self, hidden: torch.Tensor | None, batch: Batch, *, seeds: LayerSeeds | None) -> torch.Tensor:
        """See `StageModule.forward_layers`."""
        start = batch.input_ids if self.is_first else hidden
        assert start is not None, "a shard with the embedding needs input_ids, every other one hidden states"
        num_positions = start.shape[1]
        if num_positions > self._max_positions:
            raise ConfigError(f"{num_positions} tokens in a sample, the model takes {self._max_positions}: lower data.max_length")
        if self.training != (seeds is not None):
            self.train(seeds is not None)
        position_ids = torch.arange(num_positions, device=start.device).unsqueeze(0)
        context: BlockContext | None = None
        for index, layer in enumerate(self.layers, self.shard.first_layer):
            assert isinstance(layer, nn.ModuleList)
            if index > 0 and context is None:
                assert hidden is not None
                context = self._context(hidden, batch.lengths, position_ids)
            if seeds is not None and self._has_dropout:
                with _GENERATOR:
                    _seed_generator(start.device, seeds.seed(index))
                    hidden = self._forward_layer(index, layer, hidden, batch, position_ids, context)
            else:
                hidden = self._forward_layer(index, layer, hidden, batch, position_ids, context)
        assert hidden is not None
        return hidden

    def _forward_layer(
        self,
        index: int,
        layer: Layer,
        hidden: torch.Tensor | None,
        batch: Batch,
        position_ids: torch.Tensor,
        context: BlockContext | None,
    ) -> torch.Tensor:
        if index == 0:
            assert batch.input_ids is not None
            return self._family.embed(layer, batch.input_ids, position_ids)
        assert hidden is not None
        assert context is not None
        if self.is_last and index == self.shard.end_layer - 1:
            return self._family.head(layer, hidden)
        return self._family.block(layer, hidden, context)

    def _context(self, hidden: torch.Tensor, lengths: Sequence[int], position_ids: torch.Tensor) -> BlockContext:
        real = position_ids < torch.tensor(lengths, device=hidden.device).unsqueeze(1)  # (B, T)
        mask = self._family.attention_mask(self._transformers_config, hidden, real, position_ids)
        angles = None if self.rotary is None else self.rotary(hidden, position_ids=position_ids)
        return BlockContext(mask, position_ids, angles)

    def loss_sum(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See `StageModule.loss_sum`."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        assert batch.labels is not None
        if self.labels_are_classes:  # transformers' own takes the mean here, which divides the same sum by the same number
            return nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
        # With a number of items transformers sums and divides; dividing by one changes no bit.
        loss: torch.Tensor = ForCausalLMLoss(logits, batch.labels, self._vocab_size, num_items_in_batch=1)
        return loss

    def split_backward(self) -> Deferral:
        """See `StageModule.split_backward`: the linear maps of blocks. Not the head's, whose gradient at the logits would have
        to be held: as many values a token as the vocabulary has words."""
        deferral = Deferral()
        for index, layer in enumerate(self.layers, self.shard.first_layer):
            if index > 0 and not (self.is_last and index == self.shard.end_layer - 1):
                for module in layer.modules():
                    defer_linear(module, deferral)
        return deferral

    def num_correct(self, logits: torch.Tensor, batch: Batch) -> int | None:
        """See `StageModule.num_correct`."""
        assert batch.labels is not None
        return int((logits.argmax(-1) == batch.labels).sum()) if self.labels_are_classes else None

    def named_checkpoint_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `StageModule.named_checkpoint_parameters`."""
        for paths, layer in zip(self._paths, self.layers, strict=True):
            assert isinstance(layer, nn.ModuleList)
            for path, module in zip(paths, layer, strict=True):
                for name, parameter in module.named_parameters():
                    yield f"{path}.{name}", parameter

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moving to a device gives each Parameter memory of its own: join the two uses of a tied weight again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.tied_alias_shares_storage and self.is_first:
            self.projection.weight.data = self.embedding.weight.data
        return self


class TransformersModel(Model):
    """A model of transformers, known by its configuration.

    Args:
        family: the plugin for the configuration's model_type.
        transformers_config: transformers' configuration object, dropout overrides applied.
        config: the same as plain JSON values, without overrides.
        config_hash: hash of `config`.
        freeze: fnmatch patterns over parameter names.
        weights: where its pretrained tensors are.
    """

    def __init__(
        self,
        family: ModelFamily,
        transformers_config: TransformersConfig,
        config: dict[str, Any],
        config_hash: str,
        freeze: Sequence[str],
        weights: CheckpointReader | None,
    ) -> None:
        self.family = family
        self.transformers_config = transformers_config
        self.config = config
        self.hash = config_hash
        self.weights = weights
        self.paths = family.layer_paths(transformers_config)
        self._whole = whole_on_meta(transformers_config, family.task)
        parameters = self._parameters_by_layer()
        is_tied = self._whole.get_parameter(family.projection) is self._whole.get_parameter(family.embedding)
        names = [name for layer in parameters for name, _ in layer]
        self.frozen = frozen_names(names, freeze, (family.embedding, family.projection) if is_tied else ())
        self.plan: ModelPlan = make_plan(family, transformers_config, parameters, self.frozen, is_tied=is_tied)

    def build(self, shard: Shard) -> TransformersStage:
        """See `Model.build`."""
        if shard.end_layer > len(self.plan.layers):
            raise ConfigError(f"{shard} of a model that has {len(self.plan.layers)} layers")
        return TransformersStage(self, shard)

    def checkpoint_names(self, shard: Shard) -> tuple[str, ...]:
        """See `Model.checkpoint_names`."""
        tied = self.plan.tied
        names = [p.name for p in self.plan.parameters if shard.first_layer <= p.layer < shard.end_layer]
        if tied is not None and shard.first_layer > tied.first_layer and shard.end_layer > tied.last_layer:
            names.append(tied.name)
        return tuple(names)

    def initialize(self, module: StageModule, weights: Mapping[str, torch.Tensor] | None, *, seed: int) -> None:
        """See `Model.initialize`."""
        assert isinstance(module, TransformersStage)
        module.layers.to_empty(device="cpu")
        if module.tied_alias_shares_storage:
            module.projection.weight.data = module.embedding.weight.data
        if weights is None:
            self._randomize(module, seed)
        else:
            self._copy_weights(module, weights, seed)

    def share_tied_storage(self, first: StageModule, last: StageModule) -> None:
        """See `Model.share_tied_storage`."""
        assert isinstance(first, TransformersStage)
        assert isinstance(last, TransformersStage)
        if self.plan.tied is not None and first is not last:
            last.projection.weight.data = first.embedding.weight.data
            last.tied_alias_shares_storage = True

    def meta_layer(self, index: int) -> Layer:
        """The modules of a layer, on the meta device; not a copy."""
        return nn.ModuleList(self._whole.get_submodule(path) for path in self.paths[index])

    def make_rotary(self) -> nn.Module | None:
        """A new module for rotary angles, on the CPU since its values come from the configuration alone."""
        if self.family.rotary is None:
            return None
        with torch.device("cpu"):
            module: nn.Module = type(self._whole.get_submodule(self.family.rotary))(self.transformers_config)
        return module

    def _parameters_by_layer(self) -> list[list[tuple[str, nn.Parameter]]]:
        """Every parameter under its name in the whole model, a tied weight under both. Raises ConfigError."""
        try:
            layers = [
                [(f"{p}.{n}", v) for p in paths for n, v in self._whole.get_submodule(p).named_parameters()]
                for paths in self.paths
            ]
        except AttributeError as e:
            raise ConfigError(f"this version of transformers lays {self.family.model_type} out in another way: {e}") from e
        found = {name for layer in layers for name, _ in layer}
        expected = {name for name, _ in self._whole.named_parameters(remove_duplicate=False)}
        if found != expected:
            odd = ", ".join(sorted(found ^ expected)[:4])
            raise ConfigError(f"{self.family.model_type} with this configuration has parameters that no layer holds: {odd}")
        return layers

    def _randomize(self, module: TransformersStage, seed: int) -> None:
        for index, layer in enumerate(module.layers, module.shard.first_layer):
            assert isinstance(layer, nn.ModuleList)
            self._randomize_layer(layer, index, seed)
        if self.plan.tied is None or not module.is_last:
            return
        # The head's turn gave it numbers of its own. Draw the embedding's layer once more, into the head's memory, which in one
        # shard is the embedding's too; what else the layer holds (positions) is drawn along, since the order matters.
        embedding = copy.deepcopy(self.meta_layer(0)).to_empty(device="cpu")
        embedding[0].weight = nn.Parameter(module.projection.weight.data, requires_grad=False)
        self._randomize_layer(embedding, 0, seed)

    def _randomize_layer(self, layer: Layer, index: int, seed: int) -> None:
        """Draw by transformers' own rules, from a generator that knows only the run's seed and the layer."""
        with _GENERATOR, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(f"initialize {seed} {index}".encode()))
            for parameter in layer.parameters():
                parameter.fill_(torch.nan)
            layer.apply(self._whole._init_weights)  # the hook that transformers asks families to override
        for name, parameter in layer.named_parameters():
            if bool(parameter.isnan().any()):
                raise ConfigError(f"transformers has no rule for random weights of {self.paths[index][0]}: {name}")

    def _copy_weights(self, module: TransformersStage, weights: Mapping[str, torch.Tensor], seed: int) -> None:
        tied, faults = self.plan.tied, []
        if module.is_last and any(name not in weights for name in self.plan.new_in_task):
            layer = module.layers[-1]
            assert isinstance(layer, nn.ModuleList)
            self._randomize_layer(layer, module.shard.end_layer - 1, seed)  # what the checkpoint has replaces it below
        for name, parameter in module.named_checkpoint_parameters():
            if tied is not None and name == tied.alias:
                if module.tied_alias_shares_storage:
                    continue
                name = tied.name  # noqa: PLW2901 - the checkpoint has it once
            if name not in weights:
                if name in self.plan.new_in_task:
                    continue
                faults.append(f"{name} is missing")
                continue
            tensor = weights[name]
            if tensor.shape != parameter.shape or not tensor.is_floating_point():
                faults.append(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the model needs {tuple(parameter.shape)}")
                continue
            parameter.data.copy_(tensor)
        if faults:
            rest = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ConfigError(
                f"the weights do not fit the model's config.json: {'; '.join(faults[:8])}{rest}. "
                "Use the folder that the configuration came with"
            )


def auto_class(task: str) -> Any:  # noqa: ANN401 - transformers' factory
    """What opens a whole model of a task in plain transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if task == CLASSIFICATION else AutoModelForCausalLM


def whole_on_meta(transformers_config: TransformersConfig, task: str) -> Any:  # noqa: ANN401 - transformers' model
    """Transformers' own model of a configuration, in fp32 and without memory. Raises ConfigError for one it cannot build."""
    try:
        with torch.device("meta"):
            return auto_class(task).from_config(transformers_config, dtype=torch.float32)
    except Exception as e:  # transformers raises many kinds for values that do not fit together
        reason = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise ConfigError(f"transformers cannot build this {transformers_config.model_type} model: {reason}") from e


def _seed_generator(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
