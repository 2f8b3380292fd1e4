"""The learning rate of each step. Pure arithmetic over the run file's [train] section."""

from __future__ import annotations

import math

from pipecomp.config import TrainConfig


def num_warmup_steps(train: TrainConfig, total_steps: int) -> int:
    """`warmup_steps` if given, else `warmup_ratio` of all steps, rounded up (as the Hugging Face trainer does)."""
    return train.warmup_steps or math.ceil(train.warmup_ratio * total_steps)


def learning_rate(train: TrainConfig, step: int, total_steps: int) -> float:
    """The rate of `step` (1 .. total_steps), the same numbers as the Hugging Face trainer's schedulers give.

    With w warm-up steps and k = step - 1: k / w of the peak while k < w; then constant, or falling to 0 at `total_steps`
    along a line or half a cosine.
    """
    taken = step - 1
    warmup = num_warmup_steps(train, total_steps)
    if taken < warmup:
        return train.learning_rate * (taken / warmup)
    progress = (taken - warmup) / max(1, total_steps - warmup)
    if train.lr_scheduler_type == "linear":
        return train.learning_rate * max(0.0, 1.0 - progress)
    if train.lr_scheduler_type == "cosine":
        return train.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return train.learning_rate
