"""Adam with its second moment frozen: what is exchanged is the momentum, which quantization disturbs less. Knows tensors only.

    each replica r    m_r = beta1 * m / D  +  (1 - beta1) * g_r          the sum over D replicas is the next m
    all of them       w   = (1 - rate * decay) * w  -  rate * (m / (1 - beta1^t)) / (sqrt(v_T / (1 - beta2^T)) + epsilon)

v_T is the second moment after the T steps of warm-up. It no longer grows, so its bias correction stays that of step T: one that
went on with t would enlarge steps up to sqrt((1 - beta2^t) / (1 - beta2^T)) times. Of the momentum, which goes on, it does.

Two guards are ours. A weight that had no gradient in the warm-up (a token that never came) has v_T = 0 and would leap: it takes
the root mean square of its tensor's others instead. And no weight goes further in a step than Adam itself ever does with these
betas: max(1, (1 - beta1) / sqrt(1 - beta2)) times the rate.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021; as the
data-parallel half of Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees",
2022, section 3.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class FrozenAdam:
    """What AdamW knows after its warm-up, and the steps from there on."""

    def __init__(self, adam: torch.optim.AdamW) -> None:
        """Takes over the state of `adam`, which has taken at least one step with every parameter and is not to be used again."""
        self._adam = adam
        self._num_steps = 0
        with torch.no_grad():
            for group in adam.param_groups:
                for parameter in group["params"]:
                    state = adam.state[parameter]
                    self._num_steps = round(float(state["step"]))
                    second = state["exp_avg_sq"].div_(1.0 - group["betas"][1] ** self._num_steps)
                    is_unknown = second == 0
                    num_known = second.numel() - int(is_unknown.sum())
                    usual = float(second.sum(dtype=torch.float64)) / num_known if num_known else 1.0
                    second.masked_fill_(is_unknown, usual).sqrt_().add_(group["eps"])  # the divisor itself from here on
        self._betas1 = {id(parameter): group["betas"][0] for group in adam.param_groups for parameter in group["params"]}

    def to_momentum(self, parameter: torch.nn.Parameter, num_replicas: int) -> None:
        """Replace a gradient by one replica's part of the next momentum."""
        assert parameter.grad is not None
        beta1 = self._betas1[id(parameter)]
        parameter.grad.mul_(1.0 - beta1).add_(self._state(parameter)["exp_avg"], alpha=beta1 / num_replicas)

    def step(self, learning_rate: float) -> None:
        """Take gradients for what they are: the next momenta."""
        self._num_steps += 1
        with torch.no_grad():
            for group in self._adam.param_groups:
                beta1, beta2 = group["betas"]
                furthest = max(1.0, (1.0 - beta1) / math.sqrt(1.0 - beta2))
                for parameter in group["params"]:
                    assert parameter.grad is not None
                    state = self._state(parameter)
                    state["exp_avg"].copy_(parameter.grad)
                    parameter.mul_(1.0 - learning_rate * group["weight_decay"])
                    # The gradient is of no more use: it is where the step is put together.
                    move = parameter.grad.div_(state["exp_avg_sq"]).div_(1.0 - beta1**self._num_steps)
                    parameter.add_(move.clamp_(-furthest, furthest), alpha=-learning_rate)

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._adam.state[parameter]
        return state
