"""A model and its caches on a mesh, by rules: the same answers, on devices that hold what the rules say.

Every class of layout goes through a whole conversation by the rules `tensor` and `batch`; a few do so in the
plain suite.
"""

import math
from functools import cache

import jax
import numpy as np
import pytest

import kvjax
from kvjax.axes import map_axes
from kvjax.fitted import fitted_words
from kvjax.mesh.on_mesh import as_mesh
from kvjax.mesh.rules import as_rules
from tests.methods.battery import MAIN, ROOM, T, first_of_each_class, model, off, positions, talk
from tests.methods.table import BY_LABEL
from tests.methods.test_battery import same

PLAIN = {"tensor": ("h2o",), "batch": ("adakv",)}
CLASSES = [
    pytest.param(name, label, marks=() if label in PLAIN[name] else pytest.mark.rotating)
    for name in PLAIN
    for label in first_of_each_class()
]
conversations = pytest.mark.parametrize("name, label", CLASSES)


@cache
def spread(of: str, name: str) -> kvjax.Model:
    """A model of the battery, its KV heads and pairs of rows on devices of their own, or every row."""
    mesh = as_mesh(f"data=2,model={model(of).config.kv_heads}" if name == "tensor" else "data=4")
    rules = as_rules(name, mesh.axis_names)
    if model(of).config.vocab % mesh.shape.get("model", 1):
        rules = rules.but(vocab=None)
    return kvjax.spread(model(of), mesh, rules)


def refuses(label):
    """Whether a method's caches cannot lie on several devices."""
    return BY_LABEL[label].method().host is not None


def check_places(held, on):
    """Every array of a cache is split as its logical axes say, and nothing is held whole that need not be."""

    def check(axes, x):
        want = [on.devices(a) if a is not None and on.splits(a, n) else 1 for a, n in zip(axes, x.shape)]
        assert x.sharding.is_equivalent_to(on.sharding(axes, x.shape), x.ndim), (axes, x.sharding)
        assert x.addressable_shards[0].data.size * math.prod(want) == x.size
        return x

    map_axes(check, held)


@conversations
def test_a_conversation_on_a_mesh_is_that_on_one_device(name, label, tmp_path):
    row, done = BY_LABEL[label], talk(label)
    here, there, method = model(row.model), spread(row.model, name), row.method()
    if refuses(label):
        with pytest.raises(NotImplementedError, match="spread over several devices, expected one device"):
            kvjax.prefill(there, MAIN.first, method=method, room=ROOM)
        return
    logits, held = kvjax.prefill(there, MAIN.first, method=method, room=ROOM)
    assert off(logits, done.prompt[0]) < 1e-5
    assert positions(held) == positions(done.prompt[1])
    assert kvjax.nbytes(held) == kvjax.nbytes(done.prompt[1])
    check_places(held, there.on_mesh)

    # A copy of every row, for the second turn: steps consume the cache.
    twice = kvjax.fork(held, 2)
    check_places(twice, there.on_mesh)
    for token, (want, cache) in zip(MAIN.steps, done.steps, strict=True):
        logits, held = kvjax.step(there, held, token)
        assert off(logits, want) < same(label)
        assert positions(held) == positions(cache)
    check_places(held, there.on_mesh)
    again = [r for r in MAIN.second for _ in range(2)]
    logits, after = kvjax.prefill(there, again, cache=twice, room=8)
    assert off(logits[::2], done.second[0]) < same(label) and off(logits[1::2], logits[::2]) < same(label)
    assert [layer[::2] for layer in positions(after)] == positions(done.second[1])
    check_places(after, there.on_mesh)

    # What a mesh saves, one device reads, and the other way round. Arrays that lie in no file are not saved.
    if any(word.fitted is not None for word in fitted_words(method)):
        return
    kvjax.save_cache(tmp_path / "spread.cache", held)
    kvjax.save_cache(tmp_path / "one.cache", done.steps[-1][1])
    want, _ = kvjax.step(here, kvjax.load_cache(tmp_path / "spread.cache"), MAIN.steps[0])
    got, moved = kvjax.step(there, kvjax.load_cache(tmp_path / "one.cache"), MAIN.steps[0])
    assert off(got, want) < same(label)
    check_places(moved, there.on_mesh)


@conversations
def test_chunks_and_written_text_on_a_mesh_are_those_on_one_device(name, label):
    row = BY_LABEL[label]
    here, there, method = model(row.model), spread(row.model, name), row.method()
    if refuses(label):
        return
    prompt = [a + b for a, b in zip(MAIN.first, MAIN.second, strict=True)]
    options = dict(method=method, chunk=T, max_new_tokens=4)
    want, got = kvjax.generate(here, prompt, **options), kvjax.generate(there, prompt, **options)
    assert off(got.logprobs, want.logprobs) < same(label)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert positions(got.cache) == positions(want.cache)
    check_places(got.cache, there.on_mesh)
