"""Pages that are ranked by the bounds of their parts, against numpy, and LServe's two kinds of heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.read.sub_pages import SubPageBounds
from kvjax.state.cache import Slots
from kvjax.words import Budget
from tests.methods.expected import GATES
from tests.read.test_persistent import model

PROMPT = np.random.default_rng(1).integers(5, 60, (1, 90)).tolist()


def test_pages_have_the_largest_bound_of_their_parts(rng):
    word = SubPageBounds(Budget(0.25), page=8, part=2, least=12)
    q, k = rng.normal(size=(1, 4, 1, 16)), rng.normal(size=(1, 1, 2, 64, 16))
    pos = np.broadcast_to(np.arange(64), (1, 1, 2, 64)).copy()
    # The second list holds its first and newest tokens, which lie in three pages.
    pos[..., 1, 4:37] = pos[..., 1, 45:] = -1
    x = jnp.asarray(k, jnp.float32)
    body = Slots(x, x, jnp.asarray(pos, jnp.int32), summary=word.summarise(x))
    pages, counts = jax.jit(lambda: word.select(jnp.asarray(q, jnp.float32), body, 0, jnp.asarray([64])))()
    assert counts.tolist() == [[2, 3]] and set(pages[0, 1, :3].tolist()) == {0, 4, 5}
    assert word.pages_visited(64) == 4
    parts = k[0, 0, 0].reshape(8, 4, 2, 16)
    bound = np.zeros((2, 8, 4))
    for g in range(2):
        bound[g] = np.maximum(q[0, g, 0] * parts.min(2), q[0, g, 0] * parts.max(2)).sum(-1)
    want = bound.max((0, 2)).argsort()[::-1]
    assert pages[0, 0].tolist() == want[:4].tolist()


OF = dict(fitted=GATES, sinks=8, window=16, page=8)


def lserve(budget, retrieval=0.5):
    return kvjax.method("lserve", budget=budget, part=4, group=8, retrieval=retrieval, **OF)


def all_pages(retrieval=0.5):
    """Read every page, with the same heads and codes."""
    quest, int4 = kvjax.method("quest", budget=1.0, page=8, skip_layers=0), kvjax.method("int4", group=8)
    return kvjax.chain(kvjax.method("duoattention", retrieval=retrieval, **OF), quest, int4)


def steps(method):
    """Logits of tokens by which streaming heads fill and empty pages."""
    found, (_, cache) = [], kvjax.prefill(model(layers=2), PROMPT, method=method, room=16)
    for token in range(7, 17):
        logits, cache = kvjax.step(model(layers=2), cache, np.asarray([token]))
        found.append(np.asarray(logits))
    return np.stack(found)


@pytest.mark.rotating
def test_streaming_heads_read_all_that_they_hold():
    np.testing.assert_allclose(steps(lserve(8, 0.0)), steps(all_pages(0.0)), atol=2e-4)


@pytest.mark.rotating
def test_other_heads_read_the_best_pages_and_all_of_them_for_a_budget_of_all():
    whole = steps(all_pages())
    np.testing.assert_allclose(steps(lserve(1.0)), whole, atol=2e-4)
    assert np.abs(steps(lserve(8)) - whole).max() > 1e-3


def test_parts_that_do_not_divide_a_page_are_refused():
    with pytest.raises(kvjax.InputError, match="lserve: part must be a divisor of page, which is 16, got 5"):
        kvjax.method("lserve(budget=0.25, page=16, part=5)")
