"""Presets: what a .gin file binds, which budget holds, and one sentence with its place for what is wrong."""

import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gin
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.run.cellplan import plan_cells
from kvjax.grammar.refuse_keep import crowded
from kvjax.io.gin_bindings import load_preset
from tests.sweep import sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def file(text, name="mine.gin"):
        (tmp_path / name).write_text(text)
        return name

    return file


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


def test_a_preset_takes_a_method_as_text(write):
    text = "hyper.snapkv = 'snapkv(window=4, variant=paper)'\nhyper.ada_kv = 'AdaKV:page=8'"
    assert load_preset(write(text)) == {"snapkv": {"window": 4, "variant": "paper"}, "adakv": {"page": 8}}


def test_ids_aliases_and_included_files_are_read(write):
    write("hyper.kivi = {'bits': 4}\nhyper.snapkv = {'window': 4}\n", "base.gin")
    found = load_preset(
        write("include 'base.gin'\nhyper.snapkv = {'kernel': 3}\nhyper.ada_kv = {'page': 8}\n")
    )
    assert found == {"kivi": {"bits": 4}, "snapkv": {"kernel": 3}, "adakv": {"page": 8}}


@pytest.mark.parametrize("name", ["short", "long"])
def test_a_shipped_preset_has_only_known_names(name):
    assert load_preset(name)["snapkv"]["kernel"] == 5


def test_every_layer_of_a_small_model_chooses_and_not_the_first_for_all(model):
    """In four layers, a second layer that copies is half of the model, and layer 0 sees single tokens."""
    cells = plan_cells(model, ["chunkkv", "windowkv", "gemfilter"], (0.25,), "short")
    made = {cell.label: cell.method for cell in cells}
    assert made["chunkkv"].keep.reuse == made["windowkv"].keep.reuse == 1
    assert made["gemfilter"].reread.after(model.config.layers) == 1


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("preset", "tokens"), sweep([("short", 480), ("short-deep", 960)], ("short-deep", 960))
)
def test_every_method_has_room_for_what_it_protects_at_every_budget(model, preset, tokens):
    cells = plan_cells(model, ["all"], (0.5, 0.25, 0.125), preset)
    assert {cell.label for cell in cells} >= {"snapkv", "criticalkv", "gemfilter", "defensivekv"}
    keeps = [cell.method.keep for cell in cells if cell.method.keep is not None]
    assert [why for keep in keeps if (why := crowded(keep, tokens))] == []


