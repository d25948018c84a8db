"""What is fitted to a model's queries: their main direction, mean and covariance, in float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar.keys import key_of
from kvjax.keep.scores.filters import FilterProjection, QueryFilters
from tests.float64.reference import Prompt
from tests.keep.test_score import B, H, K, check, f32, seen_by, slots
from tests.methods.battery import MAIN, decoder, model
from tests.methods.expected import FILTERS

ROWS = [*MAIN.first, *MAIN.second]


@pytest.mark.rotating
def test_filters_are_first_singular_vectors_with_the_sign_of_the_mean_query():
    found = kvjax.fit(model("4/2"), "q-filters", ROWS, batch=3).arrays["filters"]
    prompts = [Prompt(decoder("4/2"), row) for row in ROWS]
    assert found.shape == (2, 2, 16)
    for layer in range(2):
        each = []
        for head in range(4):
            q = np.concatenate([p.q[layer][head] for p in prompts])
            first = np.linalg.svd(q)[2][0]
            each.append(first * np.sign((q @ first).sum()))
        want = np.reshape(each, (2, 2, 16)).mean(1)
        np.testing.assert_allclose(found[layer], want, atol=1e-4)


def test_statistics_are_those_of_all_queries_before_rotation_but_the_first():
    found = kvjax.fit(model("4/2"), "expected-attention", ROWS, batch=3, sinks=2).arrays
    prompts = [Prompt(decoder("4/2"), row) for row in ROWS]
    for layer, head in np.ndindex(2, 4):
        q = np.concatenate([p.raw_q[layer][head, 2:] for p in prompts])
        np.testing.assert_allclose(found["mean"][layer, head], q.mean(0), atol=1e-5)
        np.testing.assert_allclose(found["covariance"][layer, head], np.cov(q.T), atol=1e-5)


def test_a_filtered_score_is_the_product_with_the_filter_of_the_head(rng):
    view, word = slots(rng), FilterProjection(QueryFilters())
    filters = rng.normal(size=(K, H))
    seen = seen_by({key_of(word.filters): jnp.broadcast_to(f32(filters), (B, K, H))})
    check(word(view, seen), np.einsum("bksh,kh->bks", np.asarray(view.k, np.float64), filters), view)


def test_filters_of_another_model_are_refused():
    method = kvjax.method("q-filters", budget=0.5, newest=2, fitted=FILTERS)
    message = r"layers, KV heads, channels\) of its filters are \(2, 2, 16\), this model's are"
    with pytest.raises(InputError, match=message):
        kvjax.prefill(model("6/3"), MAIN.first, method=method)
