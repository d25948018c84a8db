"""The recurrence of linear attentions on TPUs: the kernels against float64 numpy and the plain form.

Blocks behind the end of a sequence hold no numbers in the interpreters, and neither does fresh memory.
"""

import itertools
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.recurrent import linear_attention as members
from kvjax.ops.recurrent.gated_delta import (
    gated_delta,
    gated_delta_step,
    tpu_gated_delta,
    tpu_gated_delta_step,
)
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, StackedState, chunked, stacked
from kvjax.pallas_kernels.gated_delta.chunk import inverse, take_turns
from tests.ops.oracles import oracle, rms
from tests.ops.recurrences import by_hand
from tests.parity.ops_table import OPS
from tests.sweep import sweep

B, T, H, K, V = 1, 19, 2, 6, 5
BARS = {"float32": 2e-6, "bfloat16": 1e-2}
# (whether every channel has a decay of its own, whether keys erase, dtype)
MAMBA_2, KDA, HALF = (False, False, "float32"), (True, True, "float32"), (True, True, "bfloat16")
KINDS = list(itertools.product([False, True], [False, True], BARS))


def draw(seed, vector, erase, *, b=B, t=T, h=H, k=K, v=V, strength=2.0, dtype="float32"):
    """(tokens, state): unit keys, log decays between 0 and -strength, betas up to 2."""
    rng = np.random.default_rng(seed)
    q, key = rng.normal(size=(2, b, t, h, k))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value, beta = rng.normal(size=(b, t, h, v)), 2 * rng.random((b, t, h, 1))
    g = -strength * rng.random((b, t, h, k if vector else 1))
    q, key, value, p = (jnp.asarray(x, dtype) for x in (q, key, beta * value, beta * key))
    state = jnp.asarray(rng.normal(size=(b, h, k, v)), jnp.float32)
    return RecurrenceInputs(q, key, value, jnp.asarray(g, jnp.float32), p if erase else None), state


def with_holes(tokens, seed=0):
    """Let a fifth of the decays forget everything."""
    gone = np.random.default_rng(seed).random(tokens.log_decay.shape) < 0.2
    return tokens._replace(log_decay=jnp.where(gone, -200.0, tokens.log_decay))


def check(got, want, bar):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x = np.asarray(x, np.float64)
        assert np.isfinite(x).all() and rms(x, y) < bar, rms(x, y)


def kernel(tokens, state, segments=None, chunk=8, **how):
    return jax.jit(partial(tpu_gated_delta, chunk=chunk, **{"interpret": True, "span": 2} | how))(
        tokens, state, segments
    )


def gradient(form, tokens, state, segments=None):
    """(gradients of a weighted sum of everything that `form` returns, what it returns)."""
    rng = np.random.default_rng(9)

    def loss(tokens, state):
        out = form(tokens, state, segments)
        weights = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in out]
        return sum((x * w).sum().astype(state.dtype) for x, w in zip(out, weights, strict=True)), out

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(tokens, state)