BAD = {
    "method": ("# c\nhyper.snapkw = {'window': 16}", r"mine\.gin, line 2: .*did you mean 'snapkv'\?"),
    "hyper-parameter": ("hyper.snapkv = {'windw': 16}", r"line 1: .*did you mean 'window'\?"),
    "a number": ("hyper.snapkv = {1: 2}", r"line 1: .*has no hyper-parameter 1: it takes budget,"),
    "range": ("\nhyper.snapkv = {'window': 0}", r"line 2: snapkv: window must be a whole number >= 1, got 0"),
    "included": ("include 'bad.gin'", r"bad\.gin, line 1: unknown method 'snapkq'"),
    "include": ("\n\ninclude 'none.gin'", r"mine\.gin, line 3: no file none\.gin to include: .*; write"),
    "no dict": ("hyper.snapkv = 5", r"line 1: hyper\.snapkv is 5, expected its hyper-parameters: write"),
    "another method": ("hyper.snapkv = 'kivi'", r"line 1: hyper\.snapkv is 'kivi', expected its hyper"),
    "a chain": ("hyper.snapkv = 'snapkv + int8'", r"line 1: 'snapkv \+ int8' is more than one method"),
    "in a text": ("hyper.snapkv = 'snapkv(windw=4)'", r"line 1: .*did you mean 'window'\?"),
    "brace": ("hyper.snapkv = {'window': 16", r"mine\.gin, line \d: .*is a bracket or a quote left open\?"),
    "name": ("hypr.snapkv = {'window': 1}", r"line 1: unknown section 'hypr': did you mean hyper"),
    "word": ("hyper.snapkv = {'window': x}", r"line 1: malformed node .* a name: write"),
    "reference": ("hyper.snapkv = @foo", r"line 1: @foo would run Python code: write"),
    "import": ("import nowhere_at_all", r"line 1: 'import nowhere_at_all' would run Python code: write"),
    "two names": (
        "hyper.adakv = {'page': 8}\nhyper.ada_kv = {'page': 4}",
        r"line [12]: hyper\.ada_?kv and hyper\.ada_?kv are one method, adakv, expected one of them: remove",
    ),
    "call": ("hyper.snapkv = {'window': [@os.system()]}", r"line 1: @os\.system\(\) would run Python"),
    "import from": ("from __gin__ import os", r"line 1: .from __gin__ import os. would run Python"),
    "unused macro": ("X = @os.system()", r"line 1: @os\.system\(\) would run"),
    "itself": ("include 'mine.gin'", r"mine\.gin, line 1: mine\.gin includes itself"),
    "macro of itself": ("X = [%X]\nhyper.snapkv = %X", r"line 2: the macro %X stands for itself"),
    "scope": ("a/hyper.snapkv = {}", r"line 1: a/hyper\.snapkv binds in a scope, which nothing reads"),
    "key": ("hyper.snapkv = {[1]: 2}", r"mine\.gin: unhashable type: 'list': write"),
    "elsewhere": ("include '/etc/hostname'", r"line 1: /etc/hostname lies outside the folders"),
    "depth": ("hyper.snapkv = " + "[" * 9999, r"mine\.gin.*(nested too deeply|left open)"),
    "no equals": ("hyper.snapkv {}", r"line 1: Couldn't parse statement.*: write"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_said_in_one_line_with_its_place(text, message, write, caplog):
    write("hyper.snapkq = {}", "bad.gin")
    with pytest.raises(InputError, match=message) as caught:
        load_preset(write(text))
    assert "\n" not in str(caught.value) and not caplog.records
    assert load_preset("short")  # and nothing of it is left behind


def test_a_preset_runs_no_module_and_calls_no_function(write, tmp_path, monkeypatch):
    (tmp_path / "acts.py").write_text(f"open({str(tmp_path / 'done')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    lines = ("import acts", "from __gin__ import dynamic_registration\nimport os\n", "include 'other.gin'")
    write("import acts", "other.gin")
    for text in lines:
        with pytest.raises(InputError, match="would run Python code"):
            load_preset(write(text + "\nhyper.snapkv = {'window': @os.getcwd()}"))
    for text in ("hyper.snapkv = 'acts.py:f'", "hyper.snapkv = 'per_layer(acts.py:f, (1,))'"):
        with pytest.raises(InputError):
            load_preset(write(text))
    assert not (tmp_path / "done").exists() and "acts" not in sys.modules


def test_macros_that_grow_without_bound_are_refused(write):
    lines = [f"M{i} = [{', '.join([f'%M{i + 1}'] * 10)}]" for i in range(12)]
    with pytest.raises(InputError, match="stand for more than 100000 values"):
        load_preset(write("\n".join([*lines, "M12 = 1", "hyper.snapkv = {'window': %M0}"])))


def test_threads_read_alike_and_bindings_of_the_program_and_its_log_stay():
    with gin.unlock_config():
        gin.parse_config("ours = 3")
    before = gin.config_str(), logging.root.manager.disable
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(load_preset, ["short", "long"] * 20))
    assert found[::2] == [load_preset("short")] * 20 and found[1::2] == [load_preset("long")] * 20
    assert (gin.config_str(), logging.root.manager.disable) == before
    gin.clear_config()


def test_a_block_binds_what_its_lines_bind(write):
    assert load_preset(write("hyper:\n    snapkv = {'window': 4}\n")) == {"snapkv": {"window": 4}}


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "mine.gin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"mine\.gin: .*write hyper\."):
        load_preset(str(tmp_path / "mine.gin"))


def test_given_budgets_win_over_those_of_a_preset(write, model):
    preset = write("hyper.snapkv = {'budget': 0.125, 'window': 4}\n")

    def budgets(given, method="snapkv"):
        entries = plan_cells(model, [method], given, preset)
        return [e.method.keep.budget.amount for e in entries if e.label == method]

    assert budgets([0.5, 0.25]) == [0.5, 0.25]
    assert budgets(None) == [0.125]
    assert budgets([0.5], "snapkv:budget=64") == [64]


def test_the_example_on_the_page_is_a_preset(write, monkeypatch):
    page = (ROOT / "docs/methods.md").read_text()
    (text,) = re.findall(r"```\n(# Windows.*?)```", page, re.DOTALL)
    file = Path(write(text)).resolve()
    monkeypatch.chdir(ROOT)
    found = load_preset(str(file))
    assert found["snapkv"] == {"window": 8, "kernel": 3} and found["expected-attention"] == {"future": 64}
    assert found["kivi"] == load_preset("short")["kivi"]
