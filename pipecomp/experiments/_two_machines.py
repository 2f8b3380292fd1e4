"""A small problem cut over two machines, and many runs of it side by side. Knows arrays and codecs; no ladder, no file.

    machine a   h = tanh(A x)                         sends Q(h - m) forward; both ends: m += Q(h - m)
    machine b   F = log cosh(B . m - y)               sends Q(dF/dm) backward
    objective   f(A, B) = mean of F over all samples, with h in the place of m

Rows are runs: each has its own start, its own order of samples and its own messages, and shares each call of a codec with
the others (a group of values never holds two rows, so no run feels another's). Weights are fp64; what crosses is fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pipecomp import registry
from pipecomp.codecs.base import Codec
from pipecomp.errors import MessageMismatch
from pipecomp.runtime.seeds import derive_seed
from pipecomp.types import TensorSpec

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Problem(NamedTuple):
    """N samples with noisy labels; fewer weights than samples, so no weights fit them all."""

    inputs: Array  # (N, D), the last column is 1
    targets: Array  # (N,)
    num_hidden: int


def make_problem(
    num_samples: int = 512, num_inputs: int = 8, num_hidden: int = 32, noise: float = 0.5, seed: int = 0
) -> Problem:
    """Labels are a random network of 8 tanh units, scaled to a variance of 1, plus normal noise of this standard deviation."""
    chance = np.random.default_rng(seed)
    inputs = chance.standard_normal((num_samples, num_inputs))
    inputs[:, -1] = 1.0
    teacher = np.tanh(inputs @ chance.standard_normal((num_inputs, 8))) @ chance.standard_normal(8)
    targets = (teacher - teacher.mean()) / teacher.std() + noise * chance.standard_normal(num_samples)
    return Problem(inputs, targets, num_hidden)


class Weights(NamedTuple):
    """Of S runs. Machine a holds `first`, machine b `second`; both are updated in place."""

    first: Array  # (S, H, D)
    second: Array  # (S, H)


def start(problem: Problem, runs: range) -> Weights:
    """Standard deviation 1 / sqrt(fan-in), as is usual."""
    num_inputs, num_hidden = problem.inputs.shape[1], problem.num_hidden
    draws = [np.random.default_rng(derive_seed("start", run)) for run in runs]
    first = np.stack([draw.standard_normal((num_hidden, num_inputs)) for draw in draws]) / np.sqrt(num_inputs)
    second = np.stack([draw.standard_normal(num_hidden) for draw in draws]) / np.sqrt(num_hidden)
    return Weights(first, second)


def full_gradient(problem: Problem, weights: Weights) -> tuple[Array, Array]:
    """(S,) |grad f|^2 over all weights of both machines, and (S,) f: exact, over all samples, with nothing compressed."""
    hidden = np.tanh(weights.first @ problem.inputs.T)  # (S, H, N)
    residual = (weights.second[:, None, :] @ hidden)[:, 0] - problem.targets  # (S, N)
    slope = np.tanh(residual) / len(problem.targets)
    second = (hidden @ slope[:, :, None])[:, :, 0]
    np.multiply(hidden, hidden, out=hidden)
    np.subtract(1.0, hidden, out=hidden)
    hidden *= weights.second[:, :, None]
    hidden *= slope[:, None, :]
    first = hidden @ problem.inputs  # (S, H, D)
    squares = np.square(first).sum(axis=(1, 2)) + np.square(second).sum(axis=1)
    return squares, _log_cosh(residual).mean(axis=1)


def _log_cosh(residual: Array) -> Array:
    size = np.abs(residual)
    return np.asarray(size + np.log1p(np.exp(-2 * size)) - np.log(2))


class RelativeError:
    """c_Q as the analysis has it, |x - Q(x)| / |x| a vector: root of the mean square over the vectors looked at."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._num = 0

    def add(self, values: npt.NDArray[np.float32], seen: npt.NDArray[np.float32]) -> None:
        """Both (n, H): what was to be sent, and what arrived."""
        size = np.square(values, dtype=np.float64).sum(axis=1)
        error = np.square(values.astype(np.float64) - seen).sum(axis=1)
        self._sum += float((error[size > 0] / size[size > 0]).sum())
        self._num += int((size > 0).sum())

    @property
    def value(self) -> float | None:
        return float(np.sqrt(self._sum / self._num)) if self._num else None


