"""Methods and budgets as text: what they mean, their plainest form, and what is said about wrong ones."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.eval.run.cellplan import plan_cells
from kvjax.grammar import Budget, Keep, Method, Store, chain
from kvjax.keep.algebra import Pool
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.scores.score import KeyNorm
from kvjax.methods import METHODS, method, takes_budget
from kvjax.methods.parse import from_spec, parse_budget, parse_method
from kvjax.methods.user import from_file
from kvjax.store.affine import Affine

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
        ("'mine.py:short'(window=3)", "mine.py:short:window=3"),
        ("per_layer(snapkv(window=8), (None, 0.5))", "per_layer(snapkv(window=8), shares=(None, 0.5))"),
        ("per_layer(snapkv:window=8,[1,0.5])+ int8", "per_layer(snapkv(window=8), shares=(1, 0.5)) + int8"),
        ("by_layer([none, snapkv + int8])", "by_layer([full, snapkv + int8])"),
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


def test_a_chain_takes_texts_beside_methods_and_words():
    want = method("snapkv(budget=0.25) + kivi(bits=2)")
    assert kvjax.chain("snapkv(budget=0.25)", "kivi(bits=2)") == want
    assert kvjax.chain("snapkv(budget=0.25)", method("kivi", bits=2)) == want
    assert kvjax.chain("h2o(budget=64) + int8", "quest(budget=32)") == method(
        "h2o(budget=64) + int8 + quest(budget=32)"
    )
    assert repr(kvjax.chain(method("snapkv", budget=0.25), "kivi(bits=2)")) == repr(want)
    with pytest.raises(ValueError, match="did you mean 'kivi'"):
        kvjax.chain("snapkv(budget=0.25)", "kivy")


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
    "empty part": ("snapkv+", r"'snapkv\+' ends with a \+, expected a method after it"),
    "empty part behind brackets": ("snapkv() + ", r"ends with a \+, expected a method after it"),
    "plus after budget": ("snapkv(budget=0.25) +", r"ends with a \+, expected a method after it: write"),
    "plus first": ("+ snapkv", r"'\+ snapkv' begins with a \+, expected a method before it: write"),
    "plus alone": ("+", r"'\+' begins with a \+, expected a method before it"),
    "two plus": ("snapkv ++ kivi", r"has a \+ without a method, expected a method after it: write"),
    "plus before brackets": ("snapkv()+()", r"has a \+ without a method, expected a method after it"),
    "plus before number": ("snapkv + 3", r"has a \+ without a method, expected a method after it"),
    "plus inside": ("per_layer(snapkv +, (1, 0.5))", r"'snapkv \+' ends with a \+, expected a method"),
    "brackets alone": ("()", r"'\(\)' names no method, expected an id before the brackets"),
    "name in brackets": ("(snapkv)", r"'\(snapkv\)' names no method, expected an id before the brackets"),
    "opened": ("snapkv(", r"'snapkv\(' has a bracket too few or too many, expected one pair: write id"),
    "closed": ("snapkv)", r"'snapkv\)' has a bracket too few or too many, expected one pair: write id"),
    "open tuple": ("ape(contexts=((1, 2))", r"has a bracket too few or too many, expected one pair"),
    "nested tuple": ("ape(contexts=((1, 2), 3))", r"contexts must be a tuple of whole .*got \(\(1, 2\), 3\)"),
    "unknown function": ("perlayer(snapkv, (1, 0.5))", r"'perlayer': did you mean per_layer\(\.\.\.\)\?"),
    "unknown argument": ("per_layer(snapkv, shres=(1, 1))", r"no argument 'shres': did you mean 'shares'\?"),
    "lacking argument": ("per_layer(snapkv)", r"has no shares, expected per_layer\(method, shares, page\)"),
    "argument too many": ("merging(snapkv, 0.5, 3)", r"has too many arguments, expected method, threshold"),
    "argument twice": ("merging(snapkv, 0.5, threshold=0.5)", r"'threshold' is given twice"),
    "inside": ("merging(snapvk)", r"unknown method 'snapvk': did you mean 'snapkv'"),
    "open bracket": ("snapkv(budget=0.5", r"has a bracket too few or too many, expected one pair"),
    "unknown hyper-parameter": ("snapkv:windw=3", r"has no hyper-parameter 'windw': did you mean 'window'\?"),
    "no value": ("snapkv:window", r"'window' in 'snapkv:window' is no hyper-parameter, expected key=value"),
    "twice": ("snapkv:window=1,window=2", r"'window' is given twice .*, expected once: remove one"),
    "refused value": ("kivi:bits=3", r"kivi: bits must be one of 1, 2, 4, 8, got 3"),
    "unknown variant": ("snapkv:variant=x", r"variant must be one of 'grouped', 'paper', 'kvpress', got 'x'"),
    "bad budget inside": ("snapkv:budget=1.5", r"budget must be a fraction in \(0, 1\]"),
    "two keeps": ("h2o+snapkv", r"two keeps only in turn; .*, of h2o and snapkv: the first evicts"),
    "cannot work together": ("keepkv+kivi", r"writes slots one by one while decoding .*and this store"),
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
        from_spec(("custom", ()))


# --- one language -------------------------------------------------------------------------------------

SNAPKV, TOVA = (kvjax.method(id, budget=0.5) for id in ("snapkv", "tova"))
BY_HAND = Method(Keep(0.5 * (KeyNorm() + 0.25) * KeyNorm() >> Pool(3), Budget(4), Uniform()))
MADE = {
    "chain": chain(method("snapkv", budget=64, window=8), method("kivi", bits=4)),
    "two keeps": chain(SNAPKV, TOVA),
    "numbers that are equal": method("h2o", budget=1, recent=0.5),
    "texts": method("snapkv", budget=1.0, variant="paper"),
    "none": method("int4", group=None),
    "several values": method("ape", contexts=(9, 8)),
    "per layer": kvjax.per_layer(SNAPKV, [None, 1, 0.5]),
    "per layer in pages": kvjax.per_layer("snapkv:budget=0.5 + int8", [*np.array([1, 0.5])], page=16),
    "by layer": kvjax.by_layer([None, "int8", SNAPKV, chain(SNAPKV, method("kivi"))]),
    "tiered": kvjax.tiered(kvjax.method("cake", budget=0.25), bits=4, group=None),
    "in chunks": chain(kvjax.in_chunks(kvjax.in_blocks(SNAPKV, 32), 128), method("int8")),
    "merging": kvjax.merging(SNAPKV, 0.5),
    "phased": kvjax.phased(SNAPKV, kvjax.while_decoding(kvjax.method("keydiff", budget=0.5))),
    "by hand": BY_HAND,
    "by hand and chained": chain(BY_HAND, Store(Affine(8))),
    "by hand, per layer": kvjax.per_layer(BY_HAND, (1, 0.5)),
    "by hand, by layer": kvjax.by_layer([BY_HAND, SNAPKV]),
    "changed": dataclasses.replace(SNAPKV, keep=dataclasses.replace(SNAPKV.keep, budget=Budget(8))),
    "a step's": SNAPKV.decode_part(),
    "fitted": kvjax.method("chai", fitted="recall-tiny/chai"),
}


def assert_same_method(made, wanted):
    """Equal ones whose numbers are of the same kinds."""
    assert made == wanted and repr(made) == repr(wanted) and hash(made) == hash(wanted)


@pytest.mark.parametrize("id", METHODS)
def test_a_method_is_what_its_repr_builds(id):
    for budget in (0.25, 8192) if takes_budget(id) else (None,):
        made = method(id, **({} if budget is None else {"budget": budget}))
        text = f"{id}(budget={budget})" if budget else id
        assert repr(made) == text and method(text) is made
        # The same in its words alone.
        bare = dataclasses.replace(made, spec=())
        assert repr(bare).startswith("Method(") == (bare != Method())
        assert_same_method(method(repr(bare)), bare)


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_what_is_made_of_methods_is_what_its_repr_builds(made):
    assert_same_method(method(repr(made)), made)
    assert_same_method(parse_method(repr(made))[1](), made)


@pytest.mark.parametrize("folder", ["plain", "a+b, (1)", "open (", "it's", 'two "words"'])
def test_a_method_of_a_file_is_what_its_repr_builds(tmp_path, folder):
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "mine.py"
    file.write_text(MINE)
    made = from_file(f"{file}:short", budget=0.25, window=3)
    assert_same_method(method(repr(made)), made)
    assert_same_method(method(repr(chain(made, method("int8")))), chain(made, method("int8")))
    inside = kvjax.per_layer(made, (1, 0.5))
    assert_same_method(method(repr(inside)), inside)


@pytest.mark.rotating
def test_every_verb_takes_the_same_text(capsys):
    text = "snapkv(budget=0.5, window=4) + int8"
    wanted = chain(method("snapkv", budget=0.5, window=4), method("int8"))
    model, tokens = kvjax.load("recall-tiny"), [[*range(3, 19)]]
    _, cache = kvjax.prefill(model, tokens, method=text, room=8)
    assert_same_method(cache.method, wanted)
    assert_same_method(method("snapkv(window=4) + int8", budget=0.5), wanted)
    assert_same_method(kvjax.pure.static(model, text).method, wanted)
    assert_same_method(kvjax.by_layer([text]).at(0), wanted)
    assert kvjax.prepare(model, text) is model
    entries = plan_cells(model, [text, wanted], None, "short")[-2:]
    assert [entry.label for entry in entries] == ["snapkv:budget=0.5,window=4 + int8", repr(wanted)]
    # A text takes from the preset what it leaves out; a Method is what it is.
    assert repr(entries[0].method) == "snapkv(budget=0.5, kernel=5, window=4) + int8"
    assert_same_method(entries[1].method, wanted)
    assert main(["explain", text]) == 0
    assert "WindowAttention(4)" in capsys.readouterr().out


def test_hyper_parameters_beside_a_text_are_those_of_one_method():
    assert method("snapkv(window=4)", budget=0.5) is method("snapkv", budget=0.5, window=4)
    with pytest.raises(InputError, match="'budget' is given in .* and as a keyword, expected once"):
        method("snapkv(budget=0.25)", budget=0.5)
    with pytest.raises(InputError, match="'window' is given for all of .*, expected in the brackets of one"):
        method("snapkv + int8", budget=0.5, window=4)
    with pytest.raises(InputError, match="is a method, which has its hyper-parameters: leave out"):
        method(SNAPKV, budget=0.5)
    with pytest.raises(InputError, match="method is 3, expected a text"):
        method(3)


UNSAFE = {
    "a name": ("Method(keep=open('x'))", "open is no word of kvjax"),
    "an import": ("Method(keep=__import__('os').system('true'))", "is no word of kvjax and no plain value"),
    "an attribute": ("Method(keep=().__class__)", "is no word of kvjax and no plain value"),
    "a power": ("Method(store=Store(residual=9**9**9))", "is no word of kvjax and no plain value"),
    "a large text": ("Method(spec=('a' * 999999999, ()))", "an operator stands between"),
    "a private word": ("Method(keep=_Keep())", "_Keep is no word of kvjax: did you mean Keep"),
    "deep": ("Method(keep=" + "(" * 5000 + ")" * 5000 + ")", "cannot be read"),
    "long": ("Method(keep=" + "Keep()," * 5000 + ")", "longer than any sentence"),
    "what a word refuses": ("Method(keep=Keep(None, Budget(2.5), Uniform()))", "budget must be a fraction"),
    "an argument too many": ("Method(keep=Keep(None, Budget(1), Uniform(3)))", "Uniform cannot be made so"),
    "no sentence": ("Method(keep=Keep)", "is no word of kvjax and no plain value"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), UNSAFE.values(), ids=UNSAFE)
def test_a_constructor_makes_words_and_nothing_else(text, message):
    with pytest.raises(InputError, match=message):
        method(text)
