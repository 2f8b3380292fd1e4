"""The tables of docs/performance.md, made from the result's file. Knows rows and Markdown; runs nothing.

    python -m pipecomp.experiments.links_tables        writes them between their marks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pipecomp.experiments import tables
from pipecomp.experiments.links import RESULTS
from pipecomp.experiments.links_bars import DELAY_HEAD, HEAD, RUN_HEAD, delay_table, run_table, table
from pipecomp.experiments.links_cells import SETTINGS, Setting, find_setting
from pipecomp.results import Row

DOCUMENT = Path("docs/performance.md")
MARK = "links"


def filled(document: str, outcome: Row) -> str:
    """`document` with every table made anew; a block's name is a setting, `delays`, `runs`, `machine` or `bars`."""
    rows = outcome["rows"]
    makers: dict[str, Callable[[], str]] = {
        "bars": lambda: tables.bars_table(outcome),
        "machine": lambda: _machine(outcome),
        "delays": lambda: tables.markdown(DELAY_HEAD, delay_table(rows)),
        "runs": lambda: tables.markdown(RUN_HEAD, [line for setting in SETTINGS for line in run_table(rows, setting)]),
    }

    def make(name: str) -> str:
        return makers[name]() if name in makers else _setting(outcome, find_setting(name))

    return tables.filled(document, MARK, make)


def _setting(outcome: Row, setting: Setting) -> str:
    passes = f"a stage's forward pass {1e3 * setting.forward_s:g} ms, its backward pass {1e3 * setting.backward_s:g} ms"
    passes += f", {1e3 * setting.weights_s:g} ms of it gradients of weights"
    return f"{setting.title}: {passes} ({setting.origin}).\n\n{tables.markdown(HEAD, table(outcome['rows'], setting))}"


def _machine(outcome: Row) -> str:
    """What stood for the machines and links, one line for each way there was."""
    if not outcome["rows"]:
        return tables.NOT_MEASURED
    machine = outcome["machine"]
    lines = [f"- One machine: {machine['cores']} cores ({machine['cpu']}), {machine['memory_nbytes'] / 1e9:.0f} GB of memory."]
    lines += [f"- {text[0].upper()}{text[1:]}." for text in dict.fromkeys(row["emulation"] for row in outcome["rows"])]
    return "\n".join(lines)


def main() -> int:
    """Fill the document in the current folder."""
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), tables.read(RESULTS)), encoding="utf-8")
    sys.stdout.write(f"written to {DOCUMENT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
