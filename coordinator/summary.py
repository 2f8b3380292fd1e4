"""The end of a run in one JSON object, and as a table for people. Knows the ledger; no sockets and no files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.ledger import KindTraffic, Ledger, LinkError
from coordinator.shares import time_lines, time_of
from pipecomp.protocol.messages import StoreMeter, Traffic
from pipecomp.types import Kind

FP32_NBYTES = 4


def make_summary(
    ledger: Ledger,
    own_traffic: Iterable[Traffic],
    *,
    wall_time_s: float,
    stopped_early: bool,
    cause: str,
    prediction: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `--summary FILE` holds. Times in seconds, sizes in bytes; null where nothing was measured, or predicted."""
    traffic = ledger.traffic(own_traffic)
    times = ledger.step_times_s
    evaluations = ledger.evaluations
    before = evaluations[0] if evaluations and evaluations[0].step == 0 else None
    after = evaluations[-1] if evaluations and (evaluations[-1].step or not ledger.num_steps) else None
    return {
        "steps": ledger.num_steps,
        "samples": ledger.num_samples,
        "tokens": ledger.num_tokens,
        "train_loss": statistics.fmean(ledger.losses) if ledger.losses else None,
        "last_train_loss": ledger.losses[-1] if ledger.losses else None,
        "initial_eval_loss": before.loss if before is not None else None,
        "eval_loss": after.loss if after is not None else None,
        "eval_samples": evaluations[-1].size.samples if evaluations else 0,
        "initial_eval_accuracy": before.accuracy if before is not None else None,
        "eval_accuracy": after.accuracy if after is not None else None,
        "evaluations": [
            {"step": one.step, "loss": one.loss, "accuracy": one.accuracy, "time_s": one.time_s} for one in evaluations
        ],
        "step_time_s": statistics.median(times) if times else None,
        "tokens_per_s": ledger.num_tokens / sum(times) if times and sum(times) > 0 else None,
        "wall_time_s": wall_time_s,
        "prediction": None if prediction is None else dict(prediction),
        "traffic": {kind.value: _traffic_row(row) for kind, row in traffic.items()},
        "links": links_of(ledger.links),
        "stores": stores_of(ledger.stores),
        "workers": _workers(ledger),
        "time": {worker: time_of(times) for worker, times in ledger.times.items()},
        "second_moments_frozen_after_step": ledger.frozen_after,
        "aborted_steps": [{"step": one.step, "reason": one.reason} for one in ledger.aborted],
        "stopped_early": stopped_early,
        "model_folder": ledger.model_folder or None,
        "error": cause or None,
    }


def _traffic_row(row: KindTraffic) -> dict[str, Any]:
    bits = 8 * row.nbytes / row.values if row.values else None
    return {
        "values": row.values,
        "payload_bytes": row.payload_nbytes,
        "header_bytes": row.header_nbytes,
        "bits_per_value": bits,
        "ratio_to_fp32": bits / (8 * FP32_NBYTES) if bits is not None else None,
    }


def links_of(errors: Mapping[tuple[str, Kind], LinkError]) -> dict[str, dict[str, Any]]:
    """Errors and visits by link and kind."""
    links: dict[str, dict[str, Any]] = {}
    for (link, kind), error in sorted(errors.items()):
        links.setdefault(link, {})[kind.value] = {
            "relative_error": error.relative_error,
            "delta_ratio": error.delta_ratio,
            "first_visits": error.first_visits,
            "fallbacks": error.fallbacks,
            "samples": error.samples,
        }
    return links


def stores_of(meters: Mapping[tuple[str, str], StoreMeter]) -> dict[str, dict[str, Any]]:
    """What each end's store did since the start, and holds now."""
    stores: dict[str, dict[str, Any]] = {}
    for (link, end), meter in sorted(meters.items()):
        stores.setdefault(link, {})[end] = {
            "hits": meter.hits,
            "misses": meter.misses,
            "lost": meter.lost,
            "healed": meter.healed,
            "disk_reads": meter.disk_reads,
            "wait_s": meter.wait_s,
            "memory_bytes": meter.memory_nbytes,
            "disk_bytes": meter.disk_nbytes,
        }
    return stores


def _workers(ledger: Ledger) -> dict[str, dict[str, Any]]:
    return {
        worker: {
            "num_parameters": loaded.num_parameters,
            "num_trainable": loaded.num_trainable,
            "peak_memory_bytes": ledger.peak_memory_nbytes.get(worker, 0),
            "message_bytes": ledger.message_nbytes.get(worker, 0),
        }
        for worker, loaded in sorted(ledger.loaded.items())
    }


# ---------------------------------------------------------------- for people


