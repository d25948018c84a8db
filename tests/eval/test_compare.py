"""`compare` end to end on the shipped model: small runs, real numbers, kills and resumes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from inspect import unwrap
from io import StringIO

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.compare import bound_by, compare
from kvjax.eval.report.scores_section import Picture
from kvjax.eval.run.cellplan import ALWAYS, WELL_KNOWN, PlannedCell, plan_cells
from kvjax.eval.run.revision import revision
from kvjax.eval.run.runner import Runner
from kvjax.eval.tasks import recall_tasks
from kvjax.methods import METHODS as EVERY

# One process makes the run that all tests look at.
pytestmark = pytest.mark.xdist_group("compare")
QUIET = {"console": Console(file=StringIO(), width=140)}
PRINTED, SAID = StringIO(), StringIO()  # by the run that all tests look at; its progress
METHODS = ["snapkv:variant=kvpress", "int8"]
SMALL = {"methods": METHODS, "budgets": [0.25], "tasks": ["get", "copy"], "samples": 4}


def without_times(rows):
    return sorted(
        json.dumps({k: v for k, v in row.items() if k != "seconds"}, sort_keys=True) for row in rows
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    console = Console(file=PRINTED, width=140)
    with contextlib.redirect_stderr(SAID):
        return compare(**SMALL, console=console, out=tmp_path_factory.mktemp("runs") / "small")


@pytest.mark.rotating
def test_the_full_cache_answers_exactly_as_the_model_without_a_cache(small):
    model = kvjax.load("recall-tiny")
    full = {r["id"]: r for r in small.rows if r["method"] == "full" and r["protocol"] == "agnostic"}
    ask = recall_tasks.context_samples
    samples = [s for i in range(2) for s in ask(("get", "copy"), seed=0, index=i, tokens=507)]
    assert len(full) == 2 * len(samples)
    texts = [[*s.context, *s.question, *s.answer] for s in samples]
    # What stands behind a text changes nothing in it.
    rows = [text + [0] * (max(map(len, texts)) - len(text)) for text in texts]
    for s, row in zip(samples, np.asarray(model(jnp.asarray(rows, jnp.int32))), strict=True):
        start = len(s.context) + len(s.question) - 1
        words = " ".join(recall_words(row[start : start + len(s.answer)].argmax(-1)))
        assert full[s.id]["prediction"] == words


def recall_words(ids):
    from kvjax.eval.tasks.recall import WORDS

    return [WORDS[int(i)] for i in ids]


@pytest.mark.rotating
def test_every_cell_is_said_as_soon_as_it_is_done(small):
    lines = [line for line in SAID.getvalue().splitlines() if " in " in line]
    assert len(lines) == len(small.cells)
    for cell in small.cells:
        budget = "" if cell.budget is None else f" {cell.budget}"
        found = f"{100 * cell.mean:.0f}% in {cell.kept_bytes / 1024:.0f} KiB"
        assert f"{cell.method}{budget}, {cell.protocol}: {found}" in lines
    assert "--methods well-known" not in PRINTED.getvalue()


@pytest.mark.rotating
def test_without_methods_a_line_says_how_to_compare_more(tmp_path):
    console = Console(file=(printed := StringIO()), width=140)
    compare(samples=1, tasks=["get"], protocols=["agnostic"], out=tmp_path / "run", console=console)
    assert printed.getvalue().splitlines()[-1].startswith("more: --methods well-known")


@pytest.mark.rotating
def test_the_files_hold_what_was_returned(small):
    lines = (small.out / "results.jsonl").read_text().splitlines()
    assert [json.loads(x) for x in lines] == small.rows
    metrics = json.loads((small.out / "metrics.json").read_text())
    assert metrics["schema"] == 2 and metrics["presets"]["name"] == "short"
    assert {c["method"] for c in metrics["cells"]} >= {"full", "random", "sink-recent", "int8"}
    assert (small.out / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    assert "recall-tiny" in (small.out / "report.html").read_text()


def test_every_cell_has_its_measured_bytes_and_speeds(small):
    cells = {(c.method, c.protocol): c for c in small.cells}
    full = cells["full", "aware"]
    # Keys, values and positions: 4 layers, 2 heads, 512 slots, 2 x 32 floats and an int32; next once.
    assert full.kept_bytes == 4 * 2 * 512 * (2 * 32 * 4 + 4) + 4
    int8 = cells["int8", "aware"]
    assert int8.kept_bytes == 4 * 2 * 512 * (2 * (32 + 4) + 4) + 4
    snap = cells["snapkv:variant=kvpress", "aware"]
    assert snap.kept_bytes == 4 * 2 * 128 * (2 * 32 * 4 + 4) + 4
    for timing in small.timings.values():
        assert timing["decode_tokens_per_s"] > 0


def test_int8_answers_as_the_full_cache(small):
    rows = {(r["method"], r["protocol"], r["id"]): r for r in small.rows}
    for (method, protocol, id), row in rows.items():
        if method == "int8":
            assert row["prediction"] == rows["full", protocol, id]["prediction"]


@pytest.mark.rotating
def test_a_killed_run_goes_on_without_losing_or_repeating_a_cell(small, tmp_path):
    out = tmp_path / "killed"
    args = ["compare", "--methods", *SMALL["methods"], "--budgets", "0.25", "--tasks", *SMALL["tasks"]]
    command = [sys.executable, "-m", "kvjax", *args, "--samples", "4", "--out", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = out / "units.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and not (log.exists() and log.read_text().count("\n") >= 1):
        assert child.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    finished = log.read_text().count("\n")
    assert not (out / "results.jsonl").exists()
    with open(log, "a", encoding="utf-8") as f:
        f.write('{"key": "aware/0/torn", "rows": [{"id"')
    found = compare(**SMALL, **QUIET, out=out, resume=True)
    assert log.read_text().count("\n") == 2 * 5 and finished >= 1
    assert without_times(found.rows) == without_times(small.rows)


@pytest.mark.rotating
def test_a_method_that_fails_is_left_out_and_tried_again_by_resume(small, tmp_path, monkeypatch):
    out = shutil.copytree(small.out, tmp_path / "run")
    log = (out / "units.jsonl").read_text().splitlines(keepends=True)
    (out / "units.jsonl").write_text("".join(x for x in log if not ("aware/" in x and "/int8/" in x)))
    real = Runner.unit

    def broken(self, entry, *args, **options):
        if entry.label == "int8":
            raise ZeroDivisionError("a <fault> of int8")
        return real(self, entry, *args, **options)

    monkeypatch.setattr(Runner, "unit", broken)
    printed = StringIO()
    found = compare(**SMALL, console=Console(file=printed, width=140), out=out, resume=True)
    assert {c.method for c in found.cells} == {c.method for c in small.cells} - {"int8"}
    assert (
        "left out, because it failed: int8, aware: ZeroDivisionError: a <fault> of int8" in printed.getvalue()
    )
    assert "in broken" in (out / "errors.txt").read_text()
    assert "int8, aware: ZeroDivisionError: a &lt;fault&gt;" in (out / "report.html").read_text()
    monkeypatch.setattr(Runner, "unit", real)
    again = compare(**SMALL, **QUIET, out=out, resume=True)
    assert without_times(again.rows) == without_times(small.rows) and not (out / "errors.txt").exists()


@pytest.mark.rotating
def test_where_every_method_fails_the_error_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "unit", lambda self, *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(methods=["int8"], tasks=["get"], samples=1, baselines=False, **QUIET, out=tmp_path / "all")


def test_settings_name_what_the_preset_says_of_the_methods_that_run(small):
    assert set(small.metrics["presets"]) == {"name", "snapkv"}
    entries = [PlannedCell("criticalkv + kivi:bits=4", 0.5, None), PlannedCell("pyramidkv", 0.5, None)]
    preset = {"kivi": {"bits": 2}, "pyramidkv": {}, "snapkv": {}, "critical": {}}
    assert bound_by(preset, entries) == {"kivi": {"bits": 2}, "pyramidkv": {}}


@pytest.mark.rotating
def test_cells_that_run_in_groups_leave_the_same_rows_in_the_same_order(small, tmp_path, monkeypatch):
    monkeypatch.setattr("kvjax.eval.run.asking.TOGETHER", 2)
    found = compare(**SMALL, **QUIET, out=tmp_path / "groups")
    log = (tmp_path / "groups" / "units.jsonl").read_text().splitlines()
    two = ["agnostic"] * 2 + ["aware"] * 2
    assert [json.loads(x)["key"].partition("/")[0] for x in log] == [*two, *two, "agnostic", "aware"]
    for row, same in zip(found.rows, small.rows, strict=True):
        assert row | {"seconds": 0} == same | {"seconds": 0}


def test_a_run_is_not_resumed_with_other_settings(small):
    with pytest.raises(InputError, match="budgets|cells|samples"):
        compare(**{**SMALL, "samples": 5}, **QUIET, out=small.out, resume=True)
    with pytest.raises(InputError, match="--resume"):
        compare(**SMALL, **QUIET, out=small.out)


@pytest.mark.rotating
def test_a_run_is_not_resumed_with_a_method_whose_file_was_edited(tmp_path, monkeypatch):
    file, options = tmp_path / "mine.py", dict(samples=1, tasks=["get"], budgets=[0.25], out=tmp_path / "run")
    lines = "from kvjax.methods import snapkv\ndef mine(budget, by=8): return snapkv(budget, window=8)\n"
    file.write_text(lines)
    monkeypatch.setattr("kvjax.eval.compare.ask", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compare(methods=[f"{file}:mine"], **options, **QUIET)
    with pytest.raises(KeyboardInterrupt):
        compare(methods=[f"{file}:mine"], **options, **QUIET, resume=True)
    file.write_text(f"{lines}# The same sentence, and yet another file.\n")
    with pytest.raises(InputError, match=r"other settings \(method_sources differ\)"):
        compare(methods=[f"{file}:mine"], **options, **QUIET, resume=True)


def test_the_revision_is_that_of_the_own_checkout_or_the_version(tmp_path):
    def git(*command):
        whoever = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *whoever, *command], cwd=tmp_path, check=True, capture_output=True)

    package = tmp_path / "kvjax"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert revision(package) == kvjax.__version__
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert revision(package) == kvjax.__version__
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "kvjax"\n')
    found = git("rev-parse", "--short=12", "HEAD").stdout.decode().strip()
    assert revision(package) == f"{found}-dirty"
    installed = tmp_path / "venv" / "site-packages" / "kvjax"
    installed.mkdir(parents=True)
    assert revision(installed) == kvjax.__version__


# What weighs more than the full cache of a short text: beside the older slots, EM-LLM holds as many for the
# newest tokens as its preset says, and DecoQuant as many as it factors together; ShadowKV's rank of 32 is
# above this model's 16 channels.
HEAVY = {"em-llm": 2.0, "decoquant": 9.0, "shadowkv": 1.4}


@pytest.mark.rotating
@pytest.mark.parametrize("method", [id for id in EVERY if id not in (*ALWAYS, *WELL_KNOWN)])
def test_a_method_answers_in_a_comparison_and_weighs_what_its_report_says(method, tmp_path):
    model = kvjax.load("recall-tiny")
    if method not in {entry.label for entry in plan_cells(model, ["all"], [0.5], "short")}:
        pytest.skip(f"{method} wants a fit")
    found = compare(
        model=model, methods=[method], budgets=[0.5], tasks=["get"], samples=2, protocols=("agnostic",),
        out=tmp_path / "run", **QUIET,
    )  # fmt: skip
    (cell,) = [cell for cell in found.cells if cell.method == method]
    rows = [row for row in found.rows if row["method"] == method]
    assert len(rows) == 2 and 0 <= cell.tasks["get"].mean <= 1
    full = next(c.kept_bytes for c in found.cells if c.method == "full")
    # Blocks in host memory may have a copy on the device.
    assert 0 < cell.kept_bytes <= cell.host_bytes + HEAVY.get(method, 1.2) * full


@pytest.mark.rotating
def test_multi_turn_asks_every_question_on_one_context(tmp_path):
    found = compare(
        methods=["full"], budgets=[0.5], tasks=["get", "chase"], samples=2, protocols=("multi-turn",),
        out=tmp_path / "turns", **QUIET,
    )  # fmt: skip
    full = [r for r in found.rows if r["method"] == "full"]
    assert len(full) == 2 * 5 and np.mean([r["score"] for r in full]) > 0.8


def test_a_conversation_beyond_the_last_position_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match="multi-turn prompts .* has 2048 positions: give a --length"):
        compare(
            methods=["full"], protocols=("multi-turn",), length=2040, samples=1, out=tmp_path / "a", **QUIET
        )
    assert not (tmp_path / "a").exists()


def test_a_window_larger_than_a_budget_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match=r"Recent\(tokens=16\)\), more than the budget of 8 slots"):
        kvjax.compare(methods=["snapkv"], budgets=[8], samples=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_scores_join_the_report_of_a_run_that_is_done(small, tmp_path, monkeypatch):
    asked = []

    def draw(model, entries, protocol, sample):
        asked.append((len(entries), protocol, sample.id))
        return [Picture("snapkv · 0.25", 0.5, 0.75, b"png")]

    monkeypatch.setattr("kvjax.eval.compare.draw_pictures", draw)
    out = shutil.copytree(small.out, tmp_path / "again")
    assert "What each method scores" not in (out / "report.html").read_text()
    found = compare(**SMALL, **QUIET, out=out, resume=True, scores=True)
    assert asked == [(5, "agnostic", small.rows[0]["id"])]
    assert "75% of the oracle's attention is kept" in (out / "report.html").read_text()
    assert found.metrics["command"].endswith("--scores")
    assert without_times(found.rows) == without_times(small.rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(methods="snapkv"), r"methods is 'snapkv', expected a list: write methods=\['snapkv'\]"),
        (dict(budgets=0.5), r"budgets is 0.5, expected a list: write budgets=\[0.5\]"),
        (dict(seed=-1), "seed is -1, expected a whole number >= 0"),
        (dict(length=64.5), "length is 64.5, expected a whole number"),
        (dict(length=1), "--length 1: .* need a recall context of 58 tokens or more"),
    ],
)
def test_options_of_another_kind_are_refused_before_any_work(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        unwrap(compare)(**options, out=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_scores_go_with_questions(tmp_path):
    with pytest.raises(InputError, match="--scores was given with --text, expected questions"):
        compare(text=__file__, scores=True, out=tmp_path / "run", **QUIET)


@pytest.mark.parametrize("samples", [0, 10**11])
def test_contexts_are_a_number_that_can_be_drawn(samples, tmp_path):
    with pytest.raises(InputError, match="samples is .*, expected"):
        compare(samples=samples, out=tmp_path / "run", **QUIET)


def test_the_line_below_a_table_names_the_preset_and_not_what_it_binds(small):
    lines = PRINTED.getvalue().splitlines()
    (line,) = [x for x in lines if "compiled programs" in x]
    assert line.endswith("GiB, preset short") and not any("window" in x for x in lines)
