"""Bits that attention's errors ask for, against QAQ's equations in numpy."""

import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.needed_bits import NeededBits
from tests.keep.test_score import LENGTH, B, G, H, K, S, probabilities, seen_by, window_of
from tests.keep.test_score import view as view  # a fixture
from tests.sweep import sweep


@pytest.mark.rotating
@pytest.mark.parametrize(("outliers", "apart"), [(0.0, 0), (0.2, 2)])
@pytest.mark.parametrize(
    ("key_error", "value_error"), sweep([(40.0, 1e20), (1e20, 2.0), (40.0, 2.0)], (40.0, 2.0))
)
def test_bits_are_those_of_the_larger_need_of_a_key_and_a_value(
    rng, view, key_error, value_error, outliers, apart
):
    q, at = window_of(rng, 3)
    score = NeededBits(3, key_error, value_error, outliers)
    got = np.asarray(score(view, seen_by({key_of(Queries(3)): (q, at)})))
    rows, p = np.asarray(q, float).reshape(B, K, G, 3, H), probabilities(view, q, at)
    found = []
    for b, k in np.ndindex(B, K):
        a = p[b, k].max((0, 1))
        moved = np.abs(np.diag(a) - np.outer(a, a)).max(0)
        for j in range(LENGTH[b]):
            errors = (
                np.sqrt(key_error / H) / (LENGTH[b] * np.abs(rows[b, k]).max() * moved[j]),
                np.sqrt(value_error) / (LENGTH[b] * a[j]),
            )
            bits = []
            for x, e in zip((view.k, view.v), errors, strict=True):
                rest = sorted(np.asarray(x[b, k, j], float), key=abs)[: H - apart]
                bits.append(np.log2((max(rest) - min(rest)) / (2 * e) + 1))
            found.append((got[b, k, j], max(bits)))
    found = np.array(found)
    # Next to a whole number, float32 may round the other way.
    clear = np.abs(found[:, 1] - np.rint(found[:, 1])) > 1e-4
    np.testing.assert_array_equal(found[clear, 0], np.ceil(found[clear, 1]))
    assert clear.mean() > 0.9 and len(set(found[clear, 0])) > 2


def test_tokens_that_nobody_attends_to_need_none_and_nothing_is_no_number(view, rng):
    q, at = window_of(rng, 3)
    far = view._replace(bias=view.bias.at[:, :, 0].set(-1e4))
    got = np.asarray(NeededBits(3, 1.0, 1.0, 1.0 / H)(far, seen_by({key_of(Queries(3)): (q, at)})))
    assert not np.isnan(got).any() and (got[:, :, 0] == 0).all() and got.shape == (B, K, S)
