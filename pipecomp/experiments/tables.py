"""Tables of documents that are made from results: between marks, in Markdown. Knows text and results; no benchmark.

    <!-- MARK: NAME -->
    what stands here is made anew
    <!-- end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pipecomp.results import Row

NOT_MEASURED = "Not measured yet."


def filled(document: str, mark: str, make: Callable[[str], str]) -> str:
    """`document` with what stands between each `<!-- MARK: NAME -->` and its `<!-- end -->` replaced by `make(NAME)`."""
    block = re.compile(rf"(<!-- {mark}: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{make(match[2])}\n\n{match[3]}", document)


def read(path: Path) -> Row:
    """A result, or an empty one where there is none yet."""
    outcome: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "bars": []}
    return outcome


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; a note that there is nothing yet where there are no lines."""
    if not lines:
        return NOT_MEASURED
    rows = [list(heads), ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def bars_table(outcome: Row) -> str:
    """What is asked of the figures, and whether it holds."""
    verdicts = {True: "yes", False: "**no**"}
    lines = [[bar["name"], f"{bar['value']:g}", f"{bar['bar']:g}", verdicts[bar["holds"]]] for bar in outcome["bars"]]
    return markdown(["figure", "value", "asked", "holds"], lines)