@contextmanager
def machine():
    """Yield the interpreter that acts as a TPU does: (its mode), and no races within."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    try:
        yield pltpu.InterpretParams(detect_races=True)
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def plain_gradient(tokens, state, segments=None):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (tokens, state))
        return gradient(chunked, *wide, segments)[0]


@pytest.mark.rotating
@pytest.mark.parametrize("vector, erase, dtype", sweep(KINDS, KDA))
def test_results_and_gradients_are_those_of_the_equation(vector, erase, dtype):
    """Two spans of two chunks, the last of them not whole, of rows of several segments.

    This interpreter moves blocks when the hardware does, tells races, and starts with memory of no numbers.
    """
    tokens, state = draw(4, vector, erase, b=2, t=27, dtype=dtype, strength=1.0)
    tokens = with_holes(tokens)
    segments = jnp.asarray([[0] * 9 + [1] * 18, [3] * 8 + [5] + [2] * 18], jnp.int32)
    with machine() as mode:
        form = partial(tpu_gated_delta, chunk=8, span=2, interpret=mode)
        got, results = gradient(form, tokens, state, segments)
    check(results, by_hand(tokens, state, np.asarray(segments)), BARS[dtype])
    assert got[0].k.dtype == dtype and got[0].log_decay.dtype == jnp.float32
    check(got, plain_gradient(tokens, state, segments), BARS[dtype])


@pytest.mark.rotating
def test_tokens_that_erase_along_another_key_are_two_of_the_kernels():
    tokens, state = draw(3, True, True, b=2)
    tokens = tokens._replace(removal=jnp.roll(tokens.k, 1, axis=-1) * 0.7)
    segments = jnp.asarray([[0] * 9 + [1] * 10, [2] * 19], jnp.int32)
    check(kernel(tokens, state, segments), by_hand(tokens, state, np.asarray(segments)), 2e-6)
    token = jax.tree.map(lambda x: x[:, 0], tokens)
    with pytest.raises(NotImplementedError, match="erases along another key"):
        gated_delta_step(state, token, implementation="tpu interpret")


@pytest.mark.rotating
@pytest.mark.parametrize("t", [1, 8, 16, 17])
def test_any_length_fits(t):
    tokens, state = draw(1, True, True, t=t)
    check(kernel(tokens, state), by_hand(tokens, state), 2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("k, v, h", [(64, 96, 1), (80, 64, 3), (128, 128, 4), (192, 128, 1), (256, 256, 2)])
def test_heads_of_any_width_and_number(k, v, h):
    tokens, state = draw(2, False, True, k=k, v=v, h=h, t=11)
    check(kernel(tokens, state), by_hand(tokens, state), 2e-6)


ORACLES = [
    "linear_attn", "retention", "simple_gla", "gla", "gla_strong_decay", "hgrn2", "mamba2_ssd", "delta_rule",
    "gated_delta_rule", "gated_delta_rule_neg_eig", "kda", "kda_gva", "kda_strong_decay", "gdn2", "comba",
]  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(ORACLES, "kda_gva", "mamba2_ssd"))
def test_every_member_is_its_oracle(name):
    inputs, want = oracle(name)
    how = dict(implementation="tpu interpret")
    got = jax.jit(lambda x: OPS[name](x, **how))(jax.tree.map(jnp.asarray, inputs))
    for key, x in want.items():
        assert got[key].dtype == np.float32 and rms(got[key], x) < 2e-6, key


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", BARS)
def test_the_inverse_survives_keys_that_are_alike(dtype):
    """Powers of this matrix grow beyond 1e15, its inverse does not."""
    rng = np.random.default_rng(0)
    k = rng.normal(size=(128, 4)) + [3, 0, 0, 0]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a = np.tril(2 * rng.random((128, 1)) * (k @ k.T), -1).astype(np.float32)
    assert np.abs(np.linalg.matrix_power(a.astype(np.float64), 32)).max() > 1e15
    got = jax.jit(lambda x: take_turns([inverse(x, dtype == "float32")])[0])(jnp.asarray(a))
    check(got, np.linalg.inv(np.eye(128) + a.astype(np.float64)), BARS[dtype])


@pytest.mark.parametrize("vector, erase, dtype", sweep([MAMBA_2, KDA], KDA))
def test_a_step_is_written_back_as_on_the_machine(vector, erase, dtype):
    tokens, state = draw(8, vector, erase, t=1, h=1)
    token = jax.tree.map(lambda x: x[:, 0], tokens)
    with machine() as mode:
        out, new = jax.jit(partial(tpu_gated_delta_step, interpret=mode))(stacked(state), token)
        check((out[:, None], new.own()), by_hand(tokens, state), 2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("vector, erase, dtype", sweep(KINDS, HALF))
def test_a_step_is_the_equation(vector, erase, dtype):
    tokens, state = draw(9, vector, erase, b=5, h=4, t=1, k=24, v=128, dtype=dtype)
    token = jax.tree.map(lambda x: x[:, 0], tokens)
    step = jax.jit(partial(gated_delta_step, implementation="tpu interpret"))
    out, new = step(state, token)
    assert out.dtype == token.v.dtype and new.dtype == np.float32
    check((out[:, None], new), by_hand(tokens, state), BARS[dtype])
    want = jax.jit(partial(gated_delta_step, implementation="reference"))(state, token)
    check((out, new), want, BARS[dtype])


@pytest.mark.rotating
@pytest.mark.parametrize("form", sweep(["reference", "tpu interpret"], "tpu interpret"))
def test_a_step_over_stacked_states_changes_its_layer_alone(form):
    tokens, state = draw(10, False, True, b=2, h=4, t=1, k=8, v=128)
    token = jax.tree.map(lambda x: x[:, 0], tokens)
    step = jax.jit(partial(gated_delta_step, implementation=form))
    out, new = step(state, token)
    others = jnp.full((3, *state.shape), jnp.nan).at[1].set(state)
    found, (layers, layer) = step(StackedState(others, jnp.asarray(1)), token)
    np.testing.assert_array_equal(found, out)
    assert layer == 1
    np.testing.assert_array_equal(layers, others.at[1].set(new))


def test_a_stacked_state_takes_one_token():
    tokens, state = draw(0, False, True, t=2)
    with pytest.raises(ValueError, match="a stacked state takes one token without segments, got 2"):
        members.run(tokens, StackedState(state[None], 0))


@pytest.mark.rotating
def test_decoding_a_member_goes_through_the_step():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 1, 2, n)), jnp.float32) for n in (8, 8, 128))
    beta, state = (jnp.asarray(rng.random(x), jnp.float32) for x in ((2, 1, 2), (2, 2, 8, 128)))
    call = partial(members.gated_delta_rule, q, k, v, None, beta, initial_state=state, recurrent=True)
    check(call(implementation="tpu interpret"), call(), 2e-6)
    with pytest.raises(NotImplementedError, match="has no recurrent form for 2 tokens"):
        twice = (jnp.repeat(x, 2, 1) for x in (q, k, v))
        members.linear_attention(*twice, recurrent=True, implementation="tpu")


def test_what_cannot_run_says_why():
    tokens, state = draw(0, False, True)
    token = jax.tree.map(lambda x: x[:, 0], tokens)
    with pytest.raises(NotImplementedError, match="there is no such form"):
        gated_delta(tokens, implementation="cuda")
    with pytest.raises(NotImplementedError, match="tokens of bfloat16 and float32, expected all"):
        gated_delta(tokens._replace(q=tokens.q.astype(jnp.bfloat16)), implementation="tpu")
    with pytest.raises(NotImplementedError, match="log decays of bfloat16, expected float32"):
        half = tokens.log_decay.astype(jnp.bfloat16)
        gated_delta(tokens._replace(log_decay=half), implementation="tpu")
    with pytest.raises(NotImplementedError, match="heads of 300 x 5, expected at most 256 x 256"):
        gated_delta(draw(0, False, False, k=300)[0], implementation="tpu")
    with pytest.raises(NotImplementedError, match="states of 6 x 5 would be copied"):
        gated_delta_step(state, token, implementation="tpu")
    with pytest.raises(NotImplementedError, match="states of bfloat16, expected float32"):
        gated_delta_step(state.astype(jnp.bfloat16), token, implementation="tpu")


@pytest.mark.rotating
def test_the_plain_form_takes_bfloat16_tokens():
    tokens, state = draw(0, True, True, dtype="bfloat16")
    out, last = gated_delta(tokens, state)
    assert out.dtype == jnp.bfloat16 and last.dtype == np.float32
    check((out, last), by_hand(tokens, state), 1e-2)


@pytest.mark.parametrize("vector, erase, dtype", sweep([MAMBA_2, KDA, HALF, (False, False, "bfloat16")]))
def test_several_chunks_of_the_real_size(vector, erase, dtype):
    tokens, state = draw(10, vector, erase, t=300, h=1, strength=0.1, dtype=dtype)
    call = jax.jit(partial(gated_delta, implementation="tpu interpret"))
    check(call(tokens, state), by_hand(tokens, state), BARS[dtype])
