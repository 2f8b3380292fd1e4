"""A launch of the synthetic model: the ordinary coordinator, workers and sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SYNTHETIC = '{model_type = "synthetic", n_layer = 2, n_embd = 64, n_positions = 32, vocab_size = 1024}'


def test_a_synthetic_model_trains_and_the_summary_counts_its_bytes(launched: Callable[..., Any]) -> None:
    run = launched(
        f"model.config={SYNTHETIC}",
        "data.packing=true",
        "data.max_train_samples=16",
        "data.max_eval_samples=0",
        "train.num_train_epochs=2",
        'compression.forward={codec = "delta", bits = 3, group = 64}',
        'compression.backward={codec = "uniform", bits = 6, group = 64}',
    )
    assert run.exit_status(60.0) == 0, run.output
    summary = run.summary
    num_values = 2 * 16 * 32 * 64  # epochs, samples, rows, columns; one link
    assert summary["steps"] == 8
    assert [summary["traffic"][kind]["values"] for kind in ("forward", "backward")] == [num_values, num_values]
    (link,) = summary["links"].values()
    forward = link["forward"]
    assert (forward["first_visits"], forward["samples"], forward["fallbacks"]) == (16, 32, 0)
    assert summary["last_train_loss"] > 0
