"""When the warm-up of quantized Adam ends: pure. Knows how large second moments are after each step; no worker.

    step       1 ... least            ... until the sum of all second moments, bias-corrected, has changed by at most 4 % over
               |  AdamW, always  |        the last `window` steps: that step is the last one of AdamW
    least      the learning rate's own warm-up, the window, and 15 % of all steps, whichever is longest
    window     1 / (1 - beta2) steps, or a twentieth of all where that is shorter

Frozen while it still grows or falls, the second moment would scale all later steps wrongly; frozen never, nothing is wrong but
that gradients are exchanged instead of momenta.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021: a ratio of at
least 0.96 over 1 / (1 - beta2) steps, and warm-ups of 13 to 23 % of all steps.
"""

from __future__ import annotations

import math
from collections import deque

from coordinator.rates import num_warmup_steps
from pipecomp.config import TrainConfig

STEADY = 0.04
LEAST_PART = 0.15
WINDOW_PART = 0.05


class WarmUp:
    """Of one run. Steps are counted as they are committed: one that was aborted told nothing."""

    def __init__(self, train: TrainConfig, total_steps: int) -> None:
        self._is_wanted = train.optim == "quantized_adam"
        self._given = train.optim_warmup_steps
        self._window = max(1, min(math.ceil(1 / (1 - train.adam_beta2)), math.ceil(WINDOW_PART * total_steps)))
        least = max(num_warmup_steps(train, total_steps), math.ceil(LEAST_PART * total_steps))
        self._least = least + self._window
        self._sums: deque[float] = deque(maxlen=self._window + 1)
        self._num_heard = 0
        self.num_steps: int | None = None
        """How many steps it took; None while it lasts, or where there is none."""

    def hear(self, second_moment: float) -> None:
        """The sum of all second moments after one more committed step."""
        self._num_heard += 1
        self._sums.append(second_moment)

    def ends_with(self, num_committed: int) -> bool:
        """Whether the step that is decided now, after so many committed ones, is the last of the warm-up. True once only."""
        if not self._is_wanted or self.num_steps is not None:
            return False
        if self._given is not None:
            ends = num_committed + 1 >= self._given
        else:
            ends = self._num_heard >= self._least and self.change is not None and self.change <= STEADY
        if ends:
            self.num_steps = num_committed + 1
        return ends

    @property
    def change(self) -> float | None:
        """By what part the sum has changed over the last window of steps; None while that is not known."""
        if len(self._sums) <= self._window or not self._sums[0] > 0:
            return None
        return abs(self._sums[-1] / self._sums[0] - 1)
