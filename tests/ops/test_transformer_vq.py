"""Transformer-VQ: against dense attention over quantised keys, and against its equation however it is cut."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.transformer_vq import VQState, quantise, transformer_vq
from tests.ops import rows
from tests.ops.oracles import oracle, rms
from tests.parity.ops.memory import OPS

B, T, H, K, V, C, BLOCK = 2, rows.T, 2, 4, 3, 4, 5
BOOK = np.random.default_rng(1).normal(size=(H, C, K))
forms = pytest.mark.parametrize("recurrent", [False, True], ids=["chunked", "recurrent"])


def draw(rng, t=T):
    return {n: rng.normal(size=(B, t, H, V if n == "v" else K)) for n in "qkv"}


def draw_state(rng, lengths=(3, 8)):
    """Rows at different places in their blocks; the first one has not filled its first."""
    state = [empty(), empty()]
    for s, n in zip(state, lengths, strict=True):
        s.codes[:n], s.values[:n] = rng.integers(0, C, (n, H)), rng.normal(size=(n, H, V))
    state[1].counts[:], state[1].means[:] = rng.integers(1, 9, (H, C)), rng.normal(size=(H, C, V))
    state[1].counts[0, 2], state[1].means[0, 2] = 0, 0
    stacked = VQState(*(np.stack(x) for x in zip(*state, strict=True)))
    return stacked._replace(length=np.asarray(lengths, np.int32))


def empty():
    shapes = (H, C), (H, C, V), (2 * BLOCK, H), (2 * BLOCK, H, V)
    kinds = (np.int32, np.float64, np.int32, np.float64)
    return VQState(*(np.zeros(s, d) for s, d in zip(shapes, kinds, strict=True)), np.int32(0))


def row(x, state):
    """Token by token, every memory as it is described: old codes, and the tokens of two blocks one by one."""
    counts, means, codes, values, n = (np.array(s) for s in (state or empty()))
    out, heads = np.zeros(x["v"].shape), np.arange(H)
    for t in range(len(out)):
        codes[n] = [np.argmin(((x["k"][t, h] - BOOK[h]) ** 2).sum(-1)) for h in heads]
        values[n] = x["v"][t]
        n = n + 1
        for h in heads:
            scores = BOOK[h] @ x["q"][t, h] * K**-0.5
            weights = np.exp(np.concatenate([scores[codes[:n, h]], scores]))
            weights[n:] *= counts[h]
            out[t, h] = weights @ np.concatenate([values[:n, h], means[h]]) / weights.sum()
        if n == 2 * BLOCK:
            for i, h in np.ndindex(BLOCK, H):
                c = codes[i, h]
                counts[h, c] += 1
                means[h, c] += (values[i, h] - means[h, c]) / counts[h, c]
            for window in (codes, values):
                window[:BLOCK], window[BLOCK:] = window[BLOCK:].copy(), 0
            n = n - BLOCK
    return out, VQState(counts, means, codes, values, np.int32(n))


def op(x, **how):
    return transformer_vq(x["q"], x["k"], x["v"], jnp.asarray(BOOK, x["v"].dtype), block=BLOCK, **how)


@pytest.mark.rotating
def test_bfloat16_inputs_keep_a_float32_state():
    inputs, want = oracle("transformer_vq")
    got = jax.jit(OPS["transformer_vq"])({n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()})
    assert all(x.dtype == np.float32 for x in got.values())
    assert all(rms(got[n], want[n]) < 1e-2 for n in want)


@pytest.mark.rotating
@forms
def test_packed_rows_are_the_equation_from_any_state(rng, recurrent):
    rows.check_packed_rows(partial(op, recurrent=recurrent), row, draw(rng), draw_state(rng))


def test_a_sequence_may_be_cut_anywhere(rng):
    rows.check_cuts(op, row, draw(rng), draw_state(rng))


def test_segments_shorter_than_a_block_are_each_alone(rng):
    x, ends = draw(rng), ([2, 3, 3 + BLOCK, 3 + 3 * BLOCK, T], [1, 2, 3, 4, T - BLOCK, T])
    want = rows.by_rows(row, x, ends=ends)
    with jax.enable_x64(True):
        got = jax.jit(lambda x, s: op(x, segments=s))(jax.tree.map(jnp.asarray, x), rows.packed(ends))
    rows.close(got, want, 1e-10)


@pytest.mark.rotating
def test_a_row_of_nothing_but_padding_is_finite_and_stays_empty(rng):
    x = jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), draw(rng, t=9))
    mask = jnp.zeros((B, 9), bool).at[1].set(True)

    def loss(x):
        out, state = op(x, mask=mask)
        return (out**2).sum() + (state.values**2).sum(), state

    grads, state = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert state.length.tolist() == [0, 9] and not state.values[0].any()
    for g in jax.tree.leaves(grads):
        assert not np.any(g[0]) and np.isfinite(g).all()


@pytest.mark.rotating
def test_it_is_attention_over_quantised_keys(rng):
    with jax.enable_x64(True):
        x = jax.tree.map(jnp.asarray, draw(rng))
        _, k = quantise(x["k"], jnp.asarray(BOOK))
        s = np.einsum("bihk,bjhk->bhij", x["q"], k) * K**-0.5
        p = np.exp(np.where(np.tri(T, dtype=bool), s, -np.inf))
        want = np.einsum("bhij,bjhv->bihv", p / p.sum(-1, keepdims=True), x["v"])
        assert rms(jax.jit(op)(x)[0], want) < 1e-10


@pytest.mark.rotating
def test_the_nearest_code_is_found_and_its_vector_is_exact(rng):
    k = jnp.asarray(rng.normal(size=(B, T, H, K)), jnp.float32)
    book = jnp.asarray(BOOK, jnp.float32)
    codes, vectors = quantise(k, book)
    distance = ((np.asarray(k)[:, :, :, None] - np.asarray(book)) ** 2).sum(-1)
    np.testing.assert_array_equal(codes, distance.argmin(-1))
    np.testing.assert_array_equal(vectors, np.asarray(book)[np.arange(H), codes])


@pytest.mark.rotating
def test_gradients_go_straight_through_the_codes_of_two_blocks(rng):
    """The reference moves the key of every token of the two newest blocks, and no other key."""
    with jax.enable_x64(True):
        x = jax.tree.map(jnp.asarray, draw(rng))
        weights = jnp.asarray(rng.normal(size=x["v"].shape))
        _, k = quantise(x["k"], jnp.asarray(BOOK))
        i, j = np.arange(T)[:, None], np.arange(T)[None]
        near, past = jnp.asarray(j // BLOCK >= i // BLOCK - 1)[None, None], jnp.asarray(j <= i)[None, None]

        def reference(x):
            moved = k + x["k"] - jax.lax.stop_gradient(x["k"])
            s = jnp.where(near, *(jnp.einsum("bihk,bjhk->bhij", x["q"], y) for y in (moved, k)))
            p = jax.nn.softmax(s * K**-0.5, where=jnp.broadcast_to(past, s.shape))
            return (jnp.einsum("bhij,bjhv->bihv", p, x["v"]) * weights).sum()

        got = jax.jit(jax.grad(lambda x: (op(x)[0] * weights).sum()))(x)
        rows.close(got, jax.jit(jax.grad(reference))(x), 1e-10)


@pytest.mark.rotating
def test_gradients_are_those_of_single_steps_from_any_state(rng):
    state = draw_state(rng)
    state = state._replace(**{n: jnp.asarray(getattr(state, n)) for n in ("counts", "codes", "length")})
    rows.check_gradients(op, partial(op, recurrent=True), draw(rng), state)


def test_a_state_of_other_blocks_is_refused(rng):
    x = jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), draw(rng))
    state = jax.tree.map(jnp.asarray, draw_state(rng))
    with pytest.raises(ValueError, match="a state of blocks of 5 tokens, but block=4"):
        transformer_vq(x["q"], x["k"], x["v"], jnp.asarray(BOOK, jnp.float32), block=4, initial_state=state)
