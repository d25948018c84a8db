"""The leaderboard's page, picture and data are those of what comparisons found."""

import json
from pathlib import Path

import pytest

from kvjax.eval.report.cells import summarise
from kvjax.eval.report.leaderboard import read_leaderboard
from scripts.studies import leaderboard, leaderboard_page
from tests.eval.rows import METRICS, comparison
from tests.eval.test_leaderboard import SETTINGS
from tests.eval.test_leaderboard import board as two_models  # noqa: F401


def test_the_best_of_a_family_holds_no_more_than_its_budget(two_models):  # noqa: F811
    lines = [x for x in two_models[0].lines() if x.protocol == "aware"]
    names = ["snapkv", "expected-attention", "quest"]
    # Quest scores best, and holds all tokens whatever it reads.
    assert leaderboard_page.best(lines, names) == {0.5: "snapkv", 0.25: "snapkv", 0.125: "snapkv"}
    assert leaderboard_page.best(lines, ["quest", "kivi"]) == {None: "kivi"}


def test_the_page_has_every_method_in_its_family_and_says_who_is_below_baselines(two_models):  # noqa: F811
    text = leaderboard_page.page(two_models[0])
    assert "on 2 models (`a`, `b`)" in text and "| 1.25x | 0.50x |" in text
    tables = text.split("\n| *")
    for id, family in (
        ("snapkv", "selection-static"),
        ("kivi", "quant-mixed"),
        ("quest", "retrieval-sparse"),
    ):
        assert any(table.startswith(f"{family}*") and f"\n| {id} | " in table for table in tables)
    lines = [x for x in two_models[0].lines() if x.protocol == "aware"]
    worse = [x._replace(method="keydiff", high=0.01, few=False) for x in lines if x.method == "snapkv"]
    told = leaderboard_page.below_baselines([*lines, *worse])
    assert "Below random, intervals apart: keydiff at 0.5, keydiff at 0.25, keydiff at 0.125." in told
    assert "Below random, intervals apart: none." in leaderboard_page.below_baselines(lines)


def test_the_picture_has_a_panel_per_family_and_is_the_same_for_the_same_lines(two_models):  # noqa: F811
    first, again = (leaderboard_page.pictures(two_models[0]) for _ in range(2))
    assert first == again and set(first) == {"leaderboard-agnostic.svg", "leaderboard-aware.svg"}
    text = first["leaderboard-aware.svg"].decode()
    assert all(name in text for name in ("selection-static", "quant-mixed", "retrieval-sparse", "full cache"))


def test_what_a_run_left_is_collected(tmp_path):
    rows, folder = comparison(), tmp_path / "0"
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = {**METRICS, "settings": SETTINGS, "command": "kvjax compare", "fingerprint": "", "cells": []}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    seconds = {
        "snapkv": ([1.0, 1.5], [1.0, 2.0]),
        "full": ([1.0, 1.0],) * 2,
        "kivi": ([2.0, 2.2], [1.0, 4.0]),
    }
    (tmp_path / "speed.json").write_text(
        json.dumps({method: {"prefill": p, "decode": d} for method, (p, d) in seconds.items()})
    )
    file = tmp_path / "board.json"
    file.write_text(leaderboard.collect([Path("0")], [tmp_path]))
    found = read_leaderboard(file)
    assert found.speed == {"snapkv": (1.5, 0.5), "full": (1.0, 1.0), "kivi": (1.1, 0.25)}
    assert len(found.lines()) == len(summarise(rows)) and found.runs[0].about["samples"] == 12

    # A run of another model comes beside it; some methods of the same model, asked otherwise, do not.
    folder.rename(tmp_path / "1")
    file.write_text(leaderboard.collect([Path("0"), Path("1")], [tmp_path], found))
    assert [run.about["model"][-1] for run in read_leaderboard(file).runs] == ["0", "1"]
    metrics["settings"] = SETTINGS | {"samples": 13}
    (tmp_path / "1" / "metrics.json").write_text(json.dumps(metrics))
    again = leaderboard.collect([Path("1")], [tmp_path], read_leaderboard(file))
    assert '"samples": 13' in again.partition('"model": "')[2]  # all its methods are asked anew
    few = [row for row in rows if row["method"] == "full"]
    (tmp_path / "1" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    with pytest.raises(SystemExit, match="asked with .*13.* of other methods with .*12"):
        leaderboard.collect([Path("1")], [tmp_path], read_leaderboard(file))


def test_two_folders_of_one_model_are_collected_at_once(tmp_path):
    rows = comparison()
    metrics = {**METRICS, "settings": SETTINGS, "command": "kvjax compare", "fingerprint": "", "cells": []}
    parts = {
        "a": [r for r in rows if r["method"] != "snapkv"],
        "b": [r for r in rows if r["method"] == "snapkv"],
    }
    for name, some in {**parts, "whole": rows}.items():
        folder = tmp_path / name / "0"
        folder.mkdir(parents=True)
        (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        (folder / "metrics.json").write_text(json.dumps(metrics))

    def board(*names):
        text = leaderboard.collect([Path("0")], [tmp_path / name for name in names])
        (tmp_path / "board.json").write_text(text)
        return read_leaderboard(tmp_path / "board.json")

    def cells(found):
        return sorted(map(str, found.runs[0].cells))

    assert cells(board("a", "b")) == cells(board("b", "a")) == cells(board("whole"))
    assert cells(board("whole", "b")) == cells(board("whole"))
    with pytest.raises(SystemExit, match="has a folder 0: run it first"):
        board("nothing")
