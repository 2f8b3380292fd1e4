"""All gradients of one worker as one row of values, cut into buckets and pieces. Knows parameters; no codec, no sockets.

The row begins with what a backward pass completes first: the parameters of the last layer, in reverse order of definition.

    row        | head ... | layer 5 ... | layer 4 ... | ...  | embedding |
    buckets    |------ 0 -------|------ 1 -------|------ 2 -------|- 3 --|        one piece for each replica
    pieces     |  of 0  |  of 1 |  of 0  |  of 1 |  of 0  |  of 1 |0 | 1 |        replica that adds it up

Nothing is copied but what lies across two parameters. Every replica has the same row, so that they cut it alike.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

PIECE = 1 << 20
"""Values of a full piece: 4 MiB in fp32."""
ALIGNMENT = 256
"""All pieces but a row's last hold a multiple of so many values, so that quantizers' groups are whole."""


class Piece(NamedTuple):
    """A stretch of the row that one replica adds up."""

    owner: int  # replica
    start: int
    num_values: int


class Bucket(NamedTuple):
    """What is exchanged together, once the gradients of all its parameters are there."""

    pieces: tuple[Piece, ...]  # at most one a replica, in their order; an empty one is left out
    parameters: range  # positions in the row

    def piece(self, owner: int) -> Piece | None:
        return next((piece for piece in self.pieces if piece.owner == owner), None)


def make_readable(parameter: torch.nn.Parameter) -> None:
    """Give a parameter a gradient to read from and write to, of zeros where it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()


class GradientRow:
    """The gradients of `parameters`, which are fp32 and in order of definition."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = tuple(reversed(parameters))
        self._ends = list(itertools.accumulate(parameter.numel() for parameter in self.parameters))
        self.num_values = self._ends[-1] if self._ends else 0
        self.held: list[torch.Tensor] | None = None
        """What the row is of in place of its parameters' own gradients, by parameter."""

    def buckets(self, num_replicas: int, piece: int = PIECE) -> Iterator[Bucket]:
        """The row in stretches of `piece` values a replica; what is left is shared out evenly."""
        for start in range(0, self.num_values, piece * num_replicas):
            size = min(piece * num_replicas, self.num_values - start)
            share = -(-size // (num_replicas * ALIGNMENT)) * ALIGNMENT
            bounds = [min(start + share * replica, start + size) for replica in range(num_replicas + 1)]
            pieces = (Piece(owner, a, b - a) for owner, (a, b) in enumerate(itertools.pairwise(bounds)))
            first, last = (bisect.bisect_right(self._ends, place) for place in (start, start + size - 1))
            yield Bucket(tuple(p for p in pieces if p.num_values), range(first, last + 1))

    def take(self) -> list[torch.Tensor]:
        """Gradients out of their parameters, which have none then; they are readable."""
        gradients = []
        for parameter in self.parameters:
            assert parameter.grad is not None, "make_readable comes first"
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def release(self) -> None:
        """What is held becomes the parameters' gradients."""
        for parameter, gradient in zip(self.parameters, self.held or (), strict=True):
            parameter.grad = gradient
        self.held = None

    def read(self, piece: Piece) -> torch.Tensor:
        """(1, num_values) fp32; a view where the piece lies within one parameter."""
        parts = [flat[start:end] for flat, start, end in self._parts(piece)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(1, -1)

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        """Replace the piece's gradients by (1, num_values) fp32."""
        flat, done = values.view(-1), 0
        for target, start, end in self._parts(piece):
            target[start:end] = flat[done : done + end - start]
            done += end - start

    def _parts(self, piece: Piece) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Of each parameter that the piece touches: its flat gradient, and from where to where."""
        place, end = piece.start, piece.start + piece.num_values
        index = bisect.bisect_right(self._ends, place)
        while place < end:
            gradient = self.parameters[index].grad if self.held is None else self.held[index]
            assert gradient is not None, "make_readable comes first"
            begin, stop = self._ends[index] - gradient.numel(), min(self._ends[index], end)
            if stop > place:
                yield gradient.view(-1), place - begin, stop - begin
            place, index = max(place, stop), index + 1
