"""Texts read apart and joined: in a single layer, whose keys know no context, as if they were read as one."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.config import Config
from kvjax.models.mixers.latent import Latent
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.rope import Rope
from tests.sweep import sweep

PARTS = ([[3, 7, 1, 9, 4], [2, 2, 8]], [[5, 6], [1, 9, 9, 3]], [[8], [7, 7]])
WHOLE = [[i for part in PARTS for i in part[row]] for row in range(2)]
QUESTION = [[4, 1, 7], [9, 3]]
LATENT = Latent(rank=12, rope_dim=8, nope_dim=8, value_dim=8)
KINDS = {
    "plain": {},
    "linear": dict(rope=Rope(kind="linear", factor=4.0)),
    "yarn": dict(rope=Rope(kind="yarn", factor=4.0, original_max=16)),
    "half of the channels": dict(rope=Rope(rotary_dim=8)),
    "normed": dict(qk_norm="head"),
    "latents": dict(mixers=(LATENT,), kv_heads=4),
    "no rotation": dict(rope=Rope(kind="none")),
}


def model_of(layers=1, **more):
    sizes = dict(vocab=32, d_model=32, layers=layers, heads=4, kv_heads=2, head_dim=16, d_ff=48)
    config = Config(**{**sizes, "max_positions": 64, **more})
    return Model(config, init(config, jax.random.key(3)))


def read(model, parts=PARTS, method=None, **more):
    return [kvjax.prefill(model, part, method=method, **more)[1] for part in parts]


@pytest.mark.rotating
@pytest.mark.parametrize("kind", sweep(KINDS, "yarn"))
def test_one_layer_answers_as_over_the_whole_text(kind):
    model = model_of(**KINDS[kind])
    want, _ = kvjax.prefill(model, QUESTION, cache=kvjax.prefill(model, WHOLE, room=8)[1])
    cache = kvjax.join(model, read(model), room=8)
    assert cache.next.tolist() == [len(row) for row in WHOLE]
    assert [sorted(x[x >= 0].tolist()) for x in kvjax.kept_positions(cache)[0][:, 0]] == [
        [*range(8)], [*range(9)]
    ]  # fmt: skip
    got, _ = kvjax.prefill(model, QUESTION, cache=cache)
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.rotating
def test_what_is_written_behind_a_joined_past_is_written_behind_the_whole_one():
    model = model_of()
    want = kvjax.generate(model, [a + b for a, b in zip(WHOLE, QUESTION, strict=True)], max_new_tokens=6)
    got = kvjax.generate(model, QUESTION, cache=kvjax.join(model, read(model)), max_new_tokens=6)
    assert got.tokens.tolist() == want.tokens.tolist()


@pytest.mark.rotating
@pytest.mark.parametrize("method", [None, "snapkv(budget=0.5, window=2)"])
def test_every_text_keeps_what_it_kept_alone_turned_to_its_place(method):
    """By the rotation's equation in float64, in a stack whose keys know their own text."""
    parts = ([[*range(1, 13)]], [[*range(20, 30)]])
    model = model_of(layers=2)
    apart = read(model, parts, method)
    joined = kvjax.join(model, apart)
    starts, freq = [0, 12], 10000.0 ** (-np.arange(0, 16, 2) / 16)
    for layer in range(2):
        found = [slots(cache, layer) for cache in apart]
        want = {}
        for start, (pos, k, v) in zip(starts, found, strict=True):
            for head in range(2):
                for i in np.flatnonzero(pos[head] >= 0):
                    a, b = k[head, i, :8], k[head, i, 8:]
                    cos, sin = np.cos(start * freq), np.sin(start * freq)
                    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin])
                    want[head, int(pos[head, i]) + start] = (turned, v[head, i])
        pos, k, v = slots(joined, layer)
        assert {(h, int(p)) for h in range(2) for p in pos[h] if p >= 0} == want.keys()
        for (head, at), (key, value) in want.items():
            (i,) = np.flatnonzero(pos[head] == at)
            np.testing.assert_allclose(k[head, i], key, atol=1e-5)
            np.testing.assert_array_equal(v[head, i], value)


def slots(cache, layer):
    """Positions, keys and values of a layer's only row, in float64."""
    per = [(group, i) for group in cache.groups for i in range(group.tail.pos.shape[0])]
    group, i = per[layer]
    tail = group.tail
    return np.asarray(tail.pos[i, 0]), *(np.asarray(x[i, 0], np.float64) for x in (tail.k, tail.v))


def test_the_given_caches_stay_usable_and_none_of_their_room_is_carried_along():
    model = model_of()
    apart = read(model, room=40)
    first = kvjax.join(model, apart)
    again = kvjax.join(model, [apart[1], apart[0], apart[1]], room=3)
    assert again.next.tolist() == [9, 11] and first.next.tolist() == [8, 9]
    assert kvjax.nbytes(first) < kvjax.nbytes(apart[0])
    assert kvjax.step(model, apart[0], [1, 2])[0].shape == (2, 32)


def caches(model, method=None):
    return read(model, ([[1, 2, 3, 4]], [[5, 6, 7]]), method, room=4)


@pytest.mark.parametrize(
    ("method", "told"),
    sweep(
        [
            ("int8", "holds encoded slots"),
            ("h2o(budget=0.5)", "loses slots while decoding"),
            ("streamingllm(budget=3, sinks=1)", "loses slots while decoding"),
            ("adakv(budget=0.5, window=1)", "holds slots in pages"),
            ("reattention(budget=0.5, page=2, newest=2, sinks=2)", "holds slots in pages, codes or apart"),
        ],
        ("int8", "holds encoded slots"),
    ),
)
def test_slots_that_cannot_move_are_refused(method, told):
    model = model_of()
    with pytest.raises(kvjax.InputError, match=f"layer 0 of cache 0 {told}.*: read the texts together"):
        kvjax.join(model, caches(model, method))


@pytest.mark.rotating
def test_what_does_not_belong_together_is_refused():
    model, other = model_of(), model_of(d_ff=64)
    good = caches(model)
    bytes_model = kvjax.load("bytes-tiny")
    dynamic = model_of(rope=Rope(kind="dynamic", factor=2.0, original_max=32))
    windowed = model_of(windows=(4,))
    for made, given, more, told in (
        (model, [], {}, "caches is empty"),
        (other, good, {}, "filled by another model"),
        # The same weights, and a rotation of another base.
        (model_of(rope=Rope(theta=500.0)), good, {}, "filled by another model"),
        (model, [good[0], *read(model)], {}, "cache 1 has 2 rows, cache 0 has 1"),
        (model, [good[0], caches(model, "snapkv(budget=0.5, window=1)")[0]], {}, "expected one method"),
        (model, good, dict(room=60), "position"),
        (model, good, dict(room=-1), "room"),
        (dynamic, caches(dynamic), {}, r"rotation of .* \(dynamic\) depends on the length"),
        (windowed, caches(windowed), {}, "layer 0 of cache 0 loses slots"),
        (bytes_model, caches(bytes_model), {}, "has a recurrent state"),
    ):
        with pytest.raises(kvjax.InputError, match=told):
            kvjax.join(made, given, **more)
