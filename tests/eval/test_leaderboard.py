"""The leaderboard: its data holds what comparisons found, and its page says what the data does."""

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.eval.report.cells import summarise
from kvjax.eval.report.leaderboard import BoardRun, Speed, leaderboard_text, lines_of, read_leaderboard
from tests.eval.rows import TASKS, comparison

SETTINGS = {"samples": 12, "length": 512, "protocols": ["agnostic", "aware"], "seed": 0}


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
    runs = [BoardRun(about(name), tuple(summarise(each))) for name, each in (("a", rows), ("b", worse))]
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


def test_the_shipped_data_has_lines_of_every_method_that_it_names():
    shown = {line.method for line in read_leaderboard().lines()}
    assert all(lines_of(id) for id in shown) and lines_of("no-such-method") == ()
