"""Where each worker's time went, as shares: for the summary's JSON object, and in words. Knows times; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.accounts import Times
from pipecomp.types import Kind

_LEAST_SHARE = 0.005
_WIDTH = 100
_VALUES = {
    Kind.FORWARD.value: "values",
    Kind.BACKWARD.value: "gradients",
    Kind.TIED.value: "the shared weight's gradient",
    Kind.GRADIENTS.value: "sums of gradients",
}


def time_of(times: Times) -> dict[str, Any]:
    """Shares of the time of all steps: `computing`, each of `links`, `store`, `coding`, `bubble` and `other` add up to 1."""
    total_s = times.total_s
    links = [
        {"link": wait.link, "kind": wait.kind.value, "from": wait.sender, "share": seconds / total_s}
        for wait, seconds in sorted(times.links_s.items(), key=lambda item: -item[1])
    ]
    return {
        "steps": times.num_steps,
        "step_s": total_s / times.num_steps,
        "computing": times.computing_s / total_s,
        "link": sum(times.links_s.values()) / total_s,
        "links": links,
        "store": times.store_s / total_s,
        "coding": times.coding_s / total_s,
        "bubble": times.bubble_s / total_s,
        "other": times.other_s / total_s,
    }


def time_lines(time: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence for each worker, the largest share first; empty where nothing was measured."""
    return "\n".join(_folded(f"{worker}: ", _phrases(row)) for worker, row in time.items())


def _folded(start: str, phrases: Sequence[str]) -> str:
    """Phrases with commas between them, on as many lines as it takes."""
    lines = [start]
    for index, phrase in enumerate(phrases):
        text = phrase + ("," if index < len(phrases) - 1 else "")
        if index and len(lines[-1]) + len(text) >= _WIDTH:
            lines.append(" " * len(start) + text)
        else:
            lines[-1] += text if index == 0 else f" {text}"
    return "\n".join(lines)


def _phrases(row: Mapping[str, Any]) -> list[str]:
    links = [(f"waiting for {_VALUES[link['kind']]} from {link['from']} over the link", link["share"]) for link in row["links"]]
    named = [
        ("computing", row["computing"]),
        *links,
        ("waiting for stored messages", row["store"]),
        ("waiting for encoding and decoding", row["coding"]),
        ("waiting for others to compute", row["bubble"]),
        ("optimizer and all the rest", row["other"]),
    ]
    largest_first = sorted(named, key=lambda pair: -pair[1])
    return [f"{phrase} {100 * share:.0f} %" for phrase, share in largest_first if share >= _LEAST_SHARE]
