"""What can be said of a model from its shapes alone: sizes, costs, what is frozen. Knows no values and no devices."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from torch import nn

from pipecomp.errors import ConfigError
from pipecomp.models._family import ModelFamily, TransformersConfig
from pipecomp.models.base import LayerSpec, ModelPlan, ParameterSpec, TiedWeight


def frozen_names(names: Sequence[str], patterns: Sequence[str], tied: Sequence[str]) -> frozenset[str]:
    """Names that the patterns freeze; where one name of a tied weight is frozen, so is the other.

    Raises:
        ConfigError: a pattern matches no name; the text shows close ones.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names[:3])
            raise ConfigError(f"model.freeze: no parameter matches {pattern!r}; close names: {', '.join(close)}")
        frozen.update(matched)
    if frozen.intersection(tied):
        frozen.update(tied)
    return frozenset(frozen)


def make_plan(
    family: ModelFamily,
    config: TransformersConfig,
    parameters: Sequence[Sequence[tuple[str, nn.Parameter]]],
    frozen: frozenset[str],
    *,
    is_tied: bool,
) -> ModelPlan:
    """The plan of a model whose layers have these parameters (a tied weight among them twice)."""
    last = len(parameters) - 1
    specs = tuple(
        ParameterSpec(name, tuple(parameter.shape), index, name not in frozen)
        for index, layer in enumerate(parameters)
        for name, parameter in layer
        if not (is_tied and name == family.projection)
    )
    layers = tuple(
        LayerSpec(
            index=index,
            kind="embedding" if index == 0 else "head" if index == last else "block",
            num_parameters=sum(p.numel() for _, p in layer),
            cost=_cost(index, layer, config.hidden_size),
        )
        for index, layer in enumerate(parameters)
    )
    tied = TiedWeight(family.embedding, family.projection, 0, last, config.vocab_size * config.hidden_size) if is_tied else None
    return ModelPlan(
        family=family.model_type,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=family.max_positions(config),
        layers=layers,
        parameters=specs,
        tied=tied,
        task=family.task,
    )


def _cost(index: int, layer: Sequence[tuple[str, nn.Parameter]], hidden_size: int) -> float:
    """Multiply-adds per token: each entry of a weight matrix is used once. An embedding copies a row."""
    if index == 0:
        return float(hidden_size)
    return float(sum(p.numel() for _, p in layer if p.dim() == 2))
