"""`python -m pipecomp.experiments.quantizers`: which quantizer trains best at equal bits. Knows codecs by their options.

A small GPT-2 is trained from scratch in a pipeline of four stages, once for each quantizer and seed; all else is the same. What
counts is the loss on held-out text above that of the same seeds without compression, beside the bits a value really takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pipecomp import registry, results
from pipecomp.config import parse_run_config
from pipecomp.data.tokenizer import load_tokenizer
from pipecomp.testing.local_pipeline import LocalPipeline, LocalSample
from pipecomp.types import TensorSpec

COMMAND, RESULTS = "python -m pipecomp.experiments.quantizers", Path("docs/results/quantizers.json")
EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH, NUM_TRAIN, NUM_HELD, BATCH = 64, 192, 64, 16
EPOCHS, SEEDS, STAGES, LEARNING_RATE = 6, (0, 1, 2), 4, 1e-3

Options = Mapping[str, object]
PLAIN: Options = {"codec": "identity"}
FIRST: Options = {"codec": "uniform", "bits": 4, "group": 32, "scale": "bf16"}
FORMS: Mapping[str, Options] = {
    "groups of 64, bf16": {"group": 64, "scale": "bf16"},
    "groups of 32, bf16": {"group": 32, "scale": "bf16"},
    "groups of 64, e4m3": {"group": 64, "scale": "e4m3"},
    "groups of 32, e4m3": {"group": 32, "scale": "e4m3"},
    "groups of 16, e4m3": {"group": 16, "scale": "e4m3"},
    "groups of 32, e4m3, least error": {"group": 32, "scale": "e4m3", "fit": "least_error"},
    "groups of 32, e4m3, either": {"group": 32, "scale": "e4m3", "levels": "either"},
    "groups of 64, e4m3, either": {"group": 64, "scale": "e4m3", "levels": "either"},
    "groups of 64, e4m3, either, rotated": {
        "group": 64, "scale": "e4m3", "levels": "either", "rotation": "hadamard",
    },
    "groups of 32, e4m3, mixed": {"group": 32, "scale": "e4m3", "widths": "mixed"},
    "groups of 32, e4m3, either, mixed": {"group": 32, "scale": "e4m3", "levels": "either", "widths": "mixed"},
    "groups of 32, e4m3, rotated": {"group": 32, "scale": "e4m3", "rotation": "hadamard"},
    "groups of 32, e4m3, stochastic": {"group": 32, "scale": "e4m3", "rounding": "stochastic"},
}  # fmt: skip
ALL = tuple(FORMS)
FEW = ("groups of 64, bf16", "groups of 32, e4m3", "groups of 32, e4m3, either")


MIXED = ("groups of 32, e4m3, mixed", "groups of 32, e4m3, either, mixed")


class Case(NamedTuple):
    """One quantizer in one place; the traffic of the other direction is as in all cases that it is compared with."""

    place: str  # "delta": later visits; "first visit"; "direct": uniform at every visit; "backward"
    bits: int
    form: str

    def options(self) -> Options:
        """Of the quantizer that is tried."""
        return {"codec": "delta" if self.place == "delta" else "uniform", "bits": self.bits, **FORMS[self.form]}

    def compression(self) -> dict[str, Options]:
        """The section of a run file."""
        tried = self.options()
        backward: Options = {"codec": "uniform", "bits": 4 if self.bits == 2 else 6, "group": 32, "scale": "bf16"}
        later: Options = {"codec": "delta", "bits": 3, "group": 32, "scale": "bf16"}
        match self.place:
            case "delta":
                return {"forward": {**tried, "first_visit": FIRST}, "backward": backward}
            case "first visit":
                return {"forward": {**later, "first_visit": tried}, "backward": backward}
            case "direct":
                return {"forward": tried, "backward": backward}
        return {"forward": PLAIN, "backward": tried}

    def bits_per_value(self) -> float:
        """All metadata counted, of a sample of this experiment."""
        options = {key: value for key, value in self.options().items() if key != "codec"}
        codec = registry.load("pipecomp.codecs", "uniform").from_options(options)
        spec = TensorSpec(LENGTH, _model()["n_embd"])
        return 8 * float(codec.encoded_nbytes(spec, first_visit=True)) / spec.num_values


CASES = (
    *(Case("delta", 2, form) for form in ALL),
    *(Case("delta", bits, form) for bits in (3, 4) for form in (*FEW, *MIXED)),
    *(Case("first visit", bits, "groups of 32, e4m3") for bits in (3, 4, 5)),
    *(Case("first visit", 4, form) for form in FEW if form != "groups of 32, e4m3"),
    *(Case("direct", bits, form) for bits in (1, 4, 5, 6, 7, 8) for form in FEW),
    *(Case("backward", 2, form) for form in (*FEW, *MIXED)),
    *(Case("backward", bits, form) for bits in (3, 4) for form in ("groups of 32, e4m3", *MIXED)),
)

WITHOUT = Case("none", 0, "fp32")


def run(
    *,
    path: Path = RESULTS,
    cases: Sequence[Case] = CASES,
    seeds: Sequence[int] = SEEDS,
    epochs: int = EPOCHS,
    resume: bool = False,
) -> results.Row:
    """Train every case, print a line for each, and keep the result in `path`, anew after each; return it.

    `resume`: take from `path` what it has; it must be of the same seeds and epochs.
    """
    torch.set_num_threads(1)
    train, held = _text()
    known = {_key(row): row for row in json.loads(path.read_text())["rows"]} if path.exists() and resume else {}
    plain = known[WITHOUT]["losses"] if WITHOUT in known else [
        asyncio.run(_train({"forward": PLAIN, "backward": PLAIN}, train, held, seed=seed, epochs=epochs)) for seed in seeds
    ]  # fmt: skip
    rows = {**known, WITHOUT: {"place": "none", "form": "fp32", "bits_per_value": 32.0, "losses": plain, "above_fp32": 0.0}}
    for case in cases:
        if case in known:
            continue
        losses = [asyncio.run(_train(case.compression(), train, held, seed=seed, epochs=epochs)) for seed in seeds]
        above = [loss - other for loss, other in zip(losses, plain, strict=True)]
        row = rows[case] = {
            "place": case.place,
            "bits": case.bits,
            "form": case.form,
            "bits_per_value": round(case.bits_per_value(), 3),
            "losses": losses,
            "above_fp32": round(statistics.mean(above), 4),
            "spread": round(statistics.stdev(above), 4) if len(above) > 1 else 0.0,
        }
        sys.stdout.write(
            f"{case.place:<12}{row['bits_per_value']:>6.2f}  {case.form:<44}{row['above_fp32']:+.4f} ± {row['spread']:.4f}\n"
        )
        sys.stdout.flush()
        results.write(path, _outcome(rows, cases), quiet=True)
    outcome = _outcome(rows, cases)
    results.write(path, outcome)
    return outcome


def losses_table(outcome: results.Row) -> list[str]:
    """Markdown, one row a case, by place, bits and loss."""
    places = list(dict.fromkeys(case.place for case in CASES))
    tried = [row for row in outcome["rows"] if row["place"] in places]
    tried.sort(key=lambda row: (places.index(row["place"]), row["bits"], row["bits_per_value"], row["above_fp32"]))
    lines = ["| where | bits | quantizer | R | above fp32 |", "| --- | --- | --- | --- | --- |"]
    return lines + [
        f"| {row['place']} | {row['bits']} | {row['form']} | {row['bits_per_value']:.2f} | "
        f"{row['above_fp32']:+.4f} ± {row['spread']:.4f} |"
        for row in tried
    ]


def _outcome(rows: Mapping[Case, results.Row], cases: Sequence[Case]) -> results.Row:
    """In the order of the cases; what the file had besides stays."""
    order = dict.fromkeys([WITHOUT, *cases, *rows])
    return results.result(COMMAND, [rows[case] for case in order if case in rows], [])


async def _train(
    compression: Mapping[str, Options], train: list[LocalSample], held: list[LocalSample], *, seed: int, epochs: int
) -> float:
    """Loss on held-out text after training."""
    model = _model()
    config = parse_run_config(
        {
            "model": {"config": model, "weights": "random"},
            "data": {"train": "unused", "tokenizer": "unused", "max_length": LENGTH},
            "train": {"batch_size": BATCH, "num_microbatches": 2, "seed": seed},
            "compression": {key: dict(value) for key, value in compression.items()},
        }
    )
    async with LocalPipeline(config, model, num_ranks=STAGES) as pipeline:
        for epoch in range(epochs):
            order = np.random.default_rng([seed, epoch]).permutation(len(train))
            for batch in np.split(order, range(BATCH, len(order), BATCH)):
                halves = np.array_split(batch, 2)
                await pipeline.step([[train[i] for i in half] for half in halves], learning_rate=LEARNING_RATE)
        evaluated = await pipeline.evaluate([held[at : at + BATCH] for at in range(0, len(held), BATCH)])
        return round(evaluated.loss, 5)


def _key(row: results.Row) -> Case:
    return Case(row["place"], row.get("bits", 0), row["form"])


def _model() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EXAMPLES / "demo-gpt2" / "config.json").read_text(encoding="utf-8"))
    return config | {"n_layer": 4}


def _text() -> tuple[list[LocalSample], list[LocalSample]]:
    """Samples to train on, and held-out ones: the text in pieces of LENGTH tokens, in an order of their own."""
    tokenizer = load_tokenizer(str(EXAMPLES / "demo-gpt2"))
    ids: list[int] = []
    for line in (EXAMPLES / "state-of-the-union.jsonl").read_text(encoding="utf-8").splitlines():
        ids += [*tokenizer(json.loads(line)["text"], verbose=False)["input_ids"], 0]
    pieces = [ids[at : at + LENGTH] for at in range(0, LENGTH * (NUM_TRAIN + NUM_HELD), LENGTH)]
    order = np.random.default_rng(0).permutation(len(pieces))
    samples = [LocalSample(index + 1, pieces[piece], pieces[piece]) for index, piece in enumerate(order)]
    return samples[:NUM_TRAIN], samples[NUM_TRAIN:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="run only what the result lacks")
    chosen = parser.parse_args()
    tried = run(path=chosen.json, seeds=range(chosen.seeds), epochs=chosen.epochs, resume=chosen.resume)
    sys.stdout.write("\n".join(losses_table(tried)) + "\n")
