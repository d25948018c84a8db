"""The study of a real model: what runs found becomes lines, lines become tables, and the page has these."""

import json

import numpy as np
import pytest

import kvjax
from scripts import eval as evaluation
from scripts.studies import real_model

GIN = """
compare.model = 'recall-tiny'
compare.tasks = ('get', 'copy')
compare.methods = ('full', 'snapkv', 'random')
compare.budgets = (0.5,)
compare.protocols = ('agnostic',)
compare.samples = 3
compare.length = 96
compare.baselines = False
compare.gold = True
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.gin").write_text(GIN)
    evaluation.main(["--gin", str(folder / "mine.gin"), "--out", str(folder / "run")])
    return folder


def test_lines_hold_every_context_once(run):
    lines = real_model.collect([run / "run", run / "run"])
    assert [(x["task"], x["method"], len(x["scores"])) for x in lines] == [
        (task, method, 3) for task in ("copy", "get") for method in ("full", "random", "snapkv")
    ]
    rows = [json.loads(text) for text in (run / "run" / "results.jsonl").read_text().splitlines()]
    for line in lines:
        mine = [r for r in rows if (r["task"], r["method"]) == (line["task"], line["method"])]
        assert np.mean(line["scores"]) == pytest.approx(np.mean([r["score"] for r in mine]), abs=1e-4)
        assert sorted(line["nll"]) == pytest.approx(sorted(r["nll"] for r in mine), abs=1e-4)
        assert line["kept"] == pytest.approx(mine[0]["kept_bytes"] / mine[0]["full_bytes"], abs=1e-4)


def test_a_run_that_was_cut_gives_the_units_that_it_finished(run, tmp_path):
    part = tmp_path / "part"
    part.mkdir()
    (part / "settings.json").write_bytes((run / "run" / "settings.json").read_bytes())
    first, second, *_ = (run / "run" / "units.jsonl").read_bytes().splitlines(keepends=True)
    (part / "units.jsonl").write_bytes(first + second[:-20])
    assert [line["method"] for line in real_model.collect([part])] == [json.loads(first)["rows"][0]["method"]]


def test_an_interrupted_run_says_how_it_goes_on(run, monkeypatch):
    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "compare", stop)
    with pytest.raises(SystemExit, match="go on with: python -m scripts.eval .* --resume"):
        evaluation.main(["--gin", str(run / "mine.gin"), "--out", "x", "--minutes", "5"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compare.sample = 3", "mine.gin, line 1: compare.sample is no argument .* did you mean samples"),
        ("compare.methods = ('a.py:b',)", "would run Python code"),
        ("compare.tasks = ('a.py:b',)", "would run Python code"),
        ("compare.tasks = @os.system()", "would run Python code"),
        ("train.steps = 3", "unknown section 'train'"),
    ],
)
def test_a_file_with_anything_else_is_refused(tmp_path, text, message):
    (tmp_path / "mine.gin").write_text(text)
    with pytest.raises(SystemExit, match=message):
        evaluation.main(["--gin", str(tmp_path / "mine.gin"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_is_named_with_the_nearest(tmp_path):
    with pytest.raises(SystemExit, match="did you mean pilot"):
        evaluation.main(["--gin", "pilott", "--out", str(tmp_path / "out")])


def lines_of(scores):
    """Lines of one task under one protocol, 20 contexts each."""
    common = dict(protocol="agnostic", task="t", kept=0.5, span_kept=None)
    cells = [("full", None, scores[0]), ("snapkv", 0.5, scores[1]), ("random", 0.5, scores[2])]
    return [
        {
            **common,
            "method": m,
            "budget": b,
            "scores": [1.0] * right + [0.0] * (20 - right),
            "nll": [3.0 - right / 9] * 20,
        }
        for m, b, right in cells
    ]


def test_a_task_tells_methods_apart_where_three_intervals_are_disjoint():
    assert real_model.decision_table(lines_of((20, 10, 1))).endswith("| agnostic | 0.5 | t | t |")
    assert real_model.decision_table(lines_of((20, 19, 1))).endswith("| agnostic | 0.5 | none | t |")
    # Of a task that the full cache does not answer, whole answers say nothing.
    assert real_model.decision_table(lines_of((13, 4, 0))).endswith("| agnostic | 0.5 | none | t |")


def test_methods_are_compared_on_the_contexts_and_tasks_that_all_have():
    lines = lines_of((20, 10, 1))
    lines += [{**line, "task": "u"} for line in lines if line["method"] != "random"]
    lines[0]["scores"], lines[0]["nll"] = [0.0] * 40, [9.0] * 40
    found = real_model.comparable(lines)
    assert {line["task"] for line in found} == {"t"} and {len(line["nll"]) for line in found} == {20}
    assert real_model.pilot_table(lines, "agnostic").count("\n") == 1 + 3


def test_the_page_has_the_tables_of_its_data():
    assert real_model.PAGE.agrees()
    found = real_model.read()
    assert {line["method"] for line in found} == {*real_model.ORDER}
    for line in found:
        assert len(line["scores"]) == len(line["nll"]) and 0 < line["kept"] <= 1.05
        assert kvjax.method(line["sentence"]) is not None
