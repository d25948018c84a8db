"""Papers that are no method: what is written for each is there, and their names lead to it."""

import ast
import inspect
import re

import pytest

import kvjax
from kvjax.commands.methods import filtered, listing
from kvjax.methods import METHODS
from kvjax.methods.elsewhere import ALSO, CONVERSIONS, LEFT_OUT, OF_WEIGHTS, PARTS, VERBS, elsewhere
from kvjax.methods.registry import ALIASES
from kvjax.train.conversion.conversions import CONVERSIONS as MADE


@pytest.mark.parametrize("name", VERBS)
def test_the_verb_of_a_paper_is_a_function_that_takes_these_arguments(name):
    head, cut, whole = VERBS[name].rpartition("), ")
    call = ast.parse(f"{head})" if cut else whole).body[0].value
    taken = inspect.signature(getattr(kvjax, call.func.attr)).parameters
    assert {word.arg for word in call.keywords} <= taken.keys()
    assert len(call.args) <= sum(p.default is p.empty for p in taken.values())
    assert name not in METHODS and name not in ALIASES


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CacheBlend", r"kvjax\.join\(model, caches, texts=\.\.\., recompute=0\.15\)"),
        ("YOCO", "kvjax architectures yoco"),
        ("mha", "kvjax architectures transformer"),
        ("dsa", "kvjax architectures dsa"),
        ("IndexCache", "kvjax architectures dsa"),
        ("DeepSeek Sparse Attention", "kvjax architectures dsa"),
        ("AWQ", "changes no number of a cache.*kvjax.load"),
        ("os-plus", "changes no number of a cache.*omniquant has shifts and scales"),
        ("Quantizable Transformers", "kvjax architectures clipped-softmax"),
        ("LoRC", "makes another model: see `kvjax convert --help`, for example `lorc`"),
        ("planarquant", "is left out: it rotates 3 channels"),
        ("rope", r"is how keys are rotated: .* Store\(unrotated=True\)"),
        ("SimHash", "is how 'hashevict' and 'magicpig' find keys"),
        ("pq-base", "is the index of 'pqcache' and the code of 'cq'"),
        ("EpiKV", r"is left out: its abstract \(arXiv:2606.26472\) alone was at hand.*'keydiff'"),
        ("TRIM-KV", r"is left out: its gates \(arXiv:2512.03324\) .*'locret'"),
        ("TrimKV", "is left out: its gates"),
        ("ForesightKV", "is left out: its scorer .*'locret' has a scorer that `kvjax fit` makes"),
        ("SkipKV", "is left out: beside evicting sentences .*'r-kv'"),
        ("ThinKV", "is left out: it sorts thoughts .*'morphkv'"),
        ("TCRA-LLM", r"is left out: it writes summaries .*by='llmlingua'\)"),
        ("TACO-RL", r"is left out: it trains the classifier .*by='llmlingua2'\)"),
        ("ICPC", r"is left out: it ranks words by their information .*by='llmlingua'\)"),
        ("AOC", r"is left out: its encoder .*'gisting', 'ccm' and 'kv-distill'"),
        ("LLMLingua-2", r"kvjax\.shorten\(model, documents, by='llmlingua2'\), and classifier="),
        ("RotorQuant", "is left out: it rotates 3 channels where 'turboquant' rotates all"),
    ],
)
def test_the_name_of_what_is_no_method_leads_to_it(name, said):
    with pytest.raises(ValueError, match=said):
        kvjax.method(name)


def test_a_search_that_finds_no_method_says_what_the_paper_is():
    with pytest.raises(kvjax.InputError, match=r"CacheBlend is kvjax\.join"):
        filtered(listing(), search="CacheBlend")
    with pytest.raises(
        kvjax.InputError, match="fastserve is a serving system: see `kvjax systems fastserve`"
    ):
        filtered(listing(), search="fastserve")


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_of_a_paper_exists_and_is_no_method(name):
    assert CONVERSIONS[name].partition(":")[0] in MADE
    assert name not in METHODS and name not in ALIASES


def test_what_is_left_out_is_no_method_and_names_methods_that_exist():
    names = LEFT_OUT.keys() | ALSO.keys()
    assert not names & (METHODS.keys() | ALIASES.keys() | VERBS.keys() | CONVERSIONS.keys())
    assert set(ALSO.values()) <= LEFT_OUT.keys()
    for text in LEFT_OUT.values():
        named = [n for quoted in re.findall(r"(?<!=)'([^']+)'", text) for n in quoted.split(" + ")]
        assert named == [] or set(named) <= METHODS.keys(), text
        verbs = ("kvjax.save_cache(path, cache, coder='range')", "kvjax.shorten(model, documents, by=")
        assert named or any(verb in text for verb in verbs)


def test_parts_of_methods_are_none_and_name_methods_that_exist():
    assert not PARTS.keys() & (METHODS.keys() | ALIASES.keys())
    for text in PARTS.values():
        assert set(re.findall("'([^']+)'", text.replace("model's", ""))) <= METHODS.keys()


def test_papers_on_weights_name_methods_that_exist_and_are_none():
    assert not OF_WEIGHTS.keys() & (METHODS.keys() | ALIASES.keys()) and "omniquant" in METHODS


def test_a_slip_of_the_pen_is_none_of_them():
    assert elsewhere("snapvk") == ""
    with pytest.raises(ValueError, match="did you mean 'snapkv'"):
        kvjax.method("snapvk")
