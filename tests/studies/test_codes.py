"""The study of codes: its rows are methods, what it measures is so, and the page shows its data."""

import numpy as np
import pytest
import scipy.special

import kvjax
from kvjax.eval.tasks.recall import WORDS
from kvjax.grammar.fitted import as_fitted
from kvjax.methods.parse import parse_method
from kvjax.state.codes import dense
from scripts.studies import codes
from scripts.studies.runner import Data

FILE = "CacheGen's coder, middle"


@pytest.mark.parametrize("name", codes.ROWS)
def test_a_row_stores_all_tokens_in_codes(name):
    method = parse_method(name, {})[1](None)
    assert method.keep is None and method.store.keys is not None and method.store.values is not None


def test_the_page_shows_the_data():
    assert codes.PAGE.agrees()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Set up the study of the shipped model on a text of its own words."""
    words = np.random.default_rng(0).choice(WORDS[4:], 200)
    (tmp_path / "words.txt").write_text(" ".join(words))
    monkeypatch.setattr(codes, "TEXT", tmp_path / "words.txt")
    monkeypatch.setattr(codes, "DATA", Data(tmp_path / "codes.json", {"about": {}, "rows": {}}))
    for name, value in (("START", 0), ("LENGTH", 64), ("AFTER", 16), ("ROWS", ("int8", "mxfp4"))):
        monkeypatch.setattr(codes, name, value)
    monkeypatch.setattr(codes, "CODERS", {FILE: ("cachegen", {}, 1)})
    monkeypatch.setattr(codes, "prose", lambda model, rows, tokens: [[*range(3, 90)]] * 2)
    return kvjax.load("recall-tiny")


def test_bits_errors_and_kl_are_those_of_a_cache_in_codes(small):
    """Against a prefill by the method itself, which encodes the same tokens one by one."""
    read = codes.reading(small)
    found = codes.measured("mxfp4", read)
    ids = small.tokenizer.encode(codes.TEXT.read_text()).ids
    _, full = kvjax.prefill(small, [ids[:64]], room=16)
    _, cache = kvjax.prefill(small, [ids[:64]], room=16, method="mxfp4")
    each = [
        np.concatenate([np.asarray(dense(getattr(group.tail, of))) for group in c.groups])[..., :64, :]
        for of in ("k", "v")
        for c in (cache, full)
    ]
    errors = [np.square(y - x).sum() / np.square(x).sum() for y, x in (each[:2], each[2:])]
    np.testing.assert_allclose([found["keys"], found["values"]], errors, rtol=1e-3)
    logits, _ = kvjax.verify(small, cache, [ids[64:80]])
    want, _ = kvjax.verify(small, full, [ids[64:80]])
    p, q = (scipy.special.log_softmax(np.asarray(x[0], np.float64), -1) for x in (want, logits))
    # There, new tokens are in codes, too.
    assert found["kl"] == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=0.5)
    assert found["bits"] == 4.25 and found["coded"] < 4.25


@pytest.mark.parametrize("name", ["qserve", "kvquant", "aqua-kv"])
def test_fitted_codecs_are_measured_as_a_prefill_encodes(small, name):
    """In a basis; keys before rotation after a first token as it is; over the layer below."""
    read, fitted = codes.reading(small), as_fitted(f"recall-tiny/{name}")
    found = codes.measured(name, read, fitted)
    ids = codes.window(small)
    newest = {"residual": 1} if name == "aqua-kv" else {}
    method = kvjax.method(name, fitted=fitted, **newest)
    _, cache = kvjax.prefill(small, [ids[:64]], room=16, method=method)
    logits, _ = kvjax.verify(small, cache, [ids[64:80]])
    p, q = (np.asarray(x, np.float64) for x in (read.logp, scipy.special.log_softmax(logits[0], -1)))
    # There, new tokens are in codes, too, and AQUA-KV leaves the newest ones as they are.
    assert found["kl"] == pytest.approx(
        (np.exp(p) * (p - q)).sum(-1).mean(), rel=1.0 if "aqua" in name else 0.5
    )
    assert 0 < found["keys"] < 0.15 and 0 < found["values"] < 0.15 and 1 < found["bits"] < 6


def test_a_fitted_coder_of_files_is_measured_as_what_comes_back(small, tmp_path):
    coders = {}
    found = codes.coded_file(FILE, codes.reading(small), coders)
    _, cache = kvjax.prefill(small, [codes.window(small)[:64]], room=16)
    sent = list(kvjax.send_cache(cache, *coders.values(), quality=1))
    assert found["coded"] == pytest.approx(8 * sum(map(len, sent[1:])) / (2 * 4 * 2 * 64 * 32), abs=1e-3)
    assert 0 < found["values"] < 0.2 and found["kl"] > 0


def test_a_step_is_compared_with_one_without_a_method(small, monkeypatch):
    monkeypatch.setattr(codes, "REPEATS", 4)
    assert 0.1 < codes.step_time(small, kvjax.method("int4")) < 10


def test_a_run_adds_the_rows_that_are_missing(small):
    codes.run(small, ["int8"])
    first = codes.DATA.read()["rows"]["int8"]
    codes.run(small, None)
    found = codes.DATA.read()
    assert {*found["rows"]} == {"int8", "mxfp4", FILE} and found["rows"]["int8"] == first
    assert found["about"]["tokens"] == 64
    assert all(first[name] < found["rows"]["mxfp4"][name] for name in ("keys", "values", "kl"))
