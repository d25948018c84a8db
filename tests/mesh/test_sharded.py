"""A model and its caches on a mesh, by rules: the same answers, on devices that hold what the rules say.

Every class of layout goes through a whole conversation by the rules `tensor` and `batch`; a few do so in the
plain suite.
"""

from functools import cache

import jax
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache, labelled
from kvjax.grammar.fitted import fitted_words, with_fitted
from kvjax.mesh.on_mesh import as_mesh
from kvjax.mesh.rules import as_rules
from kvjax.ops.base.memory import KIND, in_host
from kvjax.pure import decoding
from kvjax.state.axes import map_axes
from tests.mesh.test_step import collectives
from tests.methods.battery import MAIN, ROOM, T, first_of_each_class, model, off, positions, step, talk
from tests.methods.table import BY_LABEL
from tests.methods.test_battery import same
from tests.sweep import sweep

EVERY = np.ones(4, bool)
FIRST = first_of_each_class()
CASES = [(name, label) for name in ("tensor", "batch") for label in FIRST]


@cache
def spread(of: str, name: str) -> kvjax.Model:
    """Spread a model of the battery, its KV heads and pairs of rows on devices of their own, or every row."""
    mesh = as_mesh(f"data=2,model={model(of).config.kv_heads}" if name == "tensor" else "data=4")
    rules = as_rules(name, mesh.axis_names)
    if model(of).config.vocab % mesh.shape.get("model", 1):
        rules = rules.but(vocab=None)
    return kvjax.spread(model(of), mesh, rules)


def check_places(held):
    """Every array of a cache lies where its logical axes say, and lists lie where their rows and heads do."""
    on = held.on_mesh

    def check(axes, x):
        assert x.sharding.is_equivalent_to(
            on.sharding(axes, x.shape, KIND if in_host(x) else None), x.ndim
        ), (axes, x.sharding)
        return x

    map_axes(check, held, on)
    rows, heads = on.mesh.shape["data"], on.mesh.shape.get("model", 1)
    for part in (part for group in held.groups for part in group.parts):
        for x in jax.tree.leaves(part):
            _, b, k, *rest = x.shape
            assert x.addressable_shards[0].data.shape[1:] == (b // rows, k // heads, *rest)


def compiled_step(m, held):
    """Compile a step, which sends no more than queries and outputs and has the cache where it was."""
    run = decoding(m, held.method, None)
    given = with_fitted(m.params, held.method), bare_cache(held), np.zeros(EVERY.shape, np.int32), EVERY
    program = steps.step.lower(run, *given).compile()
    most = len(EVERY) * m.config.heads * m.config.head_dim
    if held.method.read is not None:
        # Slots are ranked by one score each, and XLA ranks those of all rows together.
        most = max(most, *(part.pos.size for group in held.groups for part in group.bodies))
    assert max(collectives(program.as_text()), default=0) <= most
    mine = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(held))
    assert program.memory_analysis().alias_size_in_bytes == mine
    return program, bare_cache(held)


@pytest.mark.parametrize("name, label", sweep(CASES, ("tensor", "h2o")))
def test_a_conversation_on_a_mesh_is_that_on_one_device(name, label, tmp_path):
    row, done = BY_LABEL[label], talk(label)
    here, there, method = model(row.model), spread(row.model, name), row.method()
    logits, held = kvjax.prefill(there, MAIN.first, method=method, room=ROOM)
    assert off(logits, done.prompt[0]) < 1e-5
    assert positions(held) == positions(done.prompt[1])
    assert kvjax.nbytes(held) == kvjax.nbytes(done.prompt[1])
    check_places(held)

    # A copy of every row, for the second turn: a step consumes the cache.
    twice = kvjax.fork(held, 2)
    check_places(twice)
    program, state = compiled_step(there, held)
    for token, (want, after) in zip(MAIN.steps, done.steps, strict=True):
        logits, state = program(with_fitted(there.params, method), state, token.astype(np.int32), EVERY)
        assert off(logits, want) < same(label)
        assert positions(state) == positions(after)
    held = labelled(state, method, there)
    check_places(held)
    again = [r for r in MAIN.second for _ in range(2)]
    logits, after = kvjax.prefill(there, again, cache=twice, room=8)
    assert off(logits[::2], done.second[0]) < same(label) and off(logits[1::2], logits[::2]) < same(label)
    assert [layer[::2] for layer in positions(after)] == positions(done.second[1])
    check_places(after)

    # What a mesh saves, one device reads, and the other way round. Arrays that lie in no file are not saved.
    if any(word.fitted is not None for word in fitted_words(method)):
        return
    kvjax.save_cache(tmp_path / "spread.cache", held)
    kvjax.save_cache(tmp_path / "one.cache", done.steps[-1][1])
    want, _ = step(here, kvjax.load_cache(tmp_path / "spread.cache"), MAIN.steps[0], append=True)
    got, moved = kvjax.step(there, kvjax.load_cache(tmp_path / "one.cache"), MAIN.steps[0])
    assert off(got, want) < same(label)
    check_places(moved)


@pytest.mark.parametrize("name, label", sweep(CASES))
def test_chunks_and_written_text_on_a_mesh_are_those_on_one_device(name, label):
    row = BY_LABEL[label]
    here, there, method = model(row.model), spread(row.model, name), row.method()
    prompt = [a + b for a, b in zip(MAIN.first, MAIN.second, strict=True)]
    options = dict(method=method, chunk=T, max_new_tokens=4)
    want, got = kvjax.generate(here, prompt, **options), kvjax.generate(there, prompt, **options)
    assert off(got.logprobs, want.logprobs) < same(label)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert positions(got.cache) == positions(want.cache)
    check_places(got.cache)
