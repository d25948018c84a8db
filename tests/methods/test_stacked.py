"""Methods that treat layers of one stack differently answer with stacked weights as with single layers."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import Group, init
from kvjax.steps import Run
from kvjax.steps.shared.run import stacks

LAYERS = 6
CONFIG = Config(vocab=32, d_model=16, layers=LAYERS, heads=2, kv_heads=1, head_dim=8, d_ff=24)
GROUPS = (Group(0, 1), Group(1, 1), Group(2, 4))


def cuts(text):
    found = stacks(Run(CONFIG, kvjax.method(text)), GROUPS)
    assert [i for g in found for i in range(g.first, g.first + g.size)] == list(range(LAYERS))
    return [g.size for g in found]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("full", [1, 1, 4]),
        ("snapkv(budget=0.5, window=4)", [1, 1, 4]),
        ("gemfilter(budget=0.5, filter_layer=3)", [1, 1, 2, 2]),
        ("fastkv(budget=0.5, tsp_layer=4, window=4)", [1, 1, 3, 1]),
        ("tidaldecode(budget=0.5, skip_layers=1, reselect=3, newest=4)", [1, 1, 1, 1, 2]),
        ("asymkv(key_layers=4, value_layers=2, group=8, residual=8)", [1, 1, 2, 2]),
        ("l2compress(budget=4, skip_layers=3)", [1, 1, 1, 3]),
        ("minicache", [1, 1, 1, 1, 1, 1]),
    ],
)
def test_stacks_are_cut_where_layers_differ_and_nowhere_else(text, sizes):
    assert cuts(text) == sizes


@pytest.mark.rotating
@pytest.mark.parametrize(
    "text",
    [
        "gemfilter(budget=0.5, filter_layer=3)",
        pytest.param(
            "tidaldecode(budget=0.5, skip_layers=1, reselect=3, newest=4)", marks=pytest.mark.rotating
        ),
        pytest.param("fastkv(budget=0.5, tsp_layer=4, window=4)", marks=pytest.mark.rotating),
        pytest.param("lazyllm(layer=4)", marks=pytest.mark.rotating),
        pytest.param("homer(chunk=8, height=1)", marks=pytest.mark.rotating),
        pytest.param("asymkv(key_layers=4, value_layers=2, group=8, residual=8)", marks=pytest.mark.rotating),
        pytest.param("minicache", marks=pytest.mark.rotating),
    ],
)
def test_stacked_layers_answer_as_single_ones(text):
    single = Model(CONFIG, init(CONFIG, jax.random.key(4), groups=tuple(Group(i, 1) for i in range(LAYERS))))
    stacked = single.regrouped(GROUPS)
    rng = np.random.default_rng(5)
    rows = [rng.integers(0, 32, n).tolist() for n in (24, 17)]
    want, got = (kvjax.prefill(m, rows, method=text, room=4) for m in (single, stacked))
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    for token in ([3, 7], [9, 1]):
        want, got = (
            kvjax.step(m, cache, token) for m, (_, cache) in zip((single, stacked), (want, got), strict=True)
        )
        np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    assert kvjax.nbytes(got[1]) == kvjax.nbytes(want[1])
    assert len(stacked.params["layers"]) == 3


def test_stacks_that_are_given_to_pure_functions_are_refused_where_layers_differ():
    params = init(CONFIG, jax.random.key(4), groups=(Group(0, 1), Group(1, 1), Group(2, 4)))
    run = Run(CONFIG, kvjax.method("l2compress(budget=4, skip_layers=3)"))
    with pytest.raises(
        ValueError, match="skip_layers=3 ends inside the stacked layers 2 to 5.*kvjax.prepare"
    ):
        run.groups(params)
