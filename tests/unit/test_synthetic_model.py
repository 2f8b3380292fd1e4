"""The synthetic model: tensors made once, sleep in place of work, parameters that go on training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.config import ModelConfig
from pipecomp.errors import ConfigError
from pipecomp.models import _ring, model_from_config, open_model, save_folder, synthetic
from pipecomp.models._ring import RingSpec, TensorRing, make_elements
from pipecomp.models.base import Batch, Model
from pipecomp.runtime.stage import StageRuntime
from pipecomp.testing.local_pipeline import LocalPipeline, LocalSample
from pipecomp.testing.tiny_runs import NUM_SAMPLES, tiny_run
from pipecomp.types import Kind, Shard, TensorSpec

WIDTH, ROWS, VOCAB = 32, 16, 67
TINY: dict[str, Any] = {"model_type": "synthetic", "n_layer": 3, "n_embd": WIDTH, "n_positions": ROWS, "vocab_size": VOCAB}
SPEC = RingSpec("test", num_elements=4, num_rows=64, num_columns=128, change=0.3, scale=2.0, row_spread=0.5)


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(synthetic.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(synthetic.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def one_block(model: Model, *, recompute: bool, split_backward: bool = False) -> StageRuntime:
    module = model.build(Shard(2, 3))
    model.initialize(module, None, seed=0)
    return StageRuntime(
        module, needs_input_gradient=True, recompute=recompute, run_seed=5, split_backward=split_backward
    )


# ---------------------------------------------------------------------------------------------------------------- tensors


def test_elements_differ_by_the_change_that_was_asked_for() -> None:
    elements = make_elements(SPEC).double()
    changes = [float((a - b).norm() / b.norm()) for a, b in itertools.product(elements, elements)]
    mean = (sum(change**2 for change in changes) / len(changes)) ** 0.5
    assert mean == pytest.approx(SPEC.change, rel=0.03)
    assert sorted(changes)[len(elements)] > SPEC.change  # any two that are not the same


def test_values_have_outlier_columns_and_heavy_tails() -> None:
    values = make_elements(SPEC)[0]
    sizes = values.square().mean(0).sqrt()
    others = torch.ones(SPEC.num_columns, dtype=torch.bool)
    others[:: _ring._OUTLIERS_EVERY] = False
    assert float(sizes[~others].min()) > 3 * float(sizes[others].median())
    normed = (values - values.mean(0)) / values.std(0)
    assert float(normed.pow(4).mean()) > 4  # a normal distribution has 3


def test_the_same_spec_gives_the_same_bits_and_another_purpose_others() -> None:
    assert torch.equal(make_elements(SPEC), make_elements(SPEC))
    assert not torch.equal(make_elements(SPEC), make_elements(SPEC._replace(purpose="other")))


@pytest.mark.parametrize("num_samples", [1, 3, 4, 9])
def test_what_is_taken_is_consecutive_elements_and_shares_their_memory(num_samples: int) -> None:
    ring, elements = TensorRing(SPEC), make_elements(SPEC)
    taken = ring.take(7, num_samples, 10)
    assert torch.equal(taken, torch.stack([elements[(7 + i) % 4, :10] for i in range(num_samples)]))
    assert taken.data_ptr() == ring.take(3, num_samples, 64).data_ptr()


# ------------------------------------------------------------------------------------------------------------------ stages


def test_a_stage_gives_tensors_of_the_rings_without_copying_them() -> None:
    model = model_from_config(TINY)
    assert isinstance(model, synthetic.SyntheticModel)
    stage = one_block(model, recompute=True)
    batch = Batch((ROWS, ROWS), None, None)
    output = stage.forward(1, 0, batch, torch.ones(2, ROWS, WIDTH), num_targets=1).hidden
    gradient = stage.backward(1, 0, torch.ones(2, ROWS, WIDTH), num_targets=1)
    assert output is not None
    assert gradient is not None
    assert output.data_ptr() in {model.activations.take(i, 2, ROWS).data_ptr() for i in range(4)}
    assert gradient.data_ptr() in {model.gradients.take(i, 2, ROWS).data_ptr() for i in range(2)}


@pytest.mark.parametrize(("recompute", "backward_s"), [(False, 0.5), (True, 0.75)])
def test_a_block_sleeps_for_its_times_and_recomputing_for_its_forward_once_more(
    monkeypatch: pytest.MonkeyPatch, recompute: bool, backward_s: float
) -> None:
    clock = FakeTime(monkeypatch)
    stage = one_block(model_from_config({**TINY, "forward_s": 0.25, "backward_s": 0.5}), recompute=recompute)
    batch = Batch((4,), None, None)
    stage.forward(1, 0, batch, torch.ones(1, 4, WIDTH), num_targets=1)
    assert clock.now == 0.25
    stage.backward(1, 0, torch.ones(1, 4, WIDTH), num_targets=1)
    assert clock.now == 0.25 + backward_s


@pytest.mark.parametrize("split_backward", [False, True])
def test_gradients_of_weights_take_their_part_of_a_backward_later_or_at_once(
    monkeypatch: pytest.MonkeyPatch, split_backward: bool
) -> None:
    clock = FakeTime(monkeypatch)
    model = model_from_config({**TINY, "forward_s": 0.25, "backward_s": 0.5, "weights_s": 0.125})
    stage = one_block(model, recompute=False, split_backward=split_backward)
    batch = Batch((4,), None, None)
    stage.forward(1, 0, batch, torch.ones(1, 4, WIDTH), num_targets=1)
    stage.backward(1, 0, torch.ones(1, 4, WIDTH), num_targets=1)
    assert (clock.now, stage.num_deferred) == ((0.625, 1) if split_backward else (0.75, 0))
    stage.weights()
    assert (clock.now, stage.num_deferred) == (0.75, 0)
    stage.weights()
    assert clock.now == 0.75


def test_gradients_of_weights_are_a_part_of_a_backward() -> None:
    with pytest.raises(ConfigError, match=r"weights_s = 2 is part of backward_s = 1: make it smaller"):
        model_from_config({**TINY, "backward_s": 1.0, "weights_s": 2.0})


def test_embedding_and_head_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    model = model_from_config({**TINY, "forward_s": 1.0, "backward_s": 1.0})
    ids = torch.ones(1, 4, dtype=torch.long)
    for shard, hidden in ((Shard(0, 1), None), (Shard(4, 5), torch.ones(1, 4, WIDTH))):
        module = model.build(shard)
        model.initialize(module, None, seed=0)
        stage = StageRuntime(module, needs_input_gradient=hidden is not None, recompute=False, run_seed=0)
        stage.forward(1, 0, Batch((4,), ids, ids), hidden, num_targets=3)
        stage.backward(1, 0, None if module.is_last else torch.ones(1, 4, WIDTH), num_targets=3)
    assert clock.now == 0.0


def test_a_weights_gradient_is_made_of_what_came_over_the_link() -> None:
    stage = one_block(model_from_config(TINY), recompute=False)
    stage.forward(1, 0, Batch((4, 2), None, None), torch.ones(2, 4, WIDTH), num_targets=1)
    gradient = torch.arange(2.0 * 4 * WIDTH).reshape(2, 4, WIDTH)
    stage.backward(1, 0, gradient, num_targets=1)
    (weight,) = stage.module.parameters()
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradient[0, 0] + gradient[1, 0])


def test_samples_that_are_too_long_are_refused() -> None:
    stage = one_block(model_from_config(TINY), recompute=False)
    with pytest.raises(ConfigError, match="17 tokens in a sample, the model takes 16"):
        stage.forward(1, 0, Batch((17,), None, None), torch.ones(1, 17, WIDTH), num_targets=1)


# ---------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n_layers": 4}, "synthetic has no 'n_layers'; did you mean 'n_layer'"),
        ({"n_layer": 0}, "synthetic's n_layer = 0: Expected `int` >= 1"),
        ({"forward_s": -1.0}, "synthetic's forward_s = -1.0: Expected `float` >= 0.0"),
        ({"change": "much"}, "synthetic's change = 'much': Expected `float`, got `str`"),
    ],
)
def test_a_configuration_that_is_not_allowed_names_the_key(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_from_config({**TINY, **wrong})


def test_a_saved_model_opens_again(tmp_path: Path) -> None:
    model = model_from_config(TINY)
    module = model.build(Shard(0, 5))
    model.initialize(module, None, seed=3)
    trained = {name: parameter.detach() for name, parameter in module.named_checkpoint_parameters()}
    save_folder(tmp_path / "model", model.plan, model.config, [trained], num_stages=1)
    again = open_model(ModelConfig(name=str(tmp_path / "model")))
    assert (again.hash, again.plan) == (model.hash, model.plan)
    assert again.weights is not None
    loaded = again.build(Shard(1, 3))
    again.initialize(loaded, {name: again.weights[name] for name in again.checkpoint_names(Shard(1, 3))}, seed=0)
    for name, parameter in loaded.named_checkpoint_parameters():
        assert torch.equal(parameter, trained[name])


def test_weights_that_do_not_fit_are_named() -> None:
    model = model_from_config(TINY)
    with pytest.raises(ConfigError, match=r"h.0.weight is missing; h.1.weight is torch.float32 \(3,\), not \(32,\)"):
        model.initialize(model.build(Shard(1, 3)), {"h.1.weight": torch.zeros(3)}, seed=0)


# ---------------------------------------------------------------------------------------------------------- whole pipelines


def pipeline(seed: int = 0) -> LocalPipeline:
    train = {"batch_size": NUM_SAMPLES, "num_microbatches": 3, "seed": seed}
    return LocalPipeline(tiny_run(model={"config": TINY, "weights": "random"}, train=train), TINY, num_ranks=3)


def batch() -> list[list[LocalSample]]:
    ids = [list(range(1, 11)) for _ in range(NUM_SAMPLES)]
    samples = [LocalSample(index, tokens, tokens) for index, tokens in enumerate(ids)]
    return [samples[:2], samples[2:4], samples[4:]]


async def test_both_ends_remember_the_same_messages_and_send_the_bytes_that_the_codec_says() -> None:
    async with pipeline() as local:
        for _ in range(3):
            await local.step(batch(), learning_rate=1e-3)
        for sender, receiver in local.digests():
            assert len(sender) == NUM_SAMPLES
            assert sender == receiver
        spec, num_links = TensorSpec(10, WIDTH), 2
        codec = local.ranks[0].stages[0].forward_out.coder.codec  # type: ignore[index,union-attr]
        first, later = (codec.encoded_nbytes(spec, first_visit=is_first) for is_first in (True, False))
        sent = sum(t.payload_nbytes for t in local.link_traffic() if t.kind is Kind.FORWARD)
        assert sent == num_links * NUM_SAMPLES * (first + 2 * later)


async def test_the_same_seed_trains_to_the_same_parameters_and_another_to_others() -> None:
    ends = []
    for seed in (1, 1, 2):
        async with pipeline(seed) as local:
            losses = [(await local.step(batch(), learning_rate=1e-2)).loss for _ in range(3)]
            ends.append((losses, local.parameters()))
    (losses, first), (same_losses, same), (other_losses, _) = ends
    assert losses == same_losses != other_losses
    assert losses[-1] < losses[0]
    assert all(torch.equal(first[name], same[name]) for name in first)
