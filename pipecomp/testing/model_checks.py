"""What every model family must keep: the bits of the whole model, whatever the split. Knows models only through their contract.

`check_model(config)` runs all of it; each check alone says in its name what it holds. Failing, they raise AssertionError.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pipecomp import registry
from pipecomp.models import auto_class, model_from_config
from pipecomp.models._family import ModelFamily
from pipecomp.models.base import CLASSIFICATION, Batch, LayerSeeds, Model, ModelMaker, StageModule
from pipecomp.partition import shards_from_counts
from pipecomp.runtime.stage import StageRuntime
from pipecomp.types import Shard

Config = Mapping[str, object]
_IGNORED = -100


class CountingSeeds(LayerSeeds):
    """Seeds that differ by layer and by whatever number the caller gives."""

    def __init__(self, number: int) -> None:
        self._number = number

    def seed(self, layer: int) -> int:
        """See `LayerSeeds.seed`."""
        return self._number * 1000 + layer


class Result(NamedTuple):
    """What one microbatch gives."""

    logits: torch.Tensor  # of real positions only, (sum of lengths, vocab); or (B, classes)
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]  # by Hugging Face name, a tied weight's two apart


def plugins(kind: type[ModelFamily | ModelMaker]) -> list[str]:
    """Names of the plugins of this kind."""
    names = registry.names("pipecomp.models")
    return [name for name in names if isinstance(registry.load("pipecomp.models", name), kind)]


def check_model(config: Config) -> None:
    """Run every check on a plugin's configuration (see `ModelFamily.tiny_config` and `ModelMaker.tiny_config`)."""
    for check in ALL_CHECKS:
        check(config)


def check_any_split_has_the_whole_models_bits(config: Config) -> None:
    """Logits, loss and every gradient equal those of the whole model (see `run_whole`), bit for bit, with and without padding,
    in evaluation and in training with dropout 0."""
    model = model_from_config(config, dropout=0.0)
    for lengths in ((5, 9, 1, 12), (6, 6), (1,)):
        batch = make_batch(model, lengths)
        for seeds in (None, CountingSeeds(1)):
            expected = run_whole(model, batch, seeds=seeds)
            for shards in even_splits(model):
                case = f"{len(shards)} stages, lengths {lengths}{', training' if seeds else ''}"
                _assert_same(run_split(model, shards, batch, seeds=seeds), expected, case)


def check_gradients_that_wait_have_the_same_bits(config: Config) -> None:
    """With the backward pass in two halves, over several microbatches, all second halves at the end: the same gradients."""
    model = model_from_config(config, dropout=0.0)
    batches = [make_batch(model, lengths) for lengths in ((5, 9, 1, 12), (6, 6), (1,))]
    for shards in even_splits(model):
        expected, found = (_run_all(model, shards, batches, split_backward=split) for split in (False, True))
        for name, gradient in found.items():
            assert _equal(gradient, expected[name]), f"{len(shards)} stages: the gradient of {name} differs if it waits"


def check_padding_is_inert(config: Config) -> None:
    """What stands at padded positions changes no bit of logits, loss or gradients."""
    model = model_from_config(config, dropout=0.0)
    shards = even_splits(model)[-1]
    batch = make_batch(model, (3, 11, 7))
    assert batch.input_ids is not None
    other = torch.where(_real(batch), batch.input_ids, model.plan.vocab_size - 1)
    expected = run_split(model, shards, batch)
    _assert_same(run_split(model, shards, batch._replace(input_ids=other)), expected, "other ids at padding")


def check_dropout_is_a_function_of_its_seeds(config: Config) -> None:
    """The same seeds give the same bits again and in any split; other seeds give others."""
    model = model_from_config(config, dropout=0.1)
    batch = make_batch(model, (4, 9, 9))
    first = run_split(model, even_splits(model)[0], batch, seeds=CountingSeeds(1))
    for shards in even_splits(model):
        torch.rand(3)  # what was drawn before must not matter
        _assert_same(run_split(model, shards, batch, seeds=CountingSeeds(1)), first, f"{len(shards)} stages, same seeds")
    other = run_split(model, even_splits(model)[0], batch, seeds=CountingSeeds(2))
    assert not torch.equal(other.logits, first.logits), "other seeds gave the same dropout"
    evaluated = run_split(model, even_splits(model)[0], batch)
    still = run_whole(model_from_config(config, dropout=0.0), batch)
    _assert_same(evaluated, still, "evaluation must have no dropout")


