"""The tables of docs/convergence.md about quality, made from the result's file. Knows rows and Markdown; trains nothing.

    python -m pipecomp.experiments.quality_tables        writes them between their marks
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipecomp.experiments.quality import RESULTS
from pipecomp.experiments.quality_bars import Medians, head, table
from pipecomp.experiments.quality_cells import WORKLOADS, Workload, count_epochs

DOCUMENT = Path("docs/convergence.md")
_BLOCK = re.compile(r"(<!-- quality: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet."
Row = dict[str, Any]


def filled(document: str, outcome: Row, workloads: Sequence[Workload] = WORKLOADS) -> str:
    """`document` with every block between `<!-- quality: NAME -->` and `<!-- end -->` made anew; NAME is a workload or `bars`."""
    medians = Medians(outcome["rows"], workloads)
    by_key = {workload.key: workload for workload in workloads}

    def block(match: re.Match[str]) -> str:
        name = match[2]
        body = _bars(outcome) if name == "bars" else _workload(medians, by_key[name])
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(block, document)


def read(path: Path) -> Row:
    """A result, or an empty one where there is none yet."""
    outcome: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "bars": []}
    return outcome


def _workload(medians: Medians, workload: Workload) -> str:
    body = table(medians, workload)
    text = f"({workload.key}) {workload.title}: {_sizes(workload)}\n\n"
    return text + (_markdown(head(medians, workload), body) if body else NOT_MEASURED)


def _sizes(workload: Workload) -> str:
    data, train = workload.run["data"], workload.run["train"]
    words = [f"{count_epochs(epochs)} with {count} {'seed' if count == 1 else 'seeds'}" for epochs, count in workload.grid]
    length = ("{} tokens each" if data.get("packing") else "{} tokens at most").format(data["max_length"])
    return (
        f"{data['max_train_samples']:,} samples of {length}, {data['max_eval_samples']:,} held out; AdamW "
        f"{train['learning_rate']:g}, batches of {train['batch_size']}; {', '.join(words)}."
    )


def _bars(outcome: Row) -> str:
    if not outcome["bars"]:
        return NOT_MEASURED
    verdicts = {True: "yes", False: "**no**"}
    lines = [[bar["name"], f"{bar['value']:g}", f"{bar['bar']:g}", verdicts[bar["holds"]]] for bar in outcome["bars"]]
    return _markdown(["figure", "value", "asked", "holds"], lines)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(heads), ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Fill the document in the current folder."""
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), read(RESULTS)), encoding="utf-8")
    sys.stdout.write(f"written to {DOCUMENT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
