"""What studies share: pages show their data, files appear whole, and runs go on where they were cut."""

import argparse
import importlib
import json

import pytest

from scripts.studies import runner

PAGES = (
    "architecture_table", "architectures", "beside_kvpress", "claims", "leaderboard", "long_prompts",
    "memory_tokens", "ops", "plan_table", "uptraining_curve",
)  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_data(name):
    study = importlib.import_module(f"scripts.studies.{name}")
    assert study.PAGE.agrees(), f"run: python -m scripts.studies.{name} --write"


def test_a_page_is_checked_and_written_between_its_marks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "DOCS", tmp_path)
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n")
    page = runner.Page("page.md", {"a": lambda: "new"})
    asked = runner.parser("", ("run",), seed="of all")
    page.show(asked.parse_args([]))
    assert capsys.readouterr().out == "new\n" and "old" in path.read_text()
    with pytest.raises(SystemExit, match="page.md has other tables than its data gives"):
        page.show(asked.parse_args(["--check"]))
    page.show(asked.parse_args(["--write"]))
    page.show(asked.parse_args(["--check"]))
    assert path.read_text() == "before\n<!-- a -->\nnew\n<!-- end of a -->\nafter\n"
    with pytest.raises(SystemExit):
        asked.parse_args(["--check", "--write"])
    runner.Page("whole.md", {"": lambda: "all\n"}).show(argparse.Namespace(write=True, check=False))
    assert (tmp_path / "whole.md").read_text() == "all\n"


def test_data_that_is_changed_keeps_what_another_process_added(tmp_path):
    mine, theirs = (runner.Data(tmp_path / "data.json", {"rows": {}}) for _ in range(2))
    found = mine.read()
    found["rows"]["lost"] = 1
    assert theirs.read() == {"rows": {}}
    theirs.change(lambda data: data["rows"].update(b=2))
    mine.change(lambda data: data["rows"].update(a=1))
    assert theirs.read() == {"rows": {"b": 2, "a": 1}}


def test_training_goes_on_where_it_was_cut_and_is_not_done_twice(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(runner, "kvjax", lambda *words: asked.append(words))
    (tmp_path / "log.jsonl").write_text(json.dumps({"loss": 1}) + "\n")
    assert runner.train_in(tmp_path, ["train"]) == [{"loss": 1}]
    (tmp_path / "run.json").write_text("{}")
    runner.train_in(tmp_path, ["train"])
    (tmp_path / "model").mkdir()
    runner.train_in(tmp_path, ["train"])
    assert [words[-1] for words in asked] == [str(tmp_path), "--resume"]


def test_a_process_apart_gives_its_last_line_and_none_where_it_fails(tmp_path):
    (tmp_path / "two.json").write_text('{"a": 1}\n{"b": 2}\n')
    words = ("--json-lines", "--compact")
    assert runner.apart("json.tool", *words, str(tmp_path / "two.json")) == {"b": 2}
    assert runner.apart("json.tool", *words, str(tmp_path / "none.json")) is None


def test_a_study_runs_on_the_model_and_the_rows_that_are_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("kvjax.io.load.load", lambda name: f"loaded {name}")
    calls, page = [], runner.Page("none.md", {"a": lambda: "the table"})
    asked = {
        ("run",): ("loaded small", None),
        ("run", "--model", "large", "--rows", "a", "b"): ("loaded large", ["a", "b"]),
        (): None,
    }
    for words, want in asked.items():
        monkeypatch.setattr("sys.argv", ["study", *words])
        runner.study("", lambda *given: calls.append(given), page, model="small", rows=True)
        assert calls == ([] if want is None else [want])
        calls.clear()
    assert capsys.readouterr().out == "the table\n"
    monkeypatch.setattr("sys.argv", ["study", "run"])
    runner.study("", lambda *given: calls.append(given), page, model="small")
    assert calls == [("loaded small",)]
