"""`kvjax report`: a results folder as a table, CSV, LaTeX and a page, all from the same rows."""

import csv
import io
import json
import re

import pytest

from kvjax.commands.main import main
from kvjax.eval.report.cells import summarise
from kvjax.eval.report.export import latex_cells
from tests.eval.rows import comparison, scored

SPEED = {"prefill_ms": 41.0, "prefill_ms_low": 40.0, "prefill_ms_high": 42.0, "prefill_ms_timings": 3}


def text_row(method, budget, window, loss):
    row = {"id": f"text-{window}", "method": method, "budget": budget, "nll": 2.0 + window + loss}
    row |= {"full_nll": 2.0 + window, "kl": 0.1, "top1": 0.9, "tokens": 8}
    return row | {"kept_bytes": 50, "full_bytes": 100, "read_bytes": 50}


LOST = {("full", None): [0.0] * 6, ("h2o", 0.5): [0.1 + w / 50 for w in range(6)]}
TEXT = [text_row(*key, w, loss) for key, lost in LOST.items() for w, loss in enumerate(lost)]


def written(folder, rows, metrics):
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return str(folder)


@pytest.fixture
def questions(tmp_path):
    cells = [{"method": "snapkv", "budget": 0.5, "mean": 0.3, **SPEED}]
    return written(tmp_path, comparison(6), {"model": "recall-tiny", "cells": cells})


@pytest.fixture
def text(tmp_path):
    return written(tmp_path, TEXT, {"model": "recall-tiny", "text": []})


def printed(capsys, *words):
    assert main(["report", *words]) == 0
    return capsys.readouterr().out


def test_csv_has_every_figure_of_every_cell(questions, capsys):
    records = list(csv.DictReader(io.StringIO(printed(capsys, questions, "--format", "csv"))))
    cells = summarise(comparison(6))
    assert [(r["protocol"], r["method"]) for r in records] == [(c.protocol, c.method) for c in cells]
    for record, cell in zip(records, cells, strict=True):
        assert float(record["mean"]) == cell.mean and float(record["get"]) == cell.tasks["get"].mean
        assert float(record["kept_bytes"]) == cell.kept_bytes and record["get_samples"] == "6"
        assert record["vs_full_p"] == ("" if cell.versus is None else str(cell.versus.p))
    timed = [r for r in records if r["prefill_ms"]]
    assert [(r["method"], r["budget"], r["prefill_ms"], r["prefill_ms_timings"]) for r in timed] == 2 * [
        ("snapkv", "0.5", "41.0", "3")
    ]


def test_latex_is_one_table_whose_words_are_escaped(questions, capsys):
    out = printed(capsys, questions, "--format", "latex")
    lines = [line for line in out.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(summarise(comparison(6))) and len({line.count(" & ") for line in lines}) == 1
    assert out.startswith(r"\begin{tabular}") and r"kept (\%)" in out and "$-$" in out
    odd = latex_cells(summarise(scored([1.0] * 3, method="a_b & 5%")))
    assert r"a\_b \& 5\%" in odd and "n too small" in odd


def test_the_table_and_the_page_are_those_of_the_run(questions, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = printed(capsys, questions)
    assert "snapkv" in table and "41.0 40.0–42.0" in table and "aware:" in table
    html = printed(capsys, questions, "--format", "html")
    assert html.startswith("<!doctype html>") and 'id="duel"' in html and "prompt</span>" not in html


def test_a_text_has_all_four_formats(text, capsys):
    full, h2o = csv.DictReader(io.StringIO(printed(capsys, text, "--format", "csv")))
    assert float(h2o["delta_nll"]) == pytest.approx(0.15) and float(h2o["p"]) < 0.01 and full["p"] == "1.0"
    assert "+0.1500" in printed(capsys, text) and "+0.1500" in printed(capsys, text, "--format", "latex")
    html = printed(capsys, text, "--format", "html")
    assert "+0.1500" in html and "6" in html and 'data-better="less"' in html
    assert "It read 6 windows" in html and 'name="family" value="selection-dynamic"' in html
    assert 'href="#card-h2o"' in html and 'id="card-h2o"' in html and "data-csv=" in html


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "metrics.json cannot be read"),
        ({"units.jsonl": ""}, "is not finished"),
        ({"metrics.json": "{}"}, "results.jsonl cannot be read"),
        ({"metrics.json": "[]", "results.jsonl": "{}"}, "does not describe a comparison"),
        ({"metrics.json": "{", "results.jsonl": ""}, "holds no JSON"),
        ({"metrics.json": "{}", "results.jsonl": ""}, "other lines than a comparison's"),
        ({"metrics.json": "{}", "results.jsonl": '{"id": 3}\n'}, "other lines than a comparison's"),
    ],
)
def test_folders_without_results_are_one_sentence(files, message, tmp_path, capsys):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2 and "is no folder" in capsys.readouterr().err


def test_a_difference_that_rounds_to_zero_has_no_sign_and_windows_that_lose_alike_no_interval(
    tmp_path, capsys
):
    lost = {
        ("full", None): [0.0] * 6,
        ("h2o", 0.5): [-1e-6] * 6,
        ("tova", 0.5): [-2e-6 * w for w in range(6)],
    }
    rows = [text_row(*key, w, loss) for key, each in lost.items() for w, loss in enumerate(each)]
    folder = written(tmp_path, [row | {"kl": -0.0} for row in rows], {"model": "recall-tiny", "text": []})
    table, latex = printed(capsys, folder), printed(capsys, folder, "--format", "latex")
    assert "0.0000 alike" in table and "alike: in all windows the same" in " ".join(table.split())
    for shown in (table, latex, latex.replace("−", "-")):
        assert not re.search(r"[+-]0\.0000|-0\.0e|\+0\.0000", shown), shown
    records = list(csv.DictReader(io.StringIO(printed(capsys, folder, "--format", "csv"))))
    assert [record["delta_low"] for record in records][0] == ""
    html = printed(capsys, folder, "--format", "html")
    assert "0.0000 <small>alike in all windows</small>" in html
    assert "+0.0000" not in html and "-0.0000" not in html


def test_an_equal_score_has_no_sign_in_the_table_of_questions(tmp_path, capsys):
    rows = [row | {"score": 1.0} for row in comparison(6)]
    table = printed(capsys, written(tmp_path, rows, {"model": "recall-tiny", "cells": []}))
    assert not re.search(r"[+-]0(?![\d.])", table), table


@pytest.mark.parametrize("form", ["table", "csv", "latex", "html"])
@pytest.mark.parametrize("value", ["x", None, [1], {"a": 1}])
@pytest.mark.parametrize("name", ["score", "budget", "protocol", "task", "kept_bytes", "id"])
def test_rows_with_other_values_are_one_sentence_or_a_table(name, value, form, tmp_path, capsys):
    rows = [row | {name: value} for row in comparison(3)]
    code = main(["report", written(tmp_path, rows, {"model": "m", "cells": []}), "--format", form])
    said = capsys.readouterr()
    assert code == 0 or (code == 2 and said.err.startswith("kvjax: error: ") and said.err.count("\n") == 1)


@pytest.mark.parametrize("cells", [5, [5], [{}], {"a": 1}, None])
def test_metrics_with_other_cells_are_one_sentence_or_a_table(cells, tmp_path, capsys):
    folder = written(tmp_path, comparison(3), {"model": "m", "cells": cells})
    assert main(["report", folder]) in (0, 2)
