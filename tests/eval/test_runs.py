"""What a run is asked and how it is told, without running one: seeds, commands, timings, pages of a text."""

import json
import shlex

import pytest
from rich.console import Console
from rich.table import Table

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands import inspect_model
from kvjax.commands.main import main, make_parser
from kvjax.eval import compare as comparing
from kvjax.eval.compare import compare
from kvjax.eval.report.text_page import text_html
from kvjax.eval.report.text_table import print_stream, summarise_text, text_duels, text_panels
from kvjax.eval.run import plan as planning
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.command import command_of
from kvjax.eval.run.timings import timings_of
from kvjax.eval.tasks.suite import make_suite
from kvjax.grammar import Method
from scripts.bench.report import print_rows
from tests.eval.test_export import TEXT
from tests.eval.test_page import Page

FULL = PlannedCell("full", None, Method())


# --- several seeds -----------------------------------------------------------------------------------


def test_every_seed_draws_its_own_contexts_into_its_own_batches(monkeypatch):
    model = kvjax.load("recall-tiny")
    suites = {s: make_suite(model, ["get"], length=128, seed=s, contexts=3) for s in (4, 7)}
    plan = planning.ComparisonPlan(model, suites, [FULL], ("aware",), 3, 128)
    monkeypatch.setattr(planning, "fitting_rows", lambda *_: 2)
    batches = planning.batches_of(plan)
    assert [(b.number, b.seed, len(b.rows)) for b in batches] == [(0, 4, 2), (1, 4, 1), (2, 7, 2), (3, 7, 1)]
    ids = [row[0].id for b in batches for row in b.rows]
    assert len({*ids}) == 6 and all(f"-s{b.seed}-" in row[0].id for b in batches for row in b.rows)
    alone = planning.ComparisonPlan(model, {4: suites[4]}, [FULL], ("aware",), 3, 128)
    assert planning.batches_of(alone) == batches[:2]
    assert comparing._settings(alone, "short")["seed"] == 4
    assert comparing._settings(plan, "short")["seed"] == [4, 7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": [0, 0]}, "every seed once"),
        ({"seeds": []}, "every seed once"),
        ({"seeds": [1], "seed": 5}, "one of both"),
        ({"seeds": [0, 1], "text": "book.txt"}, "raise --samples"),
    ],
)
def test_seeds_that_do_not_fit_together_are_refused(given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        compare(methods=["full"], out=tmp_path / "run", **given)
    assert not list(tmp_path.iterdir())


def test_questions_of_files_are_not_counted_once_per_seed(tmp_path):
    record = {"index": 0, "input": "a the amber 12", "outputs": ["12"], "length": 8}
    (tmp_path / "niah.jsonl").write_text(json.dumps(record) + "\n")
    tasks = [str(tmp_path / "niah.jsonl")]

    class Suite:
        sources = ("niah.jsonl:00",)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="leave --seeds away"):
        patch.setattr(planning, "make_suite", lambda *_, **__: Suite())
        compare(methods=["full"], tasks=tasks, seeds=[0, 1], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- commands and timings ----------------------------------------------------------------------------


def test_the_command_of_a_run_asks_for_the_same_run():
    given = dict(
        model="a model", methods=["snapkv:window=16", "h2o + int8"], budgets=[0.5, 64], tasks=["get"],
        protocols=("aware",), samples=3, length=600, seeds=[1, 2], preset="long",
    )  # fmt: skip
    words = shlex.split(command_of(**given))
    args = make_parser().parse_args(words[1:])
    assert (args.model, args.methods, args.budgets) == (given["model"], given["methods"], ["0.5", "64"])
    assert (args.tasks, args.protocol, args.samples, args.length) == (["get"], ["aware"], 3, 600)
    assert (args.seeds, args.seed, args.preset) == ([1, 2], 0, "long")
    assert command_of(model="m") == "kvjax compare --model m"
    assert command_of(model="m", seeds=[3]).endswith("--seed 3")


def test_timings_say_how_many_there_were_and_how_far_apart():
    def unit(ask, settle):
        return {"seconds": {"ask": ask, "settle": settle}, "read_s": {"": 1.0}, "batch": 2, "steps": 100}

    untimed = {"seconds": None, "read_s": None, "batch": 2, "steps": 100}
    units = [unit(1.0, 0.2), unit(2.0, 0.4), unit(4.0, 1.0), untimed]
    done = {f"aware/{i}/full/None": u for i, u in enumerate(units)}
    found = timings_of([FULL], done)["full", None]
    assert found["decode_tokens_per_s"] == 50 and found["decode_tokens_per_s_timings"] == 3
    assert (found["decode_tokens_per_s_low"], found["decode_tokens_per_s_high"]) == (25, 100)
    assert (found["prefill_ms"], found["prefill_ms_low"], found["prefill_ms_high"]) == (700, 600, 1000)
    assert timings_of([FULL], {"aware/0/full/None": untimed})["full", None] == {}


# --- pages of a text ---------------------------------------------------------------------------------


def test_a_text_has_a_page_with_its_run_its_table_and_its_matrix():
    rows = summarise_text(TEXT)
    metrics = {"model": "<b>", "command": "kvjax compare --text a", "settings": {"length": 64}}
    page = Page(text_html(metrics, rows, text_duels(TEXT)))
    assert "+0.1500" in page.text and "kvjax compare --text a" in page.text and "<b>" in page.text
    assert sum(tag == "td" for tag, _ in page.elements) == 2 * sum(tag == "th" for tag, _ in page.elements)
    (matrix,) = json.loads([x for x in page.scripts if x.strip()][1])
    assert matrix["names"] == ["full", "h2o"] and matrix["found"][0][2] == pytest.approx(-0.15)


def test_a_text_loses_what_its_windows_lose_and_few_windows_have_no_interval(capsys):
    (panel,) = text_panels(summarise_text(TEXT))
    full, h2o = panel.points
    assert full.reference and full.value == 0 and h2o.value == pytest.approx(0.15) and h2o.kept == 50
    assert h2o.ends[0] < 0.15 < h2o.ends[1]
    few = summarise_text([row for row in TEXT if row["id"] in ("text-0", "text-1")])
    assert text_panels(few)[0].points[1].ends is None
    print_stream(few)
    assert "n=2" in capsys.readouterr().out
    assert "n too small" in text_html({}, few)


def test_text_reports_name_methods_larger_than_the_full_cache(capsys):
    rows = summarise_text(TEXT)
    heavy = [
        {**row, "kept_bytes": 1.1 * row["full_bytes"]} if row["method"] == "h2o" else row for row in rows
    ]
    for given, named in ((rows, False), (heavy, True)):
        print_stream(given, Console(width=300))
        for text in (Page(text_html({}, given)).text, capsys.readouterr().out):
            assert ("Larger than the full cache: h2o at 0.5." in text) == named
            assert named or "Larger than" not in text


# --- tables in pipes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["methods"], ["inspect", "recall-tiny", "--context", "64"]])
def test_tables_in_a_pipe_have_their_natural_width(words, monkeypatch, capsys):
    wide = Table(*(f"a heading of column {i}" for i in range(20)))
    monkeypatch.setattr(inspect_model, "cache_table", lambda *_: (wide, "note"))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(words) == 0
    natural = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "5000")
    assert main(words) == 0
    assert natural == capsys.readouterr().out and "…" not in natural


def test_the_benchmarks_table_keeps_its_headings_in_a_pipe(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    row = {"library": "kvjax", "method": "expected-attention", "tokens": 16384, "prefill_s": 1.234}
    row |= {"decode_tokens_per_s": 123.4, "cache_mib": 1.0, "compile_s": 3.0, "floor_tokens_per_s": 200.1}
    print_rows([row])
    out = capsys.readouterr().out
    assert all(name in out for name in row) and all(str(value) in out for value in row.values())
