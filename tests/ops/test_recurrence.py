"""The recurrence of linear attentions: against stored float64 results, and against itself cut in any way."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent import linear_attention as ops
from kvjax.ops.recurrent.recurrence import chunked, scan, step, tokens_of
from tests.ops.oracles import ORACLES, oracle, rms
from tests.ops.recurrences import B, H, K, T, V, by_hand, draw
from tests.parity.ops_table import OPS
from tests.sweep import sweep


def test_every_oracle_has_a_function():
    assert {path.stem for path in ORACLES.iterdir()} == set(OPS)


# These have files of their own, which compare them with their equations.
APART = (
    "rwkv6", "rwkv7", "hgrn", "gated_delta_product", "log_linear_attn", "log_linear_gated_delta", "gsa",
    "abc", "based", "infini_attention", "lattice_decoding", "transformer_vq", "gau_mixed_chunk", 
    "local_linear_attn", "mesa_net", "forgetting_attn", "path_attn", "deltaformer", "dmc",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", sweep(OPS, *(name for name in OPS if name not in (*APART, "cross_layer_kv")))
)
def test_float32_results_of_both_forms_are_those_of_the_oracle(name):
    inputs, want = oracle(name)
    # A layer of tensor products has one form: it expands its factors for a step as it does for a prompt.
    forms = [{}] if name == "tpa" else [{"recurrent": recurrent} for recurrent in (False, True)]
    both = jax.jit(lambda x: [OPS[name](x, **form) for form in forms])
    for got in both(jax.tree.map(jnp.asarray, inputs)):
        assert got.keys() == want.keys()
        for key, x in want.items():
            exact = got[key].dtype == np.float32 or not np.issubdtype(x.dtype, np.floating)
            assert exact and rms(got[key], x) < 1e-6, key


@pytest.mark.parametrize("name", sweep(["gla", "kda", "mamba2_ssd"], "kda"))
def test_bfloat16_inputs_keep_a_float32_state(name):
    inputs, want = oracle(name)
    half = {n: jnp.asarray(x, jnp.float32 if "state" in n else jnp.bfloat16) for n, x in inputs.items()}
    if name == "mamba2_ssd":  # D x is added to the output, whose dtype is the state's
        half["x"], half["D"] = (half[n].astype(jnp.float32) for n in ("x", "D"))
    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(OPS[name])(half)
    assert got["final_state"].dtype == np.float32
    assert all(rms(got[n], want[n]) < 1e-2 for n in want)


MEMBERS = [(vector, erase) for vector in (False, True) for erase in (False, True)]


@pytest.mark.rotating
@pytest.mark.parametrize("vector, erase", sweep(MEMBERS, MEMBERS[0], MEMBERS[3]))
def test_float64_results_are_exact_in_every_form(rng, vector, erase):
    with jax.enable_x64(True):
        tokens = jax.tree.map(lambda x: x.astype(jnp.float64), draw(rng, vector=vector, erase=erase))
        state = jnp.asarray(rng.normal(size=(B, H, K, V)))
        want = by_hand(tokens, state)
        for form in (scan, chunked, partial(chunked, chunk=7)):
            for got, x in zip(jax.jit(form)(tokens, state), want, strict=True):
                assert rms(got, x) < 1e-10


def test_a_step_is_one_token_of_the_scan(rng):
    tokens = draw(rng)
    state = jnp.zeros((B, H, K, V), jnp.float32)
    (want, _), one = by_hand(tokens, state), jax.jit(step)
    for t in range(5):
        out, state = one(state, jax.tree.map(lambda x, t=t: x[:, t], tokens))
        np.testing.assert_allclose(out, want[:, t], atol=1e-6)


def both_forms_are_the_equation(rng, tokens, segments):
    """From a state that is not zero."""
    state = jnp.asarray(rng.normal(size=(B, H, K, V)), jnp.float32)
    want, end = by_hand(tokens, state, np.asarray(segments))
    for form in (scan, chunked):
        got, last = jax.jit(form)(tokens, state, segments)
        np.testing.assert_allclose(got, want, atol=3e-6)
        np.testing.assert_allclose(last, end, atol=3e-6)


@pytest.mark.parametrize("vector", sweep([False, True], False))
def test_what_is_read_may_be_taken_away_along_another_key(rng, vector):
    """RWKV-7 does; decays of heads with it are no published layer, so they are held to the equation here."""
    tokens = draw(rng, vector=vector)
    tokens = tokens._replace(removal=jnp.roll(tokens.k, 1, axis=-1) * 0.7)
    segments = jnp.asarray([[0] * 9 + [1] * (T - 9), [0] * 20 + [4] * (T - 20)], jnp.int32)
    both_forms_are_the_equation(rng, tokens, segments)


@pytest.mark.rotating
@pytest.mark.parametrize("cut", sweep([1, 16, 30], 30))
def test_a_sequence_may_be_cut_anywhere(rng, cut):
    tokens = draw(rng)
    (want, last), run = by_hand(tokens, np.zeros((B, H, K, V))), jax.jit(chunked)
    first, state = run(jax.tree.map(lambda x: x[:, :cut], tokens))
    second, state = run(jax.tree.map(lambda x: x[:, cut:], tokens), state)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), want, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


@pytest.mark.parametrize("vector", sweep([False, True], True))
def test_packed_segments_are_each_alone(rng, vector):
    tokens = draw(rng, vector=vector)
    ends = [[9, 33, T], [20, 21, T]]
    segments = jnp.asarray([np.searchsorted(e, np.arange(T), side="right") for e in ends], jnp.int32)
    both_forms_are_the_equation(rng, tokens, segments)


@pytest.mark.rotating
def test_masked_tokens_leave_the_state_unchanged(rng):
    q, k, v, g, *_ = draw(rng)
    beta = jnp.asarray(rng.random((B, T, H)), jnp.float32)
    real = jnp.arange(T)[None] < jnp.asarray([[T], [T - 11]])
    run = jax.jit(ops.gated_delta_rule)
    _, got = run(q, k, v, g, beta, mask=real)
    _, want = run(*(x[1:, : T - 11] for x in (q, k, v, g, beta)))
    np.testing.assert_allclose(got[1:], want, atol=2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(["gla_strong_decay", "kda_strong_decay"], "kda_strong_decay"))
def test_gradients_stay_finite_under_strong_decay_and_agree(name):
    inputs = jax.tree.map(jnp.asarray, oracle(name)[0])

    def loss(x, recurrent):
        return sum((y**2).sum() for y in OPS[name](x, recurrent=recurrent).values())

    got, want = (jax.jit(jax.grad(partial(loss, recurrent=how)))(inputs) for how in (False, True))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((got, want)))
    for key, x in want.items():
        assert rms(got[key], x) < 1e-5, key


@pytest.mark.rotating
def test_chunks_of_any_size_take_decays_beyond_the_range_of_floats(rng):
    """Sums of these decays have no exponential in float32, and chunks of 7 are filled up to 8."""
    tokens = draw(rng, vector=True, erase=True)
    strong = jnp.where(jnp.asarray(rng.random(tokens.log_decay.shape)) < 0.3, -400.0, tokens.log_decay)
    tokens = tokens._replace(log_decay=strong)

    def loss(tokens, form):
        return (form(tokens)[0] ** 2).sum()

    want, slope = jax.jit(jax.value_and_grad(partial(loss, form=scan)))(tokens)
    for size in (7, 16):
        got, mine = jax.jit(jax.value_and_grad(partial(loss, form=partial(chunked, chunk=size))))(tokens)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        for x, y in zip(*map(jax.tree.leaves, (mine, slope)), strict=True):
            assert rms(x, y) < 1e-4, size


def test_keys_serve_a_group_of_value_heads(rng):
    q, k = (jnp.asarray(rng.normal(size=(B, T, 1, K)), jnp.float32) for _ in range(2))
    v = jnp.asarray(rng.normal(size=(B, T, H, V)), jnp.float32)
    shared = tokens_of(q, k, v)
    assert shared.k.shape == (B, T, H, K) and shared.log_decay.shape == (B, T, H, 1)
    run = jax.jit(chunked)
    out, _ = run(shared)
    for h in range(H):
        one, _ = run(tokens_of(q, k, v[:, :, h : h + 1]))
        np.testing.assert_allclose(out[:, :, h : h + 1], one, atol=1e-6)
