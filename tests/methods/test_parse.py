"""Methods and budgets as text: what they mean, their plainest form, and what is said about wrong ones."""

import pytest

from kvjax.errors import InputError
from kvjax.grammar import chain
from kvjax.methods import METHODS, method, takes_budget
from kvjax.methods.parse import from_spec, parse_budget, parse_method

MINE = "from kvjax.methods import snapkv\ndef short(budget, window=8): return snapkv(budget, window=window)\n"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)


@pytest.mark.parametrize("id", METHODS)
def test_an_id_is_the_method_of_the_table(id):
    label, build = parse_method(id)
    assert label == id
    assert build.takes_budget == takes_budget(id)
    budget = 0.25 if takes_budget(id) else None
    assert build(budget) == method(id, **({"budget": 0.25} if budget else {}))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" Knorm ", "l2compress"),
        ("sink_recent", "sink-recent"),
        ("snapkv:window=16,variant=kvpress", "snapkv:variant=kvpress,window=16"),
        ("snapkv : window = 16", "snapkv:window=16"),
        ("snapkv(window=16, variant=kvpress)", "snapkv:variant=kvpress,window=16"),
        ("snapkv (window=16,)", "snapkv:window=16"),
        ("snapkv() + kivi(bits=2)", "snapkv + kivi:bits=2"),
        ("mine.py:short(window=3)+int8()", "mine.py:short:window=3 + int8"),
        ("snapkv+kivi:bits=2", "snapkv + kivi:bits=2"),
        ("snapkv: + int8", "snapkv + int8"),
        ("ape(contexts=(9, 8,), scale=1.0)+int8", "ape:contexts=(9, 8),scale=1.0 + int8"),
        ("ape: contexts = (9, 8)", "ape:contexts=(9, 8)"),
        ("int4:group=none", "int4:group=None"),
        ("mine.py:short", "mine.py:short"),
        ("./mine.py:short:window=3+int8", "./mine.py:short:window=3 + int8"),
    ],
)
def test_a_text_has_one_plain_form_that_means_the_same(text, label, mine):
    found, build = parse_method(text)
    assert found == label
    again, rebuilt = parse_method(label)
    assert again == label
    budget = 0.5 if build.takes_budget else None
    assert build(budget) == rebuilt(budget)


def test_hyper_parameters_reach_the_method():
    _, build = parse_method("snapkv:window=16,variant='kvpress'")
    assert build(0.25) == method("snapkv", budget=0.25, window=16, variant="kvpress")
    _, build = parse_method("h2o:recent=1e-1")
    assert build(64) == method("h2o", budget=64, recent=0.1)
    _, build = parse_method("int4:group=None")
    assert build() == method("int4", group=None)


def test_a_chain_shares_the_budget_with_the_parts_that_take_one(mine):
    _, build = parse_method("mine.py:short+kivi:bits=4")
    made = build(0.25)
    assert made.spec == (
        "mine.py:short + kivi",
        ("chain", ("mine.py:short", (("budget", 0.25),)), ("kivi", (("bits", 4),))),
    )
    assert (made.keep, made.store) == (
        method("snapkv", budget=0.25, window=8).keep,
        method("kivi", bits=4).store,
    )


def test_a_budget_in_the_text_stays():
    label, build = parse_method("snapkv:budget=64")
    assert (label, build.takes_budget) == ("snapkv:budget=64", False)
    assert build() == method("snapkv", budget=64)
    with pytest.raises(
        InputError, match="snapkv:budget=64 has its budget in its name, got budget 0.5: leave"
    ):
        build(0.5)


def test_defaults_fill_in_what_the_text_leaves_out():
    defaults = {"snapkv": {"window": 8, "kernel": 3}, "kivi": {"residual": 32}}
    label, build = parse_method("snapkv:window=16+kivi", defaults)
    assert label == "snapkv:window=16 + kivi"
    assert build(0.5) == chain(method("snapkv", budget=0.5, window=16, kernel=3), method("kivi", residual=32))


def test_a_spec_leads_back_to_its_method(mine):
    for text in ("full", "snapkv:window=16", "adakv+int4", "mine.py:short+kivi"):
        _, build = parse_method(text)
        made = build(0.5 if build.takes_budget else None)
        assert from_spec(made.spec) == made


BAD = {
    "unknown method": ("snapvk", r"unknown method 'snapvk': did you mean 'snapkv'\?; see `kvjax methods`"),
    "nothing near": ("zzzz", r"unknown method 'zzzz': known methods: full, random, .*; see `kvjax methods`"),
    "empty": ("  ", r"method '  ' is empty, expected an id such as snapkv"),
    "empty part": ("snapkv+", r"unknown method 'snapkv\+'"),
    "unknown hyper-parameter": ("snapkv:windw=3", r"has no hyper-parameter 'windw': did you mean 'window'\?"),
    "no value": ("snapkv:window", r"'window' in 'snapkv:window' is no hyper-parameter, expected key=value"),
    "twice": ("snapkv:window=1,window=2", r"'window' is given twice .*, expected once: remove one"),
    "refused value": ("kivi:bits=3", r"kivi: bits must be one of 1, 2, 4, 8, got 3"),
    "unknown variant": ("snapkv:variant=x", r"variant must be one of 'grouped', 'paper', 'kvpress', got 'x'"),
    "bad budget inside": ("snapkv:budget=1.5", r"budget must be a fraction in \(0, 1\]"),
    "two keeps": ("snapkv+h2o", r"at most one keep; this chain has two, of snapkv and h2o: leave one out"),
    "cannot work together": ("h2o+kivi", r"needs a store that encodes tokens one by one"),
    "no function": ("mine.py", r"'mine\.py' names a file but no function, expected mine\.py:my_method"),
    "no such function": ("mine.py:shirt", r"mine\.py has no function 'shirt': did you mean short\?"),
    "no such file": ("other.py:f", r"other\.py cannot be read .*give its path"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_wrong_method_says_what_to_write(text, message, mine):
    with pytest.raises(InputError, match=message):
        parse_method(text)


def test_a_budget_for_a_method_without_one_is_refused():
    with pytest.raises(InputError, match="method int8 takes no budget, got budget 0.5: leave the budget out"):
        parse_method("int8")[1](0.5)
    with pytest.raises(InputError, match="method 'h2o' needs budget="):
        parse_method("h2o")[1]()


@pytest.mark.parametrize(
    ("text", "value"), [("0.25", 0.25), ("1.0", 1.0), ("1", 1), ("64", 64), ("1e-2", 0.01)]
)
def test_a_budget_is_a_fraction_or_a_number_of_slots(text, value):
    found = parse_budget(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["half", "", "nan", "inf", "true", "0.5x", "none"])
def test_a_budget_that_is_no_number_says_so(text):
    with pytest.raises(InputError, match="is not a number, expected a fraction in .* or a number of slots"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "0.0", "-0.5"])
def test_a_budget_out_of_range_says_so(text):
    with pytest.raises(InputError, match="budget must be a fraction in"):
        parse_budget(text)


def test_a_spec_without_a_name_is_refused():
    with pytest.raises(InputError, match="'custom' was not built by a name: build it with kvjax.method"):
        from_spec(("custom", ("repr",)))