def format_summary(summary: Mapping[str, Any]) -> str:
    """The final table: results, then traffic by kind, then each link's errors, then memory."""
    return "\n\n".join(
        part
        for part in (
            _results(summary),
            _traffic_table(summary),
            _links_table(summary),
            _stores_table(summary),
            _workers_table(summary),
            time_lines(summary["time"]),
        )
        if part
    )


def _results(summary: Mapping[str, Any]) -> str:
    frozen = summary["second_moments_frozen_after_step"]
    rows = [
        ("steps", f"{summary['steps']} ({summary['samples']} samples, {summary['tokens']} tokens)"),
        ("train loss, mean", _number(summary["train_loss"], ".4f")),
        ("held-out loss", _eval_text(summary, "loss")),
        *([] if summary["eval_accuracy"] is None else [("accuracy", _eval_text(summary, "accuracy"))]),
        ("step, median", _number(summary["step_time_s"], ".3f", " s") + _planned(summary["prediction"])),
        ("tokens/s", _number(summary["tokens_per_s"], ".0f")),
        ("wall time", _number(summary["wall_time_s"], ".1f", " s")),
        ("aborted steps", str(len(summary["aborted_steps"]))),
        *([] if frozen is None else [("warm-up of quantized_adam", f"{frozen} steps")]),
        ("model", summary["model_folder"] or "not saved"),
    ]
    if summary["stopped_early"]:
        rows.append(("ended", "before its last step"))
    return format_grid([list(row) for row in rows], align="<<")


def _planned(prediction: Mapping[str, Any] | None) -> str:
    return "" if prediction is None else f" (planned {prediction['step_time_s']:.3f} s: {prediction['bound']})"


def _eval_text(summary: Mapping[str, Any], measure: str) -> str:
    end = _number(summary[f"eval_{measure}"], ".4f")
    start = summary[f"initial_eval_{measure}"]
    return end if start is None else f"{end} (before training {start:.4f})"


def _traffic_table(summary: Mapping[str, Any]) -> str:
    rows = [["traffic", "values", "payload", "headers", "bits/value", "of fp32"]]
    for kind in Kind:
        row = summary["traffic"][kind.value]
        rows.append(
            [
                kind.value,
                f"{row['values']:,}",
                format_nbytes(row["payload_bytes"]),
                format_nbytes(row["header_bytes"]),
                _number(row["bits_per_value"], ".2f"),
                _number(row["ratio_to_fp32"], ".1%"),
            ]
        )
    return format_grid(rows, align="<>>>>>")


def _links_table(summary: Mapping[str, Any]) -> str:
    rows = [["link", "kind", "relative error", "|a-m|/|a|", "first visits", "sent afresh"]]
    for link, kinds in summary["links"].items():
        for kind, row in kinds.items():
            rows.append(
                [
                    link,
                    kind,
                    _number(row["relative_error"], ".2e"),
                    _number(row["delta_ratio"], ".4f"),
                    *_visits(row, has_messages=row["delta_ratio"] is not None or kind == "forward"),
                ]
            )
    return format_grid(rows, align="<<>>>>") if len(rows) > 1 else ""


def _visits(row: Mapping[str, Any], *, has_messages: bool) -> tuple[str, str]:
    if not has_messages:
        return "-", "-"
    return f"{row['first_visits']} of {row['samples']}", str(row["fallbacks"])


def _stores_table(summary: Mapping[str, Any]) -> str:
    rows = [["messages of", "end", "found", "missed", "lost", "healed", "waited", "memory", "disk"]]
    for link, ends in summary["stores"].items():
        for end, row in ends.items():
            rows.append(
                [
                    link,
                    end,
                    str(row["hits"]),
                    str(row["misses"]),
                    str(row["lost"]),
                    str(row["healed"]),
                    _number(row["wait_s"], ".2f", " s"),
                    format_nbytes(row["memory_bytes"]),
                    format_nbytes(row["disk_bytes"]),
                ]
            )
    return format_grid(rows, align="<<>>>>>>>") if len(rows) > 1 else ""


def _workers_table(summary: Mapping[str, Any]) -> str:
    rows = [["worker", "parameters", "trained", "peak memory", "messages"]]
    for worker, row in summary["workers"].items():
        rows.append(
            [
                worker,
                f"{row['num_parameters']:,}",
                f"{row['num_trainable']:,}",
                format_nbytes(row["peak_memory_bytes"]),
                format_nbytes(row["message_bytes"]),
            ]
        )
    return format_grid(rows, align="<>>>>") if len(rows) > 1 else ""


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit


def format_nbytes(nbytes: float) -> str:
    """1536 -> `1.5 kB`; decimal units, as link rates have."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def format_duration(seconds: float) -> str:
    """`1:02:03`, or `2:03` under an hour."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_grid(rows: list[list[str]], *, align: str) -> str:
    """Columns of equal width, `<` or `>` for each."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