def check_random_weights_depend_on_seed_and_layer_only(config: Config) -> None:
    """Every split starts from the same numbers, the two copies of a tied weight included; another seed from others."""
    model = model_from_config(config)
    whole = _parameters(_build(model, [_whole_shard(model)], seed=3))
    for shards in even_splits(model):
        stages = _build(model, shards, seed=3)
        for name, value in _parameters(stages).items():
            assert torch.equal(value, whole[name]), f"{name} differs in {len(shards)} stages"
    if model.plan.tied is not None:
        assert torch.equal(whole[model.plan.tied.name], whole[model.plan.tied.alias]), "a tied weight has two values"
    drawn = [value for value in whole.values() if value.dim() == 2]
    num_same = sum(a.shape == b.shape and torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert num_same == (model.plan.tied is not None), "two layers start from the same numbers"
    other = _parameters(_build(model, [_whole_shard(model)], seed=4))
    assert any(not torch.equal(other[name], whole[name]) for name in whole), "the seed does not matter"


def check_shards_cover_the_model_once(config: Config) -> None:
    """Shards hold the whole model's parameters under its names, on the meta device until they are initialized."""
    model = model_from_config(config)
    whole = model.plan.parameters
    assert [p.layer for p in whole] == sorted(p.layer for p in whole)
    for shards in even_splits(model):
        names = [name for shard in shards for name in model.checkpoint_names(shard)]
        tied = model.plan.tied
        if tied is not None and len(shards) > 1:
            assert names.count(tied.name) == 2, "the head's shard must ask for the tied weight too"
            names.reverse()
            names.remove(tied.name)
            names.reverse()
        assert names == [p.name for p in whole], "checkpoint_names must be the plan's, in layer order"
        for shard in shards:
            module = model.build(shard)
            assert all(p.is_meta for p in module.parameters()), "build must not take memory"
            assert module.is_first == (shard.first_layer == 0)
            assert module.is_last == (shard.end_layer == len(model.plan.layers))
            sizes = sum(model.plan.layers[i].num_parameters for i in range(shard.first_layer, shard.end_layer))
            assert sum(p.numel() for _, p in module.named_checkpoint_parameters()) == sizes


def check_a_tied_weight_has_two_gradients_and_one_memory(config: Config) -> None:
    """In one shard the two uses of a tied weight share storage but not gradients, also after a move."""
    model = model_from_config(config)
    tied = model.plan.tied
    if tied is None:
        return
    module = model.build(_whole_shard(model))
    parameters = dict(module.named_checkpoint_parameters())
    assert parameters[tied.name] is not parameters[tied.alias], "one Parameter would sum the two gradients"
    model.initialize(module, None, seed=0)
    module.to(torch.float64).to(torch.float32)  # any move: tensors that change get memory of their own
    parameters = dict(module.named_checkpoint_parameters())
    assert module.tied_alias_shares_storage
    assert parameters[tied.name] is not parameters[tied.alias]
    assert parameters[tied.name].data_ptr() == parameters[tied.alias].data_ptr()
    first, last = _build(model, shards_from_counts([len(model.plan.layers) - 1, 1], len(model.plan.layers)), seed=0)
    assert not last.tied_alias_shares_storage
    model.share_tied_storage(first, last)
    pointers = {dict(s.named_checkpoint_parameters())[n].data_ptr() for s, n in ((first, tied.name), (last, tied.alias))}
    assert last.tied_alias_shares_storage
    assert len(pointers) == 1


def check_frozen_parameters_get_no_gradient(config: Config) -> None:
    """Freezing a whole first stage leaves every other gradient's bits alone."""
    plan = model_from_config(config).plan
    patterns = tuple(p.name for p in plan.parameters if p.layer <= 1)
    model = model_from_config(config, freeze=patterns, dropout=0.0)
    batch = make_batch(model, (8, 5))
    expected = run_whole(model_from_config(config, dropout=0.0), batch).gradients
    frozen = {p.name for p in model.plan.parameters if not p.trainable}
    assert frozen == set(patterns)
    alias = {model.plan.tied.alias} if model.plan.tied is not None else set()
    for shards in even_splits(model):
        found = run_split(model, shards, batch).gradients
        for name, gradient in found.items():
            if name in frozen | alias:
                assert gradient is None, f"{name} is frozen and got a gradient"
            else:
                assert _equal(gradient, expected[name]), f"{name}'s gradient depends on what is frozen"


def check_stages_write_to_nothing_they_are_given(config: Config) -> None:
    """Activations and gradients that come in may be the memory of a message, which both ends of a link must hold alike. So not
    even a stage that keeps no graph, because nothing before its end is trained, may work in place on them."""
    plan = model_from_config(config).plan
    end = max(1, len(plan.layers) - 1)
    for freeze in ((), tuple(p.name for p in plan.parameters if p.layer < end)):
        model = model_from_config(config, freeze=freeze, dropout=0.1)
        batch = make_batch(model, (5, 9))
        for shards in even_splits(model)[1:]:
            modules = _build(model, shards, seed=1)
            stages = [
                StageRuntime(module, needs_input_gradient=not freeze and index > 0, recompute=False, run_seed=0)
                for index, module in enumerate(modules)
            ]
            given: list[tuple[torch.Tensor, torch.Tensor]] = []
            hidden: torch.Tensor | None = None
            for stage in stages:
                hidden = _noted(stage.forward(1, 0, batch, hidden, num_targets=1).hidden, given)
            gradient: torch.Tensor | None = None
            for stage in reversed(stages) if not freeze else ():
                gradient = _noted(stage.backward(1, 0, gradient, num_targets=1), given)
            for tensor, copy in given:
                assert torch.equal(tensor, copy), f"{len(shards)} stages: one wrote to what it was given"


def _noted(tensor: torch.Tensor | None, given: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    if tensor is not None:
        given.append((tensor, tensor.clone()))
    return tensor


def check_a_configuration_crosses_as_json(config: Config) -> None:
    """Another process builds the same model from `Model.config` alone."""
    model = model_from_config(config)
    again = model_from_config(model.config)
    assert again.hash == model.hash
    assert again.config == model.config
    assert again.plan == model.plan


ALL_CHECKS: tuple[Callable[[Config], None], ...] = (
    check_any_split_has_the_whole_models_bits,
    check_gradients_that_wait_have_the_same_bits,
    check_padding_is_inert,
    check_dropout_is_a_function_of_its_seeds,
    check_random_weights_depend_on_seed_and_layer_only,
    check_shards_cover_the_model_once,
    check_a_tied_weight_has_two_gradients_and_one_memory,
    check_frozen_parameters_get_no_gradient,
    check_stages_write_to_nothing_they_are_given,
    check_a_configuration_crosses_as_json,
)


def make_batch(model: Model, lengths: Sequence[int]) -> Batch:
    """Token ids from a fixed formula, zeros at padding. Labels: the ids but for the first third of each sample, or classes."""
    rows, columns = len(lengths), max(lengths)
    positions = torch.arange(columns).unsqueeze(0)
    real = positions < torch.tensor(lengths).unsqueeze(1)
    ids = torch.arange(rows * columns).reshape(rows, columns).mul(31).add(7).remainder(model.plan.vocab_size)
    if model.plan.task == CLASSIFICATION:
        classes = torch.arange(rows).mul(5).add(1).remainder(len(model.config["id2label"]))
        return Batch(tuple(lengths), ids * real, classes)
    prompt = positions < torch.tensor(lengths).unsqueeze(1) // 3
    return Batch(tuple(lengths), ids * real, torch.where(real & ~prompt, ids, _IGNORED))


def even_splits(model: Model) -> list[list[Shard]]:
    """The model in 1, 2, 3, 4 and as many stages as it has layers."""
    num_layers = len(model.plan.layers)
    splits = []
    for num_stages in sorted({1, 2, 3, min(4, num_layers), num_layers}):
        cuts = [round(i * num_layers / num_stages) for i in range(num_stages + 1)]
        splits.append([Shard(start, end) for start, end in itertools.pairwise(cuts)])
    return splits


def run_split(
    model: Model, shards: Sequence[Shard], batch: Batch, *, seeds: LayerSeeds | None = None, seed: int = 1
) -> Result:
    """One forward and backward through shards that pass real positions only, as links do."""
    with _one_thread():
        stages = _build(model, shards, seed=seed)
        real = _real(batch).unsqueeze(-1)
        incoming: list[torch.Tensor | None] = []
        outgoing: list[torch.Tensor] = []
        for stage in stages:
            received = None
            if outgoing:
                received = (outgoing[-1].detach() * real).requires_grad_(outgoing[-1].requires_grad)
            incoming.append(received)
            outgoing.append(stage.forward_layers(received, batch, seeds=seeds))
        loss = stages[-1].loss_sum(outgoing[-1], batch) / _num_targets(model, batch)
        loss.backward()
        for received, sent in zip(incoming[:0:-1], outgoing[-2::-1], strict=True):
            assert received is not None
            if received.grad is not None:
                sent.backward(received.grad * real)
        gradients = {name: p.grad for stage in stages for name, p in stage.named_checkpoint_parameters()}
        return Result(_real_logits(outgoing[-1], batch), loss.detach(), gradients)


def _run_all(
    model: Model, shards: Sequence[Shard], batches: Sequence[Batch], *, split_backward: bool
) -> dict[str, torch.Tensor | None]:
    """Gradients of several microbatches, each trained through all stages as workers do."""
    with _one_thread():
        stages = [
            StageRuntime(
                module,
                needs_input_gradient=not module.is_first,
                recompute=False,
                run_seed=0,
                split_backward=split_backward,
            )
            for module in _build(model, shards, seed=1)
        ]
        for index, batch in enumerate(batches):
            num_targets, real = _num_targets(model, batch), _real(batch).unsqueeze(-1)
            hidden: torch.Tensor | None = None
            for stage in stages:
                hidden = stage.forward(1, index, batch, hidden, num_targets=num_targets).hidden
                hidden = None if hidden is None else hidden * real
            gradient: torch.Tensor | None = None
            for stage in reversed(stages):
                gradient = stage.backward(1, index, gradient, num_targets=num_targets)
                gradient = None if gradient is None else gradient * real
        for stage in stages:
            while stage.num_deferred:
                stage.weights()
        return {name: p.grad for stage in stages for name, p in stage.module.named_checkpoint_parameters()}


def run_whole(model: Model, batch: Batch, *, seeds: LayerSeeds | None = None, seed: int = 1) -> Result:
    """The same by plain transformers: its own model, attention mask, labels and loss; `seeds` matter to no model without dropout.
    A model that is not of transformers has nothing to be compared with but itself, in one stage."""
    from transformers import AutoConfig

    if isinstance(registry.load("pipecomp.models", model.config["model_type"]), ModelMaker):
        return run_split(model, [_whole_shard(model)], batch, seeds=seeds, seed=seed)
    with _one_thread():
        values = {key: value for key, value in model.config.items() if key != "model_type"}
        config = type(AutoConfig.for_model(model.config["model_type"])).from_dict(values)
        whole: Any = auto_class(model.plan.task).from_config(config, dtype=torch.float32).eval()
        whole.load_state_dict(_parameters(_build(model, [_whole_shard(model)], seed=seed)))
        tied = model.plan.tied
        if tied is not None:  # one memory, two gradients
            whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.data)
        output = whole(
            input_ids=batch.input_ids,
            attention_mask=_real(batch).long(),
            labels=batch.labels,
            num_items_in_batch=_num_targets(model, batch),
        )
        output.loss.backward()
        gradients = {name: p.grad for name, p in whole.named_parameters()}
        return Result(_real_logits(output.logits, batch), output.loss.detach(), gradients)


def _num_targets(model: Model, batch: Batch) -> int:
    """What the loss is divided by. A classifier of transformers always takes the mean over the samples it is given."""
    return len(batch.lengths) if model.plan.task == CLASSIFICATION else _NUM_TOKENS


def _real_logits(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return logits.detach()[_real(batch)] if logits.dim() == 3 else logits.detach()


_NUM_TOKENS = 37  # of the whole batch that the microbatch is taken to be a part of; no power of two, so that division rounds


def _build(model: Model, shards: Sequence[Shard], *, seed: int) -> list[StageModule]:
    stages = [model.build(shard) for shard in shards]
    for stage in stages:
        model.initialize(stage, None, seed=seed)
    return stages


def _whole_shard(model: Model) -> Shard:
    return Shard(0, len(model.plan.layers))


def _parameters(stages: Sequence[StageModule]) -> dict[str, torch.Tensor]:
    return {name: p.detach() for stage in stages for name, p in stage.named_checkpoint_parameters()}


def _real(batch: Batch) -> torch.Tensor:
    return torch.arange(max(batch.lengths)).unsqueeze(0) < torch.tensor(batch.lengths).unsqueeze(1)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _assert_same(found: Result, expected: Result, case: str) -> None:
    assert torch.equal(found.logits, expected.logits), f"{case}: logits differ"
    assert torch.equal(found.loss, expected.loss), f"{case}: loss differs"
    assert found.gradients.keys() == expected.gradients.keys(), f"{case}: other parameters"
    for name, gradient in found.gradients.items():
        assert _equal(gradient, expected.gradients[name]), f"{case}: the gradient of {name} differs"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Bits hold for one torch thread: more of them sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
