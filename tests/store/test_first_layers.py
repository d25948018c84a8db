"""Codes that differ from layer to layer, and codecs that look at more than rows, in a file and back."""

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store
from kvjax.io.cache_file import load_cache, save_cache
from kvjax.state.codes import at_layer
from kvjax.store.affine import Affine
from kvjax.store.first_layers import FirstLayers
from kvjax.store.rotate import Rotate
from tests.methods.battery import MAIN, model
from tests.methods.table import BY_LABEL


def test_layers_have_their_own_codecs_also_inside_of_others():
    word = Rotate() >> FirstLayers(1, Affine(4), Affine(1))
    assert [at_layer(word, i) for i in (0, 1, 2)] == [Rotate() >> Affine(bits) for bits in (4, 1, 1)]
    cache = kvjax.prefill(model("4/2"), MAIN.first, method=Method(store=Store(word, word)))[1]
    assert [g.tail.k.data["words"].shape[-1] for g in cache.groups] == [2, 1]
    with pytest.raises(ValueError, match="the number of first layers is at least 0, got -1"):
        FirstLayers(-1, Affine(4), Affine(1))


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["asymkv", pytest.param("squat", marks=pytest.mark.rotating)])
def test_a_saved_cache_goes_on_as_the_one_that_was_saved(tmp_path, label):
    m = model("4/2")
    _, cache = kvjax.prefill(m, MAIN.first, method=BY_LABEL[label].method(), room=20)
    save_cache(tmp_path / "cache", cache)
    loaded = load_cache(tmp_path / "cache", m)
    for token in MAIN.steps[:2]:
        (a, cache), (b, loaded) = (kvjax.step(m, c, token) for c in (cache, loaded))
        np.testing.assert_array_equal(a, b)
