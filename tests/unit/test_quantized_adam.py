"""Adam with its second moment frozen, against the formula in fp64, and against what growing bias corrections would do."""

from __future__ import annotations

import pytest
import torch

from coordinator.warmup import STEADY, WarmUp
from pipecomp.config import TrainConfig, parse_run_config
from pipecomp.errors import ConfigError
from pipecomp.runtime.optimizer import OwnedParameter, ShardOptimizer, Update

BETA1, BETA2, EPSILON, RATE, DECAY = 0.8, 0.95, 1e-6, 1e-2, 0.1
TRAIN = TrainConfig(optim="quantized_adam", adam_beta1=BETA1, adam_beta2=BETA2, adam_epsilon=EPSILON, weight_decay=DECAY)


def make(*values: torch.Tensor) -> tuple[list[torch.nn.Parameter], ShardOptimizer]:
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    owned = [OwnedParameter(0, str(i), parameter, counts_in_norm=True) for i, parameter in enumerate(parameters)]
    return parameters, ShardOptimizer(owned, TRAIN)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("warm_up", [1, 7])
def test_steps_before_and_after_the_warm_up_are_those_of_the_formula(replicas: int, warm_up: int) -> None:
    draw = torch.Generator().manual_seed(replicas)
    first = torch.randn(5, 4, generator=draw)
    copies = [make(first) for _ in range(replicas)]
    weight = first.double()
    momentum, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 31):
        parts = [torch.randn(5, 4, generator=draw) for _ in range(replicas)]
        for part, (parameters, optimizer) in zip(parts, copies, strict=True):
            parameters[0].grad = part.clone()
            optimizer.to_momentum(parameters[0], replicas)
        total = sum(parameters[0].grad for parameters, _ in copies)
        for parameters, optimizer in copies:
            parameters[0].grad = total.clone()
            optimizer.step(Update(RATE, 1.0))
            if step == warm_up:
                optimizer.freeze()
        gradient = sum(part.double() for part in parts)
        momentum = BETA1 * momentum + (1 - BETA1) * gradient
        if step <= warm_up:
            second = BETA2 * second + (1 - BETA2) * gradient * gradient
        divisor = (second / (1 - BETA2 ** min(step, warm_up))).sqrt() + EPSILON
        move = momentum / (1 - BETA1**step) / divisor
        if step > warm_up:
            move = move.clamp(-1, 1)
        weight = (1 - RATE * DECAY) * weight - RATE * move
        for parameters, optimizer in copies:
            assert torch.allclose(parameters[0].double(), weight, rtol=1e-5, atol=1e-6), step
            assert optimizer.is_frozen == (step >= warm_up)
            assert parameters[0].grad is None


def test_a_constant_gradient_moves_a_weight_by_the_rate_at_every_step_also_long_after_the_warm_up() -> None:
    """With a bias correction that went on growing, steps would become sqrt((1 - beta2^t) / (1 - beta2^T)) times as long."""
    (parameter,), optimizer = make(torch.zeros(3))  # a vector: no decay
    before = torch.zeros(3)
    for step in range(1, 101):
        parameter.grad = torch.tensor([2.0, -0.5, 30.0])
        optimizer.to_momentum(parameter, 1)
        optimizer.step(Update(RATE, 1.0))
        if step == 2:
            optimizer.freeze()
        moved = (parameter.detach() - before).abs()
        before = parameter.detach().clone()
        assert torch.allclose(moved, torch.full((3,), RATE), rtol=1e-3), step
    assert ((1 - BETA2**100) / (1 - BETA2**2)) ** 0.5 > 3  # so much for the difference it makes


def test_a_weight_without_a_gradient_in_the_warm_up_does_not_leap_when_one_comes() -> None:
    (parameter,), optimizer = make(torch.zeros(4, 2))
    parameter.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    optimizer.step(Update(RATE, 1.0))
    optimizer.freeze()
    before = parameter.detach().clone()
    parameter.grad = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [-1e6, 0.0]])
    optimizer.to_momentum(parameter, 1)
    optimizer.step(Update(RATE, 1.0))
    moved = (parameter.detach() - (1 - RATE * DECAY) * before) / RATE
    usual = 12.5**0.5  # root mean square of the others
    assert moved[1].tolist() == pytest.approx([-(1 - BETA1) / (1 - BETA1**2) / usual] * 2, rel=1e-4)
    assert moved[3].tolist() == pytest.approx([1.0, 0.0], abs=1e-5)  # and never further than this


