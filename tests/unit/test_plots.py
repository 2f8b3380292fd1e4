"""`pipecomp bench plots`: what is drawn, and that the same result gives the same bytes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pipecomp.errors import ConfigError
from pipecomp.experiments import plots

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DRAWN = sorted(name for name in plots.DRAWINGS if (RESULTS / f"{name}.json").exists())


@pytest.mark.parametrize("name", DRAWN)
def test_a_result_is_drawn_to_the_same_bytes_each_time(name, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(RESULTS / f"{name}.json", tmp_path)
    drawn = []
    for _ in range(2):
        assert plots.draw_all(tmp_path) == [tmp_path / f"{name}.svg"]
        drawn.append((tmp_path / f"{name}.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) < 100_000


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_there_for_each_result_that_has_one(name):
    assert (RESULTS / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "convergence.json").write_text(json.dumps({}))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'pipecomp\[plots\]'"):
        plots.draw_all(tmp_path)


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no results to draw in .*convergence\.json"):
        plots.draw_all(tmp_path)
