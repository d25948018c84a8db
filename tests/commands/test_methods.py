"""`kvjax methods`: which methods filters leave, what a card says, and that its sentence is the method."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import kvjax
from kvjax.commands import methods_cards
from kvjax.commands.code_reading import DECODED, IN_PLACE
from kvjax.commands.main import main
from kvjax.commands.methods import filtered, listing
from kvjax.commands.methods_cards import PLAIN, VERBS, about_family, card, docstring_of, families, shown
from kvjax.compat.model_fit import check_fit
from kvjax.eval.report.leaderboard import Line
from kvjax.grammar import Method
from kvjax.grammar.to_text import written
from kvjax.methods import METHODS
from tests.aot.known import DECODED as DECODED_THERE
from tests.aot.known import KNOWN
from tests.sweep import sweep

BY_ID = {row["id"]: row for row in listing()}


def listed(capsys, *words: str) -> list[str]:
    assert main(["methods", *words, "--json"]) == 0
    return [row["id"] for row in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--family", "quant"), "family", "quant"),
        (("--phase", "decode"), "phase", "decode"),
        (("--training", "yes"), "training", True),
        (("--training", "no"), "training", False),
    ],
)
def test_a_filter_leaves_those_and_only_those_that_are_so(words, field, value, capsys):
    found = listed(capsys, *words)
    assert found == [id for id, row in BY_ID.items() if row[field] == value] and found


def test_filters_act_together_and_words_are_searched_in_titles_and_docstrings(capsys):
    assert "magicpig" in listed(capsys, "--search", "Hash TABLES")
    assert listed(capsys, "--search", "PyramidKV", "--family", "budget-layer") == ["pyramidkv"]
    assert set(listed(capsys, "--search", "cur", "--family", "selection-static")) == {
        row["id"]
        for row in filtered(list(BY_ID.values()), family="selection-static")
        if "cur" in f"{row} {METHODS[row['id']].__doc__}".lower()
    }


@pytest.mark.parametrize("id", ["snapkv", "h2o", "kivi"])
def test_what_is_called_so_comes_first_and_what_only_mentions_it_last(id, capsys):
    found = listed(capsys, "--search", id)
    named = [i for i, other in enumerate(found) if id in f"{other} {BY_ID[other]['title']}".lower()]
    assert found[0] == id and len(found) > len(named) and named == list(range(len(named)))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--family quantt", "--family is 'quantt', expected one of .*did you mean quant?"),
        ("--phase prefil", "--phase is 'prefil', expected one of .*did you mean prefill?"),
        ("--training maybe", "--training is 'maybe', expected one of yes, no"),
        ("--search zzz --family quant", "no method is left by --family quant --search zzz.*leave out one"),
        ("snapk", "unknown method 'snapk': did you mean 'snapkv'?"),
        ("snapkv --phase both", "--phase was given with the method 'snapkv'.*leave out --phase"),
    ],
)
def test_what_nothing_is_called_is_one_line_with_the_nearest_name(words, told, capsys):
    assert main(["methods", *words.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(told, error) and error.count("\n") == 1


def words_of(word, found: dict[str, type]) -> dict[str, type]:
    """Collect the classes of all words in a sentence, by name."""
    if dataclasses.is_dataclass(word):
        found[type(word).__name__] = type(word)
        for field in dataclasses.fields(word):
            words_of(getattr(word, field.name), found)
    elif isinstance(word, tuple):
        for one in word:
            words_of(one, found)
    return found


@pytest.mark.parametrize("id", METHODS)
def test_the_sentence_of_a_card_is_the_method_when_python_reads_it(id):
    method = shown(id)
    read = eval(written(method), words_of(method, {}))
    assert dataclasses.replace(read, spec=method.spec) == method


def test_a_sentence_is_broken_where_it_is_long_and_operators_keep_their_order():
    score = kvjax.method("r-kv", budget=0.25).keep.score
    assert len(written(score).splitlines()) == 4 and len(written(score, 200).splitlines()) == 1
    assert eval(written(score), words_of(score, {})) == score
    lines = written(kvjax.method("kvquant"), 70).splitlines()
    assert max(map(len, lines)) <= 70 and lines[0] == "Method("


@pytest.mark.rotating
def test_a_card_has_the_docstring_in_two_and_every_hyper_parameter():
    found = card("kivi")
    whole = " ".join((METHODS["kivi"].__doc__ or "").split())
    assert found.title in whole and found.about.replace("\n", " ") in whole
    assert found.deviations.startswith("keys and values leave") and found.deviations in whole
    assert "Deviation" not in found.about + found.title
    assert [x.name for x in found.hyper] == ["bits", "group", "residual"]
    assert found.hyper[0] == ("bits", "2", "one of 1, 2, 4, 8")
    assert card("snapkv").hyper[0].default == "" and card("snapkv").fit == ""
    assert card("kvzap").fit == "kvjax fit kvzap --out kvzap.safetensors"


@pytest.mark.rotating
def test_a_card_says_whether_a_kernel_reads_the_codes():
    """As the record of compiled steps on a TPU knows them."""
    for id in ("int8", "kivi"):
        assert id not in KNOWN["v5e:2x2"] and card(id).codes == IN_PLACE
    plain = [id for id, why in KNOWN["v5e:2x2"].items() if why == DECODED_THERE and id in METHODS]
    assert {"int4", "think", "qserve"} <= set(plain)
    for id in (*plain, "commvq", "xquant-cl", "decoquant", "kvquant", "aqua-kv", "kvtuner"):
        assert card(id).codes == DECODED, id
    assert card("snapkv").codes == card("quest").codes == ""


@pytest.mark.parametrize("id", METHODS)
def test_nothing_of_a_docstring_is_lost_on_a_card(id):
    said = " ".join(docstring_of(id)).split()
    assert sorted(said) == sorted(
        word for word in (METHODS[id].__doc__ or "").split() if word not in ("Deviation:", "Deviations:")
    )


@pytest.mark.parametrize(
    "id",
    sweep(["snapkv", "kivi", "quest", "h2o", "palu", "minicache"], "snapkv"),
)
def test_what_a_card_chains_with_runs_together_and_what_it_does_not_is_refused_for_that_reason(id):
    found, own = card(id), shown(id)
    for kind, ids in found.chains.items():
        verb = next(verb for verb, name in VERBS.items() if name == kind)
        assert all(getattr(kvjax.chain(own, shown(other)), verb) is not None for other in ids)
    for reason, ids in found.refused.items():
        for other in ids:
            with pytest.raises(ValueError, match=re.escape(reason)):
                check_fit(kvjax.chain(own, shown(other)), PLAIN)
    told = {other for ids in (*found.chains.values(), *found.refused.values()) for other in ids}
    with_both = [x for x in METHODS if x not in told and x != id and shown(x) != Method()]
    for other in with_both:
        with pytest.raises(ValueError, match="at most one"):
            kvjax.chain(own, shown(other))


def test_a_card_is_printed_with_its_line_of_the_leaderboard(capsys, monkeypatch):
    line = Line("snapkv", 0.25, "aware", 0.5, 0.4, 0.6, 26.0, 26.0, {"get": 0.75}, (0.5,), False)
    monkeypatch.setattr(methods_cards, "lines_of", lambda id: (line,) if id == "snapkv" else ())
    assert main(["methods", "SnapKV"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "kvjax.method('snapkv', budget=0.25) is Method(" in out and "arXiv:2404.14469 (2024)" in out
    assert "0.25 aware 50 [40–60] 26.0% get 75" in out and "window 64 a whole number >= 1" in out
    assert main(["methods", "snapkv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["info"]["id"] == "snapkv" and found["lines"][0]["tasks"] == {"get": 0.75}


def test_a_list_says_what_families_have_in_common(capsys):
    assert main(["methods"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for family in families():
        assert f"{family} {' '.join(about_family(family).split())}" in out


@pytest.mark.rotating
def test_a_press_of_kvpress_finds_its_method(capsys):
    assert "snapkv" in listed(capsys, "--search", "SnapKVPress")
    named = {id for id in METHODS if METHODS[id].paper.kvpress}
    assert set(listed(capsys, "--search", "of kvpress")) >= named
    assert main(["methods", "--search", "FinchPress"]) == 0
    assert "FinchPress of kvpress is finch:variant=kvpress" in " ".join(capsys.readouterr().out.split())
    assert main(["methods", "finch"]) == 0
    said = "FinchPress is finch:variant=kvpress here. Same scores and same tokens? Yes, at the end of"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["methods", "snapkv", "--json"]) == 0
    press = json.loads(capsys.readouterr().out)["press"]
    assert press == {"name": "SnapKVPress", "hyper": "variant=kvpress", "same": "yes"}


# --- short lists, architectures, methods of a file ----------------------------------------------------------

KEYDIFF = f"{Path(__file__).parents[2]}/docs/examples/keydiff.py:keydiff"
MADE = [one.id for one in kvjax.architectures()]


@pytest.mark.parametrize(("words", "ids"), [("methods --brief", METHODS), ("architectures --brief", MADE)])
def test_a_brief_list_has_one_line_for_each(words, ids, capsys):
    assert main(words.split()) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*ids]


def test_architectures_are_listed_found_and_refused(capsys):
    assert main(["architectures"]) == 0
    out = capsys.readouterr().out
    assert all(f"{id} " in out for id in MADE) and f"{len(MADE)} architectures." in out
    assert main(["architectures", "YOCO", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["id"] == "yoco" and row["url"] == "https://arxiv.org/abs/2405.05254"
    assert main(["architectures", "--search", "one layer's latents", "--brief"]) == 0
    assert capsys.readouterr().out.startswith("clla ")
    for words, told in (
        (["yocoo"], "did you mean 'yoco'"),
        (["--family", "low-rnk"], "did you mean low-rank"),
        (["--search", "zzz"], "no architecture has all words of 'zzz'"),
    ):
        assert main(["architectures", *words]) == 2
        assert told in capsys.readouterr().err


def test_a_method_of_a_file_has_a_card(capsys):
    assert main(["methods", KEYDIFF]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("arXiv:2504.15364", "keeps the keys that are least like", "Keep(score=KeyDistinctness()"):
        assert text in out
    assert "budget must be given" in out
    assert main(["methods", f"{KEYDIFF}(budget=64)", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["call"] == f"kvjax.method('{KEYDIFF}(budget=64)')" and "Budget(64)" in found["sentence"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([KEYDIFF[:-1]], "has no function 'keydif': did you mean keydiff?"),
        (["snapkv(window=3)"], 'try kvjax explain "snapkv(window=3)"'),
        (["snapkv + kivi"], 'try kvjax explain "snapkv + kivi"'),
        (["snapkv", "--brief"], "--brief was given with the method 'snapkv'"),
    ],
)
def test_what_has_no_card_says_what_to_ask(words, told, capsys):
    assert main(["methods", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