def test_clipping_once_frozen_is_of_the_momentum() -> None:
    (parameter,), optimizer = make(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer.step(Update(RATE, 1.0))
    optimizer.freeze()
    for _ in range(50):
        parameter.grad = torch.full((3,), 10.0)
        optimizer.to_momentum(parameter, 1)
        norm = optimizer.layer_norms()[0].squared_norms[0] ** 0.5
        optimizer.step(Update(RATE, min(1.0, 1.0 / norm)))
    # What is kept is the clipped momentum, of norm 1 or less.
    parameter.grad = torch.zeros(3)
    optimizer.to_momentum(parameter, 1)
    assert optimizer.layer_norms()[0].squared_norms[0] ** 0.5 <= BETA1 * 1.0001


def test_the_second_moment_that_is_told_is_bias_corrected() -> None:
    (parameter, other), optimizer = make(torch.zeros(3), torch.zeros(2, 2))
    assert optimizer.second_moment() == 0.0
    for _ in range(3):
        parameter.grad, other.grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)
        optimizer.step(Update(RATE, 1.0))
        assert optimizer.second_moment() == pytest.approx(3 * 4.0 + 4 * 1.0, rel=1e-6)


# ---------------------------------------------------------------- when the warm-up ends


def played(train: TrainConfig, total_steps: int, sums: list[float]) -> int | None:
    """The number of the step that ends the warm-up."""
    warm_up = WarmUp(train, total_steps)
    for number, value in enumerate(sums):
        if warm_up.ends_with(number):
            assert not warm_up.ends_with(number)  # once only
            assert warm_up.num_steps == number + 1
            return number + 1
        warm_up.hear(value)
    return None


def test_the_warm_up_ends_once_second_moments_are_steady() -> None:
    train = TrainConfig(optim="quantized_adam")
    steady = [1.0] * 400
    assert played(train, 400, steady) == 60 + 20 + 1  # 15 % of all steps, and a window of 5 % to compare over
    assert played(TrainConfig(optim="quantized_adam", warmup_steps=200), 400, steady) == 200 + 20 + 1
    growing = [1.0 + 0.003 * step for step in range(400)]
    ended = played(train, 400, growing)
    assert ended is not None
    number = ended - 1  # steps that were heard
    assert growing[number - 1] / growing[number - 21] - 1 <= STEADY < growing[number - 2] / growing[number - 22] - 1
    assert played(train, 400, [1.1**step for step in range(400)]) is None
    assert played(train, 400, [0.0] * 400) is None  # nothing is trained


def test_a_warm_up_of_given_length_and_none_at_all() -> None:
    assert played(TrainConfig(optim="quantized_adam", optim_warmup_steps=7), 400, [0.0] * 20) == 7
    assert played(TrainConfig(optim="quantized_adam", optim_warmup_steps=1), 400, [0.0] * 20) == 1
    assert played(TrainConfig(), 400, [1.0] * 400) is None


@pytest.mark.parametrize(
    ("train", "replicas", "reason"),
    [
        ({"optim": "quantized_adam"}, {"overlap": True}, "replicas.overlap = true does not go with train.optim"),
        ({"optim": "quantized_adam"}, {"local_steps": 5}, "replicas.local_steps = 5 does not go with train.optim"),
        ({}, {"local_steps": 5, "overlap": True}, "leave one out"),
        ({"optim_warmup_steps": 5}, {}, "train.optim_warmup_steps = 5 is of train.optim"),
        ({"optim": "sgd"}, {}, "allowed: \"adamw\", \"quantized_adam\""),
        ({}, {"outer_learning_rate": 0}, "outer_learning_rate"),
        ({}, {"outer_momentum": 1.0}, "outer_momentum"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_leave_out(train: dict, replicas: dict, reason: str) -> None:  # type: ignore[type-arg]
    tree = {"model": {"name": "x"}, "data": {"train": "x.txt"}, "train": train, "replicas": replicas}
    with pytest.raises(ConfigError, match=reason):
        parse_run_config(tree)
