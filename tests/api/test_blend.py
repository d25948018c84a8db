"""A joined past of which tokens are read again, held against the same layers in float64."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from tests.float64.reference import Decoder, Prompt, rope, softmax

SIZES = dict(vocab=32, d_model=32, layers=4, heads=4, kv_heads=2, head_dim=16, d_ff=48, max_positions=128)
TEXTS = (
    [[3, 7, 1, 9, 4, 30, 2, 2], [2, 2, 8]],
    [[5, 6, 11, 12, 13], [1, 9, 9, 3, 17, 21, 4]],
    [[8, 20, 21, 7], [7, 7]],
)
WHOLE = [[i for text in TEXTS for i in text[row]] for row in range(2)]


def model_of(**more):
    config = Config(**SIZES | more)
    return Model(config, init(config, jax.random.key(5)))


def read(model, texts=TEXTS):
    return [kvjax.prefill(model, text)[1] for text in texts]


def slots(cache, row):
    """Per layer, keys and values [K, T, H] of a row in the order of positions."""
    out = []
    for group in cache.groups:
        for i in range(len(group.tail.pos)):
            pos = np.asarray(group.tail.pos[i, row, 0])
            order = [int(np.flatnonzero(pos == p)[0]) for p in range((pos >= 0).sum())]
            out.append([np.asarray(x[i, row])[:, order] for x in (group.tail.k, group.tail.v)])
    return out


def blended(model, texts, share):
    """Keys and values of one row per layer in float64, and which tokens were read again."""
    decoder = Decoder(model)
    theta, scale = decoder.config.rope.theta, np.sqrt(decoder.config.head_dim)
    whole = Prompt(decoder, [i for text in texts for i in text])
    apart = [Prompt(decoder, text) for text in texts]
    starts = np.cumsum([0, *(len(text) for text in texts)])
    at = [np.arange(len(text)) + start for text, start in zip(texts, starts, strict=False)]
    join = lambda each: np.concatenate(each, 1)  # noqa: E731
    k = [
        join([rope(p.raw_k[i], pos, theta) for p, pos in zip(apart, at, strict=True)])
        for i in range(len(decoder.layers))
    ]
    v = [join([p.v[i] for p in apart]) for i in range(len(decoder.layers))]
    changed = ((whole.v[1] - v[1]) ** 2).sum((0, 2))
    again = np.sort(np.argsort(-changed, kind="stable")[: int(share * whole.length + 1e-9)])
    for i in (0, 1):
        k[i], v[i] = whole.k[i], whole.v[i]
    x = decoder.rest["embed"][np.asarray(whole.tokens)[again]]
    for i, layer in enumerate(decoder.layers):
        raw_q, raw_k, new = decoder.project(layer, x)
        k[i][:, again], v[i][:, again] = rope(raw_k, again, theta), new
        s = rope(raw_q, again, theta) @ np.repeat(k[i], whole.group, 0).swapaxes(1, 2) / scale
        s = np.where(np.arange(whole.length)[None] > again[:, None], -np.inf, s)
        x = decoder.finish(layer, x, softmax(s) @ np.repeat(v[i], whole.group, 0))
    return k, v, again


@pytest.mark.rotating
@pytest.mark.parametrize("share", [0.1, 0.35, 1.0])
def test_the_tokens_that_contexts_change_most_are_read_again(share):
    model = model_of()
    cache = kvjax.join(model, read(model), room=2, texts=TEXTS, recompute=share)
    for row in range(2):
        k, v, again = blended(model, [text[row] for text in TEXTS], share)
        assert len(again) == int(share * len(WHOLE[row]) + 1e-9)
        for layer, (got_k, got_v) in enumerate(slots(cache, row)):
            np.testing.assert_allclose(got_k, k[layer], atol=2e-5)
            np.testing.assert_allclose(got_v, v[layer], atol=2e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("more", [{}, dict(qk_norm="head"), dict(kv_heads=4)])
def test_all_tokens_read_again_are_the_whole_text(more):
    model = model_of(**more)
    cache = kvjax.join(model, read(model), room=8, texts=TEXTS, recompute=1.0)
    whole = kvjax.prefill(model, WHOLE, room=8)[1]
    questions = [[4, 1, 7], [9, 3]]
    got, want = (kvjax.prefill(model, questions, cache=c)[0] for c in (cache, whole))
    np.testing.assert_allclose(got, want, atol=3e-5)


def test_stacked_layers_are_read_again_as_single_ones_are():
    model = model_of()
    group = jax.tree.map(lambda *x: np.concatenate(x), *model.params["layers"])
    stacked = Model(model.config, model.params | {"layers": [group]})
    one, other = (kvjax.join(m, read(m), texts=TEXTS, recompute=0.35) for m in (model, stacked))
    for row in range(2):
        for a, b in zip(slots(one, row), slots(other, row), strict=True):
            np.testing.assert_allclose(a[0], b[0], atol=2e-5)


def test_none_read_again_is_the_joined_past():
    model = model_of()
    caches = read(model)
    plain, none = kvjax.join(model, caches), kvjax.join(model, caches, texts=TEXTS, recompute=0.0)
    for row in range(2):
        for a, b in zip(slots(plain, row), slots(none, row), strict=True):
            np.testing.assert_array_equal(a[0], b[0])


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(recompute=1.5), "recompute is 1.5"),
        (dict(recompute=0.2, texts=None), "was given with no texts, expected the token ids of all 3"),
        (dict(texts=TEXTS[:2]), "was given with texts for 2 caches"),
        (
            dict(texts=(TEXTS[1], TEXTS[0], TEXTS[2])),
            r"texts\[0\] has rows of \[5, 7\] tokens and cache 0 holds",
        ),
        (dict(texts=([[99] * 8, [1] * 3], *TEXTS[1:])), "99"),
    ],
)
def test_what_cannot_be_read_again_is_refused(change, message):
    model = model_of()
    with pytest.raises(kvjax.InputError, match=message):
        kvjax.join(model, read(model), **{"texts": TEXTS, "recompute": 0.2} | change)


@pytest.mark.rotating
def test_compressed_caches_cannot_be_read_again():
    model = model_of()
    caches = [kvjax.prefill(model, text, method="snapkv(budget=0.5, window=1)")[1] for text in TEXTS]
    with pytest.raises(kvjax.InputError, match="expected full caches"):
        kvjax.join(model, caches, texts=TEXTS, recompute=0.2)
