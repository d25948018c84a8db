"""CHAI: heads that attend as another one does, against float64, and which ones a fit finds."""

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted
from kvjax.state.cache import nbytes
from tests.float64.reference import rope, softmax
from tests.methods.battery import MAIN, decoder, model, off, prompt_of


def clustered(*source):
    fitted = Fitted({"source": np.array(source, np.int32)}, "ClusteredHeads", "")
    return kvjax.method("chai", fitted=fitted)


def by_hand(tokens, source):
    """Compute the logits of a decoder whose heads have the attention of others, and values of their own."""
    d, pos = decoder("4/2"), np.arange(len(tokens))
    c, x = d.config, d.rest["embed"][np.asarray(tokens)]
    for layer, heads in zip(d.layers, source, strict=True):
        q, k, v = d.project(layer, x)
        k, v = (np.repeat(y, c.heads // c.kv_heads, 0) for y in (rope(k, pos, c.rope.theta), v))
        s = rope(q, pos, c.rope.theta) @ k.swapaxes(1, 2) / np.sqrt(c.head_dim)
        p = softmax(np.where(pos[None] > pos[:, None], -np.inf, s))
        x = d.finish(layer, x, p[list(heads)] @ v)
    return d.logits(x)


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        (((0, 0, 0, 0), (0, 1, 1, 3)), 3),
        pytest.param(((0, 2, 2, 3), (3, 3, 3, 3)), 3, marks=pytest.mark.rotating),
    ],
)
def test_a_head_applies_the_attention_of_another_one_to_its_own_values(source, keys):
    m, rows, method = model("4/2"), MAIN.first, clustered(*source)
    logits, cache = kvjax.prefill(m, rows, method=method, room=4)
    assert off(logits, np.stack([by_hand(r, source)[-1] for r in rows])) < 3e-5
    # Of four key heads in two layers, those that somebody asks; all value heads.
    slots = cache.groups[0].tail.pos.shape[-1] * len(rows)
    assert nbytes(cache) - 4 * len(rows) == slots * ((keys + 4) * m.config.head_dim * 4 + 2 * 4)
    logits, _ = kvjax.step(m, cache, MAIN.steps[0])
    want = [by_hand([*r, t], source)[-1] for r, t in zip(rows, MAIN.steps[0].tolist(), strict=True)]
    assert off(logits, np.stack(want)) < 3e-5


@pytest.mark.rotating
def test_heads_are_of_one_cluster_where_their_attention_correlates():
    m, rows = model("4/2"), MAIN.first
    for layer in range(2):
        seen = [prompt_of("4/2", "main", b).p[layer] for b in range(len(rows))]
        flat = np.concatenate([p[:, np.tril(np.ones(p.shape[1:], bool))] for p in seen], 1)
        correlation = np.corrcoef(flat)
        order = np.sort(correlation[np.triu_indices(4, 1)])[::-1]
        # Between the two most alike pairs: one pair, and two heads that stand alone.
        least = (order[0] + order[1]) / 2
        found = kvjax.fit(m, "chai", rows, least=float(least)).arrays["source"][layer]
        a, b = np.unravel_index(np.argmax(np.triu(correlation, 1)), (4, 4))
        want = np.arange(4)
        want[[a, b]] = a
        assert found.tolist() == want.tolist()


def test_a_head_that_stands_for_none_is_refused():
    with pytest.raises(InputError, match="head 0 of layer 0 cannot attend as head 1 does"):
        kvjax.prefill(model("4/2"), MAIN.first, method=clustered((1, 2, 2, 3), (0, 1, 2, 3)), room=4)
