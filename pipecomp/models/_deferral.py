"""Gradients of weights that may wait: a backward pass in two halves, as zero-bubble schedules have it. Knows torch; no steps.

A linear map y = x W + b asks two products of its backward pass. Only the first is what the layer below waits for:

    input's gradient      g W^T          at once, within `torch.autograd.backward`
    weight's gradient     x^T g          any time before the optimizer's step; so is the bias's

`Deferral` collects the second halves as functions, and `defer_linear` makes a module hand its own to it. The products are the
very calls that autograd makes, on the same tensors, and they are added to `.grad` in the order in which they are called: a
deferred gradient has the bits of one that was not, if halves are called in the order of the microbatches.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Half(NamedTuple):
    """The second half of one layer's backward pass."""

    compute: Callable[[], None]
    """Computes gradients and adds them to their parameters'."""
    held: tuple[torch.Tensor, ...] = ()
    """What it needs, and so keeps in memory."""
    trains: tuple[nn.Parameter, ...] = ()
    """Whose gradients it computes."""


class Deferral:
    """Where modules leave their second halves. Outside of `collecting`, nothing waits: they are computed at once."""

    def __init__(self) -> None:
        self._halves: list[Half] | None = None
        self._trained: set[int] = set()

    def serves(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of `parameter` comes out of a half, and not out of autograd."""
        return id(parameter) in self._trained

    def serve(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of `parameters` will come out of halves."""
        self._trained.update(map(id, parameters))

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Half]]:
        """Around one backward pass; what it gives is filled meanwhile, in the order in which gradients became known."""
        halves: list[Half] = []
        self._halves = halves
        try:
            yield halves
        finally:
            self._halves = None

    def later(self, half: Half) -> None:
        """Have `half` computed some time."""
        if self._halves is None:
            half.compute()
        else:
            self._halves.append(half)


class _Linear(torch.autograd.Function):
    """`nn.Linear`, and transformers' `Conv1D`, whose weight is the other way round."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        deferral: Deferral,
        is_conv1d: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferral, ctx.is_conv1d = weight, bias, deferral, is_conv1d
        if not is_conv1d:
            return nn.functional.linear(x, weight, bias)
        assert bias is not None
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.size(1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:  # noqa: ANN401
        (x,) = ctx.saved_tensors
        weight, bias, is_conv1d = ctx.weight, ctx.bias, ctx.is_conv1d
        gradient = gradients[0].reshape(-1, gradients[0].size(-1))
        flat = x.reshape(-1, x.size(-1))
        below = None
        if ctx.needs_input_grad[0]:
            below = gradient.mm(weight.t() if is_conv1d else weight).view(x.shape)

        def compute() -> None:
            with torch.no_grad():
                _add(weight, flat.t().mm(gradient) if is_conv1d else gradient.t().mm(flat))
                if bias is not None and bias.requires_grad:
                    _add(bias, gradient.sum(0))

        trains = (weight,) if bias is None or not bias.requires_grad else (weight, bias)
        ctx.deferral.later(Half(compute, (flat, gradient), trains))
        return below, None, None, None, None


def _add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """As autograd does: the first one is taken as it is."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def defer_linear(module: nn.Module, deferral: Deferral) -> bool:
    """Let one module leave its weight's gradients to `deferral`; False for one that is no linear map, or has nothing to train.

    Its forward pass gives the same bits as before, and its parameters stay what they are.
    """
    is_conv1d = _is_conv1d(module)
    if not (is_conv1d or type(module) is nn.Linear) or not module.weight.requires_grad:
        return False

    def forward(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Linear.apply(x, module.weight, module.bias, deferral, is_conv1d)  # type: ignore[no-untyped-call]
        return output

    module.forward = forward
    deferral.serve(p for p in module.parameters(recurse=False) if p.requires_grad)
    return True


def _is_conv1d(module: nn.Module) -> bool:
    """By name: transformers is not imported for models that have none."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
