"""One stage's forward and backward for the microbatches in flight. Knows torch and microbatch indices; no sockets, no codecs.

    forward(i)    keep what backward(i) needs: the graph, or with recompute only the input
    backward(i)   gradients add up in each parameter's `.grad`, in the order of the calls (law 1)
    weights()     where the backward pass is split: what the oldest backward left for later, in the same order

The forward of a stage runs on what it received, m(xi), and its input gradient is the gradient at m.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pipecomp.errors import LocalProtocolError
from pipecomp.models.base import Batch, Half, StageModule
from pipecomp.runtime.seeds import DropoutSeeds


class ForwardResult(NamedTuple):
    """`hidden` for the next stage, or the loss where the stage ends with the head."""

    hidden: torch.Tensor | None  # (B, T, H) fp32, no graph
    loss_sum: float | None  # sum of the losses of the microbatch's tokens or classes
    num_correct: int | None = None  # samples of an evaluation that are classified rightly; None where labels are tokens


class _Kept(NamedTuple):
    """What a backward pass needs of its forward pass."""

    batch: Batch
    chance: int
    hidden: torch.Tensor | None
    output: torch.Tensor | None  # with graph; None means: recompute


class StageRuntime:
    """Computes one stage. All calls come from one thread."""

    def __init__(
        self,
        module: StageModule,
        *,
        needs_input_gradient: bool,
        recompute: bool,
        run_seed: int,
        split_backward: bool = False,
        on_gradient: Callable[[torch.nn.Parameter], None] | None = None,
    ) -> None:
        """`split_backward`: leave what nobody waits for to `weights`. `on_gradient` is told, where backwards run, of parameters
        whose gradients are complete: all of them that the last backward of a step has touched."""
        self.module = module
        self.needs_input_gradient = needs_input_gradient
        self.has_backward = needs_input_gradient or any(p.requires_grad for p in module.parameters())
        self._recompute = recompute
        self._run_seed = run_seed
        self._kept: dict[int, _Kept] = {}
        self._deferral = module.split_backward() if split_backward else None
        self._later: deque[Sequence[Half]] = deque()  # of each microbatch, the oldest first
        self._on_gradient = on_gradient
        self._is_last = False  # the newest backward of the step
        if on_gradient is not None:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._by_autograd)

    @property
    def num_deferred(self) -> int:
        """Microbatches whose `weights` are still to be computed."""
        return len(self._later)

    @property
    def deferred_nbytes(self) -> int:
        """What they need until then; memory that several share counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for halves in self._later
            for half in halves
            for tensor in half.held
        }
        return sum(storages.values())

    def forward(
        self,
        step: int,
        microbatch: int,
        batch: Batch,
        hidden: torch.Tensor | None,
        *,
        num_targets: int,
        first_microbatch: int = 0,
    ) -> ForwardResult:
        """Forward one microbatch of a training step.

        Args:
            step, microbatch: with `first_microbatch` added, also the dropout's seed: other replicas draw other numbers.
            batch: lengths, and ids or labels where this stage needs them.
            hidden: (B, T, H) fp32 as received; None where the stage starts with the embedding.
            num_targets: label tokens (or classes) of the whole batch; the loss that is differentiated is divided by it.
        """
        if microbatch in self._kept:
            raise LocalProtocolError(f"forward of microbatch {microbatch} runs twice in step {step}")
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(self.needs_input_gradient)
        keep_graph, chance = self.has_backward and not self._recompute, first_microbatch + microbatch
        with torch.set_grad_enabled(keep_graph):
            output, loss_sum = self._run(step, chance, batch, hidden, num_targets)
        if self.has_backward:
            self._kept[microbatch] = _Kept(batch, chance, hidden, output if keep_graph else None)
        return ForwardResult(None if self.module.is_last else output.detach(), loss_sum)

    def backward(
        self, step: int, microbatch: int, gradient: torch.Tensor | None, *, num_targets: int, is_last: bool = False
    ) -> torch.Tensor | None:
        """Backward one microbatch; return the gradient at its input if an earlier stage needs it.

        Args:
            is_last: it is the step's last one on this stage.
            gradient: (B, T, H) fp32 at this stage's output, zeros at padding; None where the stage ends with the head.
        """
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            raise LocalProtocolError(f"backward of microbatch {microbatch} in step {step} has no forward")
        output = kept.output
        if output is None:
            with torch.enable_grad():
                output, _ = self._run(step, kept.chance, kept.batch, kept.hidden, num_targets)
        self._is_last = is_last
        if self._deferral is None:
            torch.autograd.backward(output, gradient)
        else:
            with self._deferral.collecting() as later:
                torch.autograd.backward(output, gradient)
            self._later.append(later)
        if not self.needs_input_gradient:
            return None
        assert kept.hidden is not None and kept.hidden.grad is not None
        return kept.hidden.grad

    def weights(self) -> None:
        """Compute the gradients of weights that the oldest backward has left, and add them up. Does nothing if none has."""
        if self._later:
            halves = self._later.popleft()
            for half in halves:
                half.compute()
                if self._is_last and not self._later:
                    for parameter in half.trains:
                        self._accumulated(parameter)

    def evaluate(self, batch: Batch, hidden: torch.Tensor | None) -> ForwardResult:
        """Forward without dropout, graph or trace."""
        with torch.no_grad():
            output = self.module.forward_layers(hidden, batch, seeds=None)
            if self.module.is_last:
                loss_sum = float(self.module.loss_sum(output, batch))
                return ForwardResult(None, loss_sum, self.module.num_correct(output, batch))
            return ForwardResult(output, None)

    def forget(self) -> None:
        """Drop the microbatches in flight (an aborted step)."""
        self._kept.clear()
        self._later.clear()
        self._is_last = False

    def _by_autograd(self, parameter: torch.nn.Parameter) -> None:
        """Told of parameters whose gradients are deferred as well, though nothing was added to them."""
        if self._deferral is None or not self._deferral.serves(parameter):
            self._accumulated(parameter)

    def _accumulated(self, parameter: torch.nn.Parameter) -> None:
        """A gradient has been added to."""
        if self._is_last and self._on_gradient is not None:
            self._on_gradient(parameter)

    def _run(
        self, step: int, chance: int, batch: Batch, hidden: torch.Tensor | None, num_targets: int
    ) -> tuple[torch.Tensor, float | None]:
        output = self.module.forward_layers(hidden, batch, seeds=DropoutSeeds(self._run_seed, step, chance))
        if not self.module.is_last:
            return output, None
        loss_sum = self.module.loss_sum(output, batch)
        return loss_sum / num_targets, float(loss_sum.detach())
