"""KVSharer: layers that read others' slots, against float64, and which ones a fit finds."""

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted
from kvjax.state.cache import nbytes
from tests.float64.reference import rope, softmax
from tests.methods.battery import MAIN, decoder, model, off


def shared(*source):
    fitted = Fitted({"source": np.array(source, np.int32)}, "SharedLayers", "")
    return kvjax.method("kvsharer", fitted=fitted)


def by_hand(tokens, source):
    """Compute last hidden states and logits of a decoder whose layers read the keys and values of others."""
    d = decoder("deep")
    c, pos, kept = d.config, np.arange(len(tokens)), []
    x = d.rest["embed"][np.asarray(tokens)]
    for i, layer in enumerate(d.layers):
        q, k, v = d.project(layer, x)
        kept.append((rope(k, pos, c.rope.theta), v))
        k, v = (np.repeat(y, c.heads // c.kv_heads, 0) for y in kept[source[i]])
        s = rope(q, pos, c.rope.theta) @ k.swapaxes(1, 2) / np.sqrt(c.head_dim)
        x = d.finish(layer, x, softmax(np.where(pos[None] > pos[:, None], -np.inf, s)) @ v)
    return x, d.logits(x)


@pytest.mark.parametrize("source", [(0, 0, 2), pytest.param((0, 1, 0), marks=pytest.mark.rotating)])
def test_a_layer_that_shares_reads_the_slots_of_its_source_and_stores_none(source):
    m, rows = model("deep"), MAIN.first
    full = nbytes(kvjax.prefill(m, rows, room=4)[1])
    logits, cache = kvjax.prefill(m, rows, method=shared(*source), room=4)
    assert off(logits, np.stack([by_hand(r, source)[1][-1] for r in rows])) < 3e-5
    assert 3 * (nbytes(cache) - 4 * len(rows)) == 2 * (full - 4 * len(rows))
    logits, _ = kvjax.step(m, cache, MAIN.steps[0])
    want = [by_hand([*r, t], source)[1][-1] for r, t in zip(rows, MAIN.steps[0].tolist(), strict=True)]
    assert off(logits, np.stack(want)) < 3e-5


@pytest.mark.rotating
def test_the_most_unlike_layers_share_as_long_as_the_hidden_states_stay_alike():
    m, texts, tokens = model("deep"), [r for r in MAIN.first if len(r) >= 12], 12
    texts = [r[:tokens] for r in texts]
    mean = np.zeros((2, 3, 2, tokens, m.config.head_dim))
    for row in texts:
        d, pos = decoder("deep"), np.arange(tokens)
        x = d.rest["embed"][np.asarray(row)]
        for i, layer in enumerate(d.layers):
            q, k, v = d.project(layer, x)
            q, k = rope(q, pos, d.config.rope.theta), rope(k, pos, d.config.rope.theta)
            mean[:, i] += np.stack([k, v]) / len(texts)
            keys, values = np.repeat(k, 2, 0), np.repeat(v, 2, 0)
            s = q @ keys.swapaxes(1, 2) / np.sqrt(k.shape[-1])
            x = d.finish(layer, x, softmax(np.where(pos[None] > pos[:, None], -np.inf, s)) @ values)
    far = {
        (i, j): np.linalg.norm(mean[:, i] - mean[:, j], axis=-1).mean() for i in range(3) for j in range(i)
    }
    alike = {}
    for i, j in far:
        source = [0, 1, 2]
        source[i] = j
        pairs = [(by_hand(r, range(3))[0].ravel(), by_hand(r, source)[0].ravel()) for r in texts]
        alike[i, j] = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
    order = sorted(far, key=lambda pair: -far[pair])
    # Between the two best cosines, so that the best pair alone is taken, and below all.
    second, most = sorted(alike.values())[-2:]
    for least in ((second + most) / 2, 0.0):
        first = next(pair for pair in order if alike[pair] > least)
        want = [first[1] if i == first[0] else i for i in range(3)]
        found = kvjax.fit(m, "kvsharer", texts, tokens=tokens, least=least)
        assert found.arrays["source"].tolist() == want
    assert kvjax.fit(m, "kvsharer", texts, tokens=tokens, least=1.0).arrays["source"].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="no text has 99 tokens"):
        kvjax.fit(m, "kvsharer", texts, tokens=99)


def test_a_source_that_keeps_nothing_or_lies_above_is_refused():
    for source in ((0, 0, 1), (1, 1, 2), (0, 1, 3)):
        with pytest.raises(InputError, match="kvsharer .* layer . cannot read layer"):
            kvjax.prefill(model("deep"), MAIN.first, method=shared(*source), room=4)
    with pytest.raises(InputError, match="never fitted to a model: run `kvjax fit kvsharer"):
        kvjax.prefill(model("deep"), MAIN.first, method="kvsharer", room=4)