class Link:
    """One link for S runs side by side: the codecs of both directions, and the messages m(xi) of either end."""

    def __init__(self, forward: Codec, backward: Codec, shape: tuple[int, int, int], purpose: str) -> None:
        """`shape`: runs, samples, values of an activation. `purpose` names what the seeds of rounding are for."""
        num_runs, _, width = shape
        self.forward, self.backward, self.purpose = forward, backward, purpose
        self.spec = TensorSpec(num_runs, width)
        self.sent = np.zeros(shape, np.float32)  # machine a's messages
        self.received = np.zeros(shape, np.float32)  # machine b's
        self.is_known = np.zeros(shape[:2], np.bool_)
        self.forward_error, self.backward_error = RelativeError(), RelativeError()
        self._runs = np.arange(num_runs)
        self._unknown = num_runs * shape[1]
        for codec in (forward, backward):
            codec.warm_up(width)
        self._buffers = {
            (codec, first): np.empty(codec.encoded_nbytes(self.spec, first_visit=first), np.uint8)
            for codec in (forward, backward)
            for first in (False, True)
        }

    def send_forward(self, step: int, samples: Indices, activations: Array, *, is_measured: bool) -> Array:
        """(S, H) fp64: what machine b computes with, for each run's sample."""
        values = torch.from_numpy(activations.astype(np.float32))
        seed = derive_seed(self.purpose, step, 0)
        if not self.forward.has_messages:
            seen, _ = self._cross(self.forward, values, None, None, seed)
            if is_measured:
                self.forward_error.add(values.numpy(), seen)
            return seen.astype(np.float64)
        at = (self._runs, samples)
        before = self.sent[at]
        new, seen_by_a = self._cross(self.forward, values, torch.from_numpy(before), torch.from_numpy(self.received[at]), seed)
        if self._unknown:
            known = self.is_known[at]
            first, first_by_a = self._cross(self.forward, values, None, None, seed)
            new, seen_by_a = np.where(known[:, None], new, first), np.where(known[:, None], seen_by_a, first_by_a)
            self.is_known[at] = True
            self._unknown -= int((~known).sum())
            if is_measured:
                self.forward_error.add((values.numpy() - before)[known], (seen_by_a - before)[known])
        elif is_measured:
            self.forward_error.add(values.numpy() - before, seen_by_a - before)
        self._remember(at, seen_by_a, new)
        return new.astype(np.float64)

    def send_backward(self, step: int, gradients: Array, *, is_measured: bool) -> Array:
        """(S, H) fp64: what machine a computes with."""
        values = torch.from_numpy(gradients.astype(np.float32))
        seen, _ = self._cross(self.backward, values, None, None, derive_seed(self.purpose, step, 1))
        if is_measured:
            self.backward_error.add(values.numpy(), seen)
        return seen.astype(np.float64)

    def check_agreement(self) -> None:
        """MessageMismatch unless both ends hold the same bits for every sample of every run."""
        differs = (self.sent != self.received).any(axis=2)
        if differs.any():
            run, sample = np.argwhere(differs)[0]
            raise MessageMismatch(
                f"the two machines remember different messages for {int(differs.sum())} samples, "
                f"the first is sample {sample} of run {run}"
            )

    def _cross(
        self, codec: Codec, values: torch.Tensor, sent: torch.Tensor | None, received: torch.Tensor | None, seed: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """What the receiver decodes, and what the sender believes that it does."""
        buffer = self._buffers[codec, sent is None]
        believed = codec.encode(values, sent, seed=seed, out=buffer)
        decoded = codec.decode(buffer, received, self.spec).values.numpy()
        return decoded, decoded if believed is None else believed.numpy()

    def _remember(
        self, at: tuple[Indices, Indices], sent: npt.NDArray[np.float32], received: npt.NDArray[np.float32]
    ) -> None:
        self.sent[at], self.received[at] = sent, received


def make_codec(options: Mapping[str, object]) -> Codec:
    """From a run file's table, such as {codec = "delta", bits = 2}."""
    plugin: type[Codec] = registry.load("pipecomp.codecs", str(options["codec"]))
    return plugin.from_options({key: value for key, value in options.items() if key != "codec"})


class Trajectory(NamedTuple):
    """Of S runs."""

    mean_squared_gradient: Array  # (S,) mean of |grad f(x_t)|^2 over t = 0 .. T-1, estimated from the steps looked at
    final_loss: Array  # (S,) f after the last step
    largest_weight: float  # largest |B| seen, which bounds the gradient that crosses


def measured_steps(num_steps: int, num_measured: int) -> tuple[Indices, Indices]:
    """(M,) steps to look at and (M,) how many steps each stands for: one at random in each of M equal stretches.

    All steps, if there are no more than M. The weighted sum is an unbiased estimate of the sum over all steps.
    """
    edges = np.arange(min(num_steps, num_measured) + 1, dtype=np.int64) * num_steps // min(num_steps, num_measured)
    lengths = np.diff(edges)
    chance = np.random.default_rng(derive_seed("measured", num_steps))
    return edges[:-1] + chance.integers(0, lengths), lengths


def train(
    problem: Problem, runs: range, num_steps: int, step_size: float, link: Link | None, num_measured: int = 1000
) -> Trajectory:
    """SGD with one sample a step, drawn with replacement; without a link, nothing is compressed or rounded.

    Starts and orders depend on the run (and, orders, on T) only, so that methods are compared on the same ones.
    """
    weights = start(problem, runs)
    draws = [np.random.default_rng(derive_seed("order", run, num_steps)) for run in runs]
    order = np.stack([draw.integers(0, len(problem.targets), num_steps) for draw in draws], axis=1)  # (T, S)
    stands_for = dict(zip(*(each.tolist() for each in measured_steps(num_steps, num_measured)), strict=True))
    total, largest = np.zeros(len(runs)), 0.0
    for step in range(num_steps):
        if is_measured := step in stands_for:
            total += stands_for[step] * full_gradient(problem, weights)[0]
            largest = max(largest, float(np.linalg.norm(weights.second, axis=1).max()))
        _step(problem, weights, order[step], step_size, link, step, is_measured=is_measured)
    if link is not None:
        link.check_agreement()
    return Trajectory(total / num_steps, full_gradient(problem, weights)[1], largest)


def _step(
    problem: Problem, weights: Weights, samples: Indices, step_size: float, link: Link | None, step: int, *, is_measured: bool
) -> None:
    inputs = problem.inputs[samples]  # (S, D)
    hidden = np.tanh((weights.first @ inputs[:, :, None])[:, :, 0])  # (S, H), machine a's
    message = hidden if link is None else link.send_forward(step, samples, hidden, is_measured=is_measured)
    slope = np.tanh((weights.second * message).sum(axis=1) - problem.targets[samples])[:, None]
    gradient = slope * weights.second  # dF/dm, by the weights before their update
    np.subtract(weights.second, step_size * slope * message, out=weights.second)
    if link is not None:
        gradient = link.send_backward(step, gradient, is_measured=is_measured)
    gradient = step_size * gradient * (1.0 - hidden * hidden)
    np.subtract(weights.first, gradient[:, :, None] * inputs[:, None, :], out=weights.first)
