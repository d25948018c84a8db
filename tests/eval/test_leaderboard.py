"""The leaderboard: its data holds what comparisons found, and its page says what the data does."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.eval.report.cells import summarise
from kvjax.eval.report.leaderboard import Run, Speed, leaderboard_text, lines_of, read_leaderboard
from tests.eval.rows import METRICS, TASKS, comparison

ROOT = Path(__file__).parents[2]
SETTINGS = {"samples": 12, "length": 512, "protocols": ["agnostic", "aware"], "seed": 0}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def about(model: str) -> dict:
    return {
        **SETTINGS,
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "git_revision": "1f",
        "command": "c",
    }


@pytest.fixture
def board(tmp_path):
    """Two models of the same rows, the second of which answers nothing right in one task."""
    rows = comparison()
    worse = [{**row, "score": 0.0} if row["task"] == "get" else row for row in rows]
    runs = [Run(about(name), tuple(summarise(each))) for name, each in (("a", rows), ("b", worse))]
    file = tmp_path / "board.json"
    speed = {"snapkv": Speed(1.25, 0.5), "full": Speed(1.0, 1.0)}
    file.write_text(
        leaderboard_text(runs, speed, {"rows": 4, "tokens": 512, "steps": 8, "rounds": 5, "budget": 0.25})
    )
    return read_leaderboard(file), rows, worse


def test_methods_are_compared_on_the_models_that_have_both(board):
    found, *_ = board
    first, second = found.runs
    fewer = second._replace(cells=tuple(cell for cell in second.cells if cell.method != "snapkv"))
    partly = found._replace(runs=(first, fewer))
    models = {line.method: len(line.models) for line in partly.lines()}
    assert models.pop("snapkv") == 1 and set(models.values()) == {2}
    assert {len(line.models) for line in partly.lines(["snapkv", "full"])} == {1}
    assert {(line.method, len(line.models)) for line in partly.lines(["full"])} == {("full", 2)}


def test_the_file_holds_the_means_of_all_models(board):
    found, *given = board
    lines = {(x.method, x.budget, x.protocol): x for x in found.lines()}
    assert len(lines) == len({(r["method"], r["budget"], r["protocol"]) for r in given[0]})
    for (method, budget, protocol), line in lines.items():
        means = []
        for rows in given:
            mine = [
                r for r in rows if (r["method"], r["budget"], r["protocol"]) == (method, budget, protocol)
            ]
            means.append(np.mean([np.mean([r["score"] for r in mine if r["task"] == t]) for t in TASKS]))
            kept = mine[0]["kept_bytes"] / mine[0]["full_bytes"]
        assert line.models == pytest.approx(means, abs=1e-4) and line.mean == pytest.approx(
            np.mean(means), abs=1e-4
        )
        assert line.percent == pytest.approx(100 * kept) and line.low <= line.mean <= line.high
        assert set(line.tasks) == set(TASKS)
    assert found.speed["snapkv"] == (1.25, 0.5)


def test_intervals_are_narrower_on_more_models(board):
    found, rows, _ = board
    (one,) = (c for c in summarise(rows) if (c.method, c.budget, c.protocol) == ("snapkv", 0.5, "aware"))
    (both,) = (x for x in found.lines() if (x.method, x.budget, x.protocol) == ("snapkv", 0.5, "aware"))
    assert both.high - both.low < one.mean_high - one.mean_low


def test_a_file_of_another_form_is_refused_and_none_is_an_empty_board(tmp_path):
    assert read_leaderboard(tmp_path / "none.json").runs == ()
    (tmp_path / "old.json").write_text('{"schema": 0}')
    with pytest.raises(InputError, match="has schema 0, expected 1: make it anew"):
        read_leaderboard(tmp_path / "old.json")


def test_the_best_of_a_family_holds_no_more_than_its_budget(board, scripts):
    import leaderboard_page

    lines = [x for x in board[0].lines() if x.protocol == "aware"]
    names = ["snapkv", "expected-attention", "quest"]
    # Quest scores best, and holds all tokens whatever it reads.
    assert leaderboard_page.best(lines, names) == {0.5: "snapkv", 0.25: "snapkv", 0.125: "snapkv"}
    assert leaderboard_page.best(lines, ["quest", "kivi"]) == {None: "kivi"}


def test_the_page_has_every_method_in_its_family_and_says_who_is_below_baselines(board, scripts):
    import leaderboard_page

    text = leaderboard_page.page(board[0])
    assert "on 2 models (`a`, `b`)" in text and "| 1.25x | 0.50x |" in text
    tables = text.split("\n| *")
    for id, family in (
        ("snapkv", "selection-static"),
        ("kivi", "quant-mixed"),
        ("quest", "retrieval-sparse"),
    ):
        assert any(table.startswith(f"{family}*") and f"\n| {id} | " in table for table in tables)
    lines = [x for x in board[0].lines() if x.protocol == "aware"]
    worse = [x._replace(method="keydiff", high=0.01, few=False) for x in lines if x.method == "snapkv"]
    told = leaderboard_page.below_baselines([*lines, *worse])
    assert "Below random, intervals apart: keydiff at 0.5, keydiff at 0.25, keydiff at 0.125." in told
    assert "Below random, intervals apart: none." in leaderboard_page.below_baselines(lines)


@pytest.mark.rotating
def test_the_picture_has_a_panel_per_family_and_is_the_same_for_the_same_lines(board, scripts):
    import leaderboard_page

    first, again = (leaderboard_page.pictures(board[0]) for _ in range(2))
    assert first == again and set(first) == {"leaderboard-agnostic.svg", "leaderboard-aware.svg"}
    text = first["leaderboard-aware.svg"].decode()
    assert all(name in text for name in ("selection-static", "quant-mixed", "retrieval-sparse", "full cache"))


def test_what_a_run_left_is_collected(tmp_path, scripts):
    import leaderboard

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


def test_two_folders_of_one_model_are_collected_at_once(tmp_path, scripts):
    import leaderboard

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


def test_the_page_and_the_data_that_are_shipped_agree(scripts):
    import leaderboard_page

    assert (ROOT / "docs" / "leaderboard.md").read_text() == leaderboard_page.page(read_leaderboard()), (
        "run: python scripts/leaderboard.py --write"
    )
    shown = {line.method for line in read_leaderboard().lines()}
    assert all(lines_of(id) for id in shown) and lines_of("no-such-method") == ()
