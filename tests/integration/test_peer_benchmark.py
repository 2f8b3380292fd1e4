"""`pipecomp bench peer` on small sizes: real hosts, real processes of both systems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipecomp.experiments import peer
from pipecomp.testing.hosts import why_not

SMALL = peer.SIZES._replace(width=32, length=16, batch_size=8, num_microbatches=4)


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_systems_take_turns_and_every_warm_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(peer, "SIZES", SMALL)
    path = tmp_path / "peer.json"
    outcome = peer.run(json=True, path=path, rates=("20mbit",), rounds=1)
    assert json.loads(path.read_text())["rows"] == outcome["rows"]
    assert [row["system"] for row in outcome["rows"]] == list(peer.SYSTEMS)
    warm_steps = {row["system"]: len(row["turns_s"][0]) for row in outcome["rows"]}
    assert warm_steps == dict.fromkeys(peer.SYSTEMS, 6)
    assert all(seconds > 0 for row in outcome["rows"] for seconds in row["turns_s"][0])
    assert [bar["name"] for bar in outcome["bars"]] == [f"fw3bw6, 20mbit: step, times that of {peer.PEER}"]
    assert "20mbit    fw3bw6" in capsys.readouterr().out


def test_a_bar_is_missed_by_a_step_that_is_too_long() -> None:
    rows = [
        {"system": "identity", "rate": peer.UNSHAPED, "ratio_to_peer": 1.06},
        {"system": "fw3bw6", "rate": "100mbit", "ratio_to_peer": 0.65},
    ]
    assert [(bar["value"], bar["bar"], bar["holds"]) for bar in peer.bars_of(rows)] == [
        (1.06, 1.05, False),
        (0.65, 0.65, True),
    ]


def test_the_document_tells_what_was_measured() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "docs" / "results" / "peer.json").read_text())["rows"]
    assert "\n".join(peer.document_table(rows)) in (root / "docs" / "performance.md").read_text()
