"""The tables of docs/convergence.md about quality, made from the result's file. Knows rows and Markdown; trains nothing.

    python -m pipecomp.experiments.quality_tables        writes them between their marks
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipecomp.experiments import tables
from pipecomp.experiments.quality import RESULTS
from pipecomp.experiments.quality_bars import Medians, head, table
from pipecomp.experiments.quality_cells import WORKLOADS, Workload, count_epochs
from pipecomp.results import Row

DOCUMENT = Path("docs/convergence.md")
MARK = "quality"


def filled(document: str, outcome: Row, workloads: Sequence[Workload] = WORKLOADS) -> str:
    """`document` with every block between `<!-- quality: NAME -->` and `<!-- end -->` made anew; NAME is a workload or `bars`."""
    medians = Medians(outcome["rows"], workloads)
    by_key = {workload.key: workload for workload in workloads}

    def make(name: str) -> str:
        return tables.bars_table(outcome) if name == "bars" else _workload(medians, by_key[name])

    return tables.filled(document, MARK, make)


def _workload(medians: Medians, workload: Workload) -> str:
    body = table(medians, workload)
    text = f"({workload.key}) {workload.title}: {_sizes(workload)}\n\n"
    return text + tables.markdown(head(medians, workload), body)


def _sizes(workload: Workload) -> str:
    data, train = workload.run["data"], workload.run["train"]
    words = [f"{count_epochs(epochs)} with {count} {'seed' if count == 1 else 'seeds'}" for epochs, count in workload.grid]
    length = ("{} tokens each" if data.get("packing") else "{} tokens at most").format(data["max_length"])
    return (
        f"{data['max_train_samples']:,} samples of {length}, {data['max_eval_samples']:,} held out; AdamW "
        f"{train['learning_rate']:g}, batches of {train['batch_size']}; {', '.join(words)}."
    )


def main() -> int:
    """Fill the document in the current folder."""
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), tables.read(RESULTS)), encoding="utf-8")
    sys.stdout.write(f"written to {DOCUMENT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
