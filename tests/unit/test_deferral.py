"""Gradients of weights that wait: the bits of those that did not, in the order in which they are computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipecomp.models._deferral import Deferral, Half, defer_linear
from pipecomp.models.base import Batch
from pipecomp.runtime.stage import StageRuntime
from pipecomp.testing.tiny_runs import MODEL


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def modules(kind: str, *, bias: bool = True) -> tuple[nn.Module, nn.Module]:
    """Two that are equal: 48 columns in, 80 out."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        module = nn.Linear(48, 80, bias=bias) if kind == "linear" else Conv1D(80, 48)
        nn.init.normal_(module.weight)
        made.append(module)
    return made[0], made[1]


def train(module: nn.Module, deferral: Deferral | None, shapes: list[tuple[int, ...]]) -> list[torch.Tensor | None]:
    """Some microbatches; then, where they wait, second halves. Gradients of inputs, weight and bias."""
    found, waiting = [], []
    for index, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(*shape, 48, generator=generator).requires_grad_(index != 1)
        output = module(x)
        gradient = torch.randn(output.shape, generator=generator)
        if output.dim() == 3:  # as a reshaped and transposed attention output gives it
            gradient = gradient.transpose(0, 1).contiguous().transpose(0, 1)
        if deferral is None:
            output.backward(gradient)
        else:
            with deferral.collecting() as halves:
                output.backward(gradient)
            waiting += halves
        found.append(x.grad)
    for half in waiting:
        half.compute()
    bias = getattr(module, "bias", None)
    return [*found, module.weight.grad, None if bias is None else bias.grad]


@pytest.mark.parametrize("shapes", [[(7,), (13,), (1,)], [(2, 5), (3, 9), (1, 1), (4, 16)]], ids=str)
@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_waiting_changes_no_bit(kind: str, bias: bool, shapes: list[tuple[int, ...]]) -> None:
    plain, deferred = modules(kind, bias=bias)
    deferral = Deferral()
    x = torch.randn(*shapes[0], 48)
    before = deferred(x)
    assert defer_linear(deferred, deferral)
    assert torch.equal(deferred(x), before)
    expected, found = train(plain, None, shapes), train(deferred, deferral, shapes)
    assert found[-2] is not None
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]


def test_until_its_second_half_a_weight_has_no_gradient() -> None:
    module, _ = modules("linear")
    deferral = Deferral()
    defer_linear(module, deferral)
    with deferral.collecting() as halves:
        module(torch.ones(2, 48)).sum().backward()
    assert [module.weight.grad, module.bias.grad] == [None, None]
    (half,) = halves
    assert sorted(tuple(tensor.shape) for tensor in half.held) == [(2, 48), (2, 80)]
    half.compute()
    assert torch.equal(module.bias.grad, torch.full((80,), 2.0))


def test_outside_of_collecting_nothing_waits() -> None:
    plain, module = modules("linear")
    defer_linear(module, Deferral())
    for each in (plain, module):
        each(torch.ones(2, 48)).sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    done: list[int] = []
    Deferral().later(Half(lambda: done.append(1)))
    assert done == [1]


def test_a_failed_backward_leaves_nothing_to_the_next_one() -> None:
    deferral = Deferral()
    with pytest.raises(RuntimeError, match="broken"), deferral.collecting():
        raise RuntimeError("broken")
    module, _ = modules("linear")
    defer_linear(module, deferral)
    module(torch.ones(2, 48)).sum().backward()
    assert module.weight.grad is not None


def test_what_is_no_linear_map_or_has_nothing_to_train_is_left_alone() -> None:
    frozen, _ = modules("linear")
    frozen.weight.requires_grad_(False)
    for module in (nn.LayerNorm(8), nn.Embedding(4, 8), frozen, nn.Bilinear(2, 2, 2)):
        assert not defer_linear(module, Deferral())
        assert "forward" not in vars(module)


def test_a_frozen_bias_gets_no_gradient() -> None:
    module, _ = modules("linear")
    module.bias.requires_grad_(False)
    defer_linear(module, Deferral())
    module(torch.ones(2, 48)).sum().backward()
    assert module.bias.grad is None
    assert module.weight.grad is not None


# ------------------------------------------------------------------------------------------------------------------- stages


def stage(*, split_backward: bool = True) -> StageRuntime:
    from pipecomp.models import model_from_config
    from pipecomp.types import Shard

    model = model_from_config(MODEL)
    module = model.build(Shard(2, 4))
    model.initialize(module, None, seed=0)
    return StageRuntime(module, needs_input_gradient=True, recompute=False, run_seed=0, split_backward=split_backward)


def run(runtime: StageRuntime, microbatch: int) -> None:
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(microbatch))
    runtime.forward(1, microbatch, Batch((5, 5), None, None), hidden, num_targets=3)
    runtime.backward(1, microbatch, hidden, num_targets=3)


def test_second_halves_are_computed_one_microbatch_at_a_time() -> None:
    split, whole = stage(), stage(split_backward=False)
    for runtime in (split, whole):
        for microbatch in range(3):
            run(runtime, microbatch)
    assert (split.num_deferred, whole.num_deferred) == (3, 0)
    assert split.deferred_nbytes == 3 * one_microbatch_nbytes(split)
    split.weights()
    assert split.num_deferred == 2
    while split.num_deferred:
        split.weights()
    assert split.deferred_nbytes == 0
    for one, other in zip(split.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def one_microbatch_nbytes(runtime: StageRuntime) -> int:
    """Two blocks, 10 tokens; linear maps of 32 to 96, 32 to 32, 32 to 128 and 128 to 32 hold inputs and outputs' gradients."""
    assert runtime.module.shard.end_layer - runtime.module.shard.first_layer == 2
    return 2 * 10 * 4 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)


def test_an_aborted_step_forgets_them() -> None:
    runtime = stage()
    run(runtime, 0)
    runtime.forget()
    assert runtime.num_deferred == 0
    runtime.weights()
    assert all(p.grad is None for name, p in runtime.module.named_checkpoint_parameters() if name.endswith("c_fc.weight"))
