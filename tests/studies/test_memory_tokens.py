"""Models that learned with memory tokens: rows go on where they were cut."""

import json
from pathlib import Path

import pytest

from kvjax.commands.main import make_parser
from kvjax.io.gin_bindings import load_training
from kvjax.train.settings import training
from scripts.studies import memory_tokens as script
from scripts.studies import runner


def test_rows_say_the_command_that_trained_them():
    for name, row in script.DATA.read().items():
        args = make_parser().parse_args(row["train"].split()[1:] + ["--out", "x"])
        loop = training(load_training(args.gin, args.set)).loop
        assert (loop.method, loop.steps) == script.ROWS[name]
        assert row["tokens"] == loop.tokens(loop.steps)


def test_a_row_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    asked, cell = [], dict(mean=0.5, mean_low=0.4, mean_high=0.6, kept_bytes=1, full_bytes=4)

    def kvjax(*words):
        asked.append(words)
        out = Path(words[words.index("--out") + 1])
        if words[0] == "train":
            (out / "model").mkdir(parents=True)
            (out / "run.json").write_text("{}")
            (out / "log.jsonl").write_text(json.dumps({"tokens": 7, "cpu_seconds": 1.0}) + "\n")
        else:
            out.mkdir(parents=True)
            names = ("full", "streamingllm", "loma:fitted=x")
            cells = [cell | {"method": name, "tasks": {"get": {"samples": 300}}} for name in names]
            (out / "metrics.json").write_text(json.dumps({"cells": cells}))

    monkeypatch.setattr(runner, "kvjax", kvjax)
    monkeypatch.setattr(script, "DATA", runner.Data(tmp_path / "data.json"))
    script.add("loma", tmp_path)
    assert [words[0] for words in asked] == ["train", "compare", "compare"]
    assert f"loma:fitted={tmp_path / 'loma' / 'loma.safetensors'}" in asked[1]
    row = script.DATA.read()["loma"]
    assert row["own"]["samples"] == 300 and row["tokens"] == 7
    script.add("loma", tmp_path)
    assert len(asked) == 3
    # A run that was cut before its end goes on.
    (tmp_path / "loma" / "model").rmdir()
    script.add("loma", tmp_path)
    assert asked[3][-1] == "--resume"
    # Another seed is a run of its own, beside the same row.
    script.add("loma", tmp_path, seed=2)
    assert {"train.seed=2", "data.seed=2"} <= set(asked[4])
    (other,) = script.DATA.read()["loma"]["seeds"].items()
    assert other[0] == "2" and other[1]["own"]["samples"] == 300
    assert "| 50% |" in script.table()
    with pytest.raises(SystemExit, match="ccm has no row of seed 0 yet"):
        script.add("ccm", tmp_path, seed=1)
