"""The study of joined texts: the page shows its data, and a share of all tokens is the whole text."""

import numpy as np
import pytest

import kvjax
from kvjax.eval.tasks.recall import WORDS
from scripts.studies import joined
from scripts.studies.runner import Data


def test_the_page_shows_the_data_of_all_windows():
    assert joined.PAGE.agrees() and len(joined.DATA.read()["windows"]) == len(joined.STARTS)


def test_reading_everything_again_is_reading_the_whole(tmp_path, monkeypatch):
    words = np.random.default_rng(0).choice(WORDS[4:], 200)
    (tmp_path / "words.txt").write_text(" ".join(words))
    monkeypatch.setattr(joined, "TEXT", tmp_path / "words.txt")
    monkeypatch.setattr(joined, "DATA", Data(tmp_path / "joined.json", {"about": {}, "windows": {}}))
    for name, value in (
        ("STARTS", (0,)),
        ("PIECES", 3),
        ("LENGTH", 24),
        ("AFTER", 8),
        ("SHARES", (0.0, 1.0)),
    ):
        monkeypatch.setattr(joined, name, value)
    joined.run(kvjax.load("recall-tiny"))
    ((apart, whole),) = joined.DATA.read()["windows"].values()
    assert apart > 1e-4 and whole == pytest.approx(0, abs=1e-5)
    assert joined.table().splitlines()[2].startswith(f"| 0% | {apart:.4f} |")
