"""The benchmark `pipecomp bench gradients`: what compressing the gradients of replicas costs, and what it saves. Knows parts,
rows and one result file; what is measured, and how, is the parts' own.

    python -m pipecomp.experiments.gradients        writes the tables of documents between their marks
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipecomp import results
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments import gradients_ddp, gradients_quality, gradients_replay, tables
from pipecomp.experiments.gradients_part import Part, Table
from pipecomp.experiments.kept import KeptRows
from pipecomp.results import Row

COMMAND, RESULTS = "pipecomp bench gradients", Path("docs/results/gradients.json")
DOCUMENTS = (Path("docs/convergence.md"), Path("docs/performance.md"))
MARK = "gradients"
PARTS: Sequence[Part] = (gradients_quality.part(), gradients_replay.part(), gradients_ddp.part())
BARS = "bars"
"""A part's bars stand in documents under its key, then this."""


def run(*, json: bool = False, parts: str | None = None, path: Path = RESULTS, available: Sequence[Part] = PARTS) -> Row:
    """Measure every cell that has no figures yet, print tables and bars, and return the result.

    Args:
        json: keep each cell's figures in `path` as soon as it ends, and skip cells that are there with the same settings.
        parts: keys of some parts, with commas between; None: all.

    Raises:
        ConfigError: no such part, or one that was asked for and cannot be measured here.
        PipecompError: cells failed, after all others have ended.
    """
    settings = {part.key: _settings(part, parts is not None) for part in _chosen(parts, available)}
    kept = _kept(path if json else None, settings, available)
    failures = []
    for part in available:
        wanted = settings.get(part.key, {})
        missing = [cell for cell in wanted if (part.key, cell) not in kept.rows]
        if wanted:
            _say(f"{part.key}: {len(wanted)} cells, {len(wanted) - len(missing)} of them there already")

        def keep(cell: str, figures: Row, key: str = part.key, wanted: Mapping[str, str] = wanted) -> None:
            kept.add((key, cell), {"part": key, "cell": cell, "settings": wanted[cell], **figures})

        failures += part.measure(missing, keep) if missing else []
    outcome = kept.finish()
    _say(report(outcome, available))
    if failures:
        raise PipecompError("\n".join([f"{len(failures)} cells failed; the figures of the others are kept", *failures]))
    return outcome


def _chosen(parts: str | None, available: Sequence[Part]) -> list[Part]:
    keys = [part.key for part in available]
    wanted = keys if parts is None else [word.strip() for word in parts.split(",")]
    unknown = [key for key in wanted if key not in keys]
    if unknown:
        raise ConfigError(f"--parts: there is no {unknown[0]!r}; there are: {', '.join(keys)}")
    return [part for part in available if part.key in wanted]


def _settings(part: Part, is_asked_for: bool) -> Mapping[str, str]:
    try:
        return part.settings()
    except ConfigError as error:
        if is_asked_for:
            raise
        _say(f"left out: {part.key}: {error}")
        return {}


def _kept(path: Path | None, settings: Mapping[str, Mapping[str, str]], available: Sequence[Part]) -> KeptRows[tuple[str, str]]:
    """The figures so far. Those of parts that were not chosen stay as they are."""
    places = {(part.key, cell): (index, place) for index, part in enumerate(available) for place, cell in enumerate(part.cells)}

    def key_of(row: Row) -> tuple[str, str] | None:
        key = (row["part"], row["cell"])
        return key if key in places else None

    return KeptRows(
        path,
        COMMAND,
        key_of=key_of,
        order=places.__getitem__,
        wanted={(key, cell): value for key, cells in settings.items() for cell, value in cells.items()},
        bars=lambda rows: [bar for part in available for bar in part.bars(_own(part, rows))],
    )


def _own(part: Part, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["part"] == part.key]


def report(outcome: Row, available: Sequence[Part] = PARTS) -> str:
    """Tables and bars for a console."""
    lines: list[str] = []
    for part in available:
        for table in part.tables(_own(part, outcome["rows"])).values():
            lines += _aligned(table)
    return "\n".join([*lines, "", *results.verdicts(outcome["bars"])])


def _aligned(table: Table) -> list[str]:
    if not table.lines:
        return []
    lines = [table.heads, *table.lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return ["", table.title, *text]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------------------- documents


def filled(document: str, outcome: Row, available: Sequence[Part] = PARTS) -> str:
    """`document` with every block between `<!-- gradients: NAME -->` and `<!-- end -->` made anew; NAME is that of a part's
    table, or a part's key and `-bars`."""
    blocks: dict[str, str] = {}
    for part in available:
        rows = _own(part, outcome["rows"])
        blocks[f"{part.key}-{BARS}"] = tables.bars_table({"bars": part.bars(rows)})
        for name, table in part.tables(rows).items():
            blocks[name] = f"{table.title}\n\n{tables.markdown(table.heads, table.lines)}"
    return tables.filled(document, MARK, blocks.__getitem__)


def main() -> int:
    """Fill the documents in the current folder."""
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8"), tables.read(RESULTS)), encoding="utf-8")
        sys.stdout.write(f"written to {document}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
