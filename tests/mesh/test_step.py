"""A step on a mesh that splits rows and heads: every device writes its own slots, where they lie."""

import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.params import init
from kvjax.state.write import write_blocks, write_rows
from kvjax.steps import Run
from tests.methods.battery import off
from tests.sweep import sweep

AUTO = (jax.sharding.AxisType.Auto,) * 2
MESH = jax.make_mesh((2, 4), ("rows", "heads"), AUTO, devices=jax.devices())
B, K, T, ROOM = 4, 4, 32, 32
CONFIG = Config(vocab=32, d_model=64, layers=2, heads=8, kv_heads=K, head_dim=16, d_ff=32)
PARAMS = init(CONFIG, jax.random.key(0))
METHODS = {
    "no method": Method(),
    "kivi": kvjax.method("kivi", group=16, residual=16),
    "int8": kvjax.method("int8"),
    "minicache": kvjax.method("minicache", start=0),
    "h2o": kvjax.method("h2o", budget=0.5),
    "quest": kvjax.method("quest", budget=0.5, page=8, skip_layers=0),
    "streamingllm": kvjax.method("streamingllm", budget=16),
}
PLAIN = ("no method", "kivi")
methods = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in PLAIN else pytest.mark.rotating) for x in METHODS]
)


def lists_split(_, x):
    """Rows and heads are split in all that has lists of slots, rows in what has one number per row."""
    if x.ndim >= 4 and x.shape[1:3] == (B, K):
        return jax.P(None, "rows", "heads")
    return jax.P("rows") if x.shape == (B,) else jax.P()


def heads_split(path, _):
    name = getattr(path[-1], "key", "")
    return jax.P(None, "heads") if name == "o" else jax.P(None, None, "heads") if name in "qkv" else jax.P()


def spread(tree, spec_of):
    place = lambda path, x: jax.device_put(x, jax.NamedSharding(MESH, spec_of(path, x)))  # noqa: E731
    return jax.tree.map_with_path(place, tree)


def collectives(hlo):
    """How many numbers each result of the collectives of a program has."""
    of = (
        r"= (\(?\w+\[.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    )
    shapes = [shape for found in re.findall(of, hlo) for shape in re.findall(r"\w+\[([\d,]*)\]", found)]
    return [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]


@pytest.mark.rotating
@methods
def test_a_step_moves_activations_alone_and_its_cache_lies_in_the_one_it_was_given(name):
    rng, run = np.random.default_rng(0), Run(CONFIG, METHODS[name])
    tokens = jnp.asarray(rng.integers(0, 32, (B, T)), jnp.int32)
    lengths, append = jnp.asarray([31, 30, 20, 5], jnp.int32), jnp.asarray([True, True, False, True])
    _, cache = steps.prefill(run, PARAMS, tokens, lengths, None, tokens_bound=T, room=ROOM, compress=True)
    live = Run(CONFIG, run.method.decode_part())
    split = spread(cache, lists_split), *spread((tokens[:, 0], append), lists_split)
    params = spread(PARAMS, heads_split)
    program = steps.step.lower(live, params, *split).compile()
    moved = collectives(program.as_text())
    assert moved and max(moved) <= B // 2 * CONFIG.d_model
    held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(split[0])]
    assert program.memory_analysis().alias_size_in_bytes == sum(held)
    # Values, over some steps. The first row has a full granule for its body at the first one.
    for token in rng.integers(0, 32, (3, B)):
        want, cache = steps.step_keeping(live, PARAMS, cache, jnp.asarray(token, jnp.int32), append)
        got, after = program(params, split[0], spread(jnp.asarray(token, jnp.int32), lists_split), split[2])
        split = after, *split[1:]
        assert off(got, want) < (1e-5 if METHODS[name].store is None else 2e-3)
        for mine, its in zip(kvjax.kept_positions(after), kvjax.kept_positions(cache), strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(
    ("layers", "size", "tail"), sweep(product([1, 2], [1, 2], [(), (3,), (2, 3)]), (2, 2, (2, 3)), (1, 1, ()))
)
def test_writes_into_spread_slots_are_those_into_whole_ones(rng, tail, size, layers):
    """Slots in and outside of what there is; a layer that is data; one token or block, and several."""
    x = rng.normal(size=(3, B, K, 8, *tail)).astype(np.float32)
    for count in (1, 2):
        drawn = [rng.permutation(np.arange(-2, 8 // size + 2))[:count] for _ in range(layers * B * K)]
        start = np.stack(drawn).reshape(layers, B, K, count).astype(np.int32)
        new = rng.normal(size=(layers, B, K, count * size, *tail)).astype(np.float32)
        write = jax.jit(write_rows if size == 1 else write_blocks)
        want = x.copy()
        for i, b, k, c in np.ndindex(start.shape):
            if 0 <= start[i, b, k, c] < 8 // size:
                at = start[i, b, k, c] * size
                want[1 + i, b, k, at : at + size] = new[i, b, k, c * size : (c + 1) * size]
        for place in (lambda *_: jax.P(), lists_split):
            given = x if place is not lists_split else spread(x, place)
            got = write(given, start, new, jnp.asarray(1, jnp.int32))
            np.testing.assert_array_equal(got, want)
