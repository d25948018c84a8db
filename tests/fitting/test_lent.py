"""Arrays that were fitted for another word, or for other settings, are refused although their shapes fit."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compat.lent_fits import check_lent
from kvjax.fitting import FITS
from kvjax.grammar.fitted import Fitted, ModelSizes, fitted_words, load_fitted, save_fitted
from tests.methods.battery import MAIN, model
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

TEXTS = MAIN.first


@pytest.fixture(scope="module")
def ranges():
    return kvjax.fit(model("4/2"), kvjax.method("smoothquant", bits=8), TEXTS)


def _stepped(method):
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=1)
    return kvjax.step(model("4/2"), cache, MAIN.steps[0])[0]


def test_ranges_of_eight_bits_are_refused_by_four(ranges, tmp_path):
    path = tmp_path / "ranges.safetensors"
    save_fitted(path, ranges)
    assert load_fitted(path) == ranges and load_fitted(path).settings == ranges.settings
    for given in (ranges, str(path)):
        with pytest.raises(
            InputError, match="fitted for StaticAffine with key bits=8, and it has key bits=4"
        ):
            _stepped(kvjax.method("smoothquant", bits=4, fitted=given))
    with pytest.raises(InputError, match="key by=smoothquant, and it has key by=prefixquant"):
        _stepped(kvjax.method("prefixquant", bits=8, fitted=ranges))


def test_ranges_of_eight_bits_would_answer_wrongly_in_four(ranges):
    """Files of earlier versions name no settings, so that what the check prevents can be seen."""
    bare = Fitted(ranges.arrays, ranges.word, ranges.model)
    right = kvjax.fit(model("4/2"), kvjax.method("smoothquant", bits=4), TEXTS)
    want, got, exact = (
        np.asarray(_stepped(method))
        for method in (
            kvjax.method("smoothquant", bits=4, fitted=right),
            kvjax.method("smoothquant", bits=4, fitted=bare),
            kvjax.method("full"),
        )
    )
    assert np.abs(got - exact).max() > 3 * np.abs(want - exact).max() > 1e-3


# Words whose arrays have the same names and shapes.
ALIKE = {
    "a gate of KVzap for DMS": ("dms", "kvzap"),
    "a gate of DMS for KVzap": ("kvzap", "dms"),
    "attention on needles for budgets": ("evolkv", "headkv"),
    "budgets for attention on needles": ("headkv", "evolkv"),
    "drift for copies": ("retrieval-head", "epicache"),
    "memory tokens for restore tokens": ("restorekv", "ccm"),
    "restore tokens for memory tokens": ("ccm", "restorekv"),
}


@pytest.mark.parametrize("name", sweep(ALIKE, "a gate of KVzap for DMS"))
def test_arrays_of_another_word_are_refused(name):
    mine, lent = (next(fitted_words(BY_LABEL[label].method())) for label in ALIKE[name])
    word = dataclasses.replace(mine, fitted=lent.fitted)
    word.check(ModelSizes.of(model(BY_LABEL[ALIKE[name][0]].model).config))
    with pytest.raises(InputError, match=f"fitted for {lent.fitted.word}, expected those for"):
        check_lent(word, BY_LABEL[ALIKE[name][0]].method())


def test_arrays_of_the_table_are_those_of_their_words():
    """A fit records the class that it is looked up by, or one whose arrays that class reads."""
    for label, row in BY_LABEL.items():
        method = row.method()
        for word in fitted_words(method):
            if word.fitted is not None:
                check_lent(word, method)
                assert type(word) in FITS or label in ("adore", "dcp", "dmc", "kv-distill")
