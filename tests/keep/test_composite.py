"""Composite tokens, against sorting by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.kinds import View
from kvjax.keep.algebra import Word
from kvjax.keep.scores.composite import Composite, PlusLayerMean
from tests.keep.test_score import f32, seen_by


@dataclasses.dataclass(frozen=True)
class FirstValue(Word):
    def __call__(self, view, seen):
        return view.v[..., 0]


def test_what_heads_agree_on_is_found_by_position_and_not_by_slot(rng):
    """Three heads hold seven of twelve tokens each, and not the same ones."""
    held = [np.sort(rng.permutation(12)[:7]) for _ in range(3)]
    pos = np.full((1, 3, 9), -1, np.int32)
    pos[0, :, :7] = held
    values = rng.normal(size=(1, 3, 9, 2))
    view = View(f32(values), f32(values), jnp.asarray(pos), None, {})
    want = np.zeros((3, 12))
    for head, at in enumerate(held):
        want[head, at] = values[0, head, :7, 0]
    want = want + want.mean(0)
    got = np.asarray(PlusLayerMean(FirstValue())(view, seen_by()))[0]
    for head, at in enumerate(held):
        np.testing.assert_allclose(got[head, :7], want[head, at], rtol=1e-5, atol=1e-6)


def test_layers_get_what_their_composite_tokens_deserve_and_the_stack_its_total(rng):
    layers, slots, n = 4, 20, np.array([6, 3])
    scores = rng.random((layers, 2, 3, slots)) * np.array([1, 0.2, 3, 1])[:, None, None, None]
    scores[:, 1, :, 13:] = -np.inf
    got = np.asarray(Composite().counts(f32(scores), jnp.asarray(n, jnp.int32)))
    for b in range(2):
        composite = -np.sort(-scores[:, b], -1).mean(1)
        composite[0] = composite.max(0)
        composite[:, 0] = np.inf
        best = np.argsort(-composite, axis=None, kind="stable")[: layers * n[b]]
        want = np.bincount(best // slots, minlength=layers)
        np.testing.assert_array_equal(got[:, b], np.repeat(want[:, None], 3, 1))
        assert want.sum() == layers * n[b] and want.min() >= 1 and len(set(want)) > 1


@pytest.mark.rotating
def test_a_budget_of_everything_keeps_everything():
    scores = f32(np.where(np.arange(5) < 3, 1.0, -np.inf) * np.ones((2, 1, 2, 5)))
    np.testing.assert_array_equal(Composite().counts(scores, jnp.asarray([3])), np.full((2, 1, 2), 3))
