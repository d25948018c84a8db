"""Rows in a fitted basis: what comes back, how queries meet it, and that folded weights give the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.loops.bases import dominated, gradual, rounded
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import Fitted
from kvjax.state.code_forms import meet
from kvjax.state.codes import Codes, bind, dense
from kvjax.store.affine import Affine
from kvjax.store.basis import InBasis
from kvjax.store.clipped import Clipped
from kvjax.store.rotate import Rotate
from tests.float64.codes import affine, clipped
from tests.float64.reference import Prompt
from tests.methods.battery import MAIN, decoder, model, off

TEXTS = [list(range(1, 40)), list(range(40, 10, -1))]


def made_up(rng, shift=False):
    m = rng.normal(size=(2, 2, 16, 16)) + 3 * np.eye(16)
    arrays = {"key matrix": m, "key inverse": np.linalg.inv(m)}
    arrays |= {"key shift": rng.normal(size=(2, 2, 16))} if shift else {}
    return Fitted({n: x.astype(np.float32) for n, x in arrays.items()}, "InBasis", "")


def lent(fitted):
    return {fitted.digest: {n: jnp.asarray(x) for n, x in fitted.arrays.items()}}


@pytest.mark.parametrize("shift", [False, True])
def test_rows_are_encoded_in_the_basis_of_their_head(rng, shift):
    fitted, x = made_up(rng, shift), rng.normal(size=(2, 3, 2, 5, 16))
    codec = bind(InBasis("key", "qserve", fitted) >> Affine(4), lent(fitted))
    got = jax.jit(lambda x: codec.decode(codec.encode(x), 16, jnp.float32))(x.astype(np.float32))
    m, inverse = (fitted.arrays[f"key {n}"][:, None].astype(float) for n in ("matrix", "inverse"))
    by = fitted.arrays["key shift"][:, None, :, None].astype(float) if shift else 0.0
    np.testing.assert_allclose(got, affine(4, 16)((x - by) @ inverse) @ m + by, atol=2e-3)


@pytest.mark.parametrize("inner", [Affine(4), Rotate() >> Affine(4)])
@pytest.mark.parametrize("shift", [False, True])
def test_queries_meet_codes_in_their_basis_as_they_meet_what_comes_back(rng, shift, inner):
    fitted, x = made_up(rng, shift), jnp.asarray(rng.normal(size=(2, 3, 2, 5, 16)), jnp.float32)
    word = InBasis("key", "qserve", fitted) >> inner
    codes = Codes(jax.jit(bind(word, lent(fitted)).encode)(x), word, 16, "float32", lent(fitted))
    decode = jax.jit(dense)
    q = jnp.asarray(rng.normal(size=(3, 4, 1, 16)), jnp.float32)
    for layer in (0, 1):
        met = meet(q, codes, codes, layer)
        assert met.turned != shift
        products = lambda q, k: np.einsum("bkgh,bksh->bkgs", np.reshape(q, (3, 2, 2, 16)), k)  # noqa: E731
        whole, k, v = (np.asarray(decode(x))[layer] for x in (codes, met.k, met.v))
        want = products(q, whole)
        np.testing.assert_allclose(products(met.q, k), want, rtol=2e-4, atol=2e-3)
        out = lambda p, v: np.einsum("bkgs,bksh->bkgh", p, v).reshape(3, 4, 1, 16)  # noqa: E731
        back = met.back(jnp.asarray(out(np.abs(want), v)))
        np.testing.assert_allclose(back, out(np.abs(want), whole), rtol=2e-3, atol=0.1)


@pytest.mark.rotating
def test_smooth_keys_are_those_of_a_model_in_whose_weights_the_scales_are_folded():
    m = model("4/2")
    fitted = kvjax.fit(m, "qserve", TEXTS)
    by = np.einsum("lkhh->lkh", fitted.arrays["key matrix"])
    most = np.abs(read_keys_values(m, [TEXTS]).k).max(2)
    np.testing.assert_allclose(by, np.sqrt(np.maximum(most, np.roll(most, 8, -1))), rtol=1e-5)
    of_q, of_k = (np.repeat(by, n, 1).reshape(2, 1, 1, -1) for n in (2, 1))
    each = enumerate(m.params["layers"])
    layers = tuple(p | {"q": p["q"] * of_q[i], "k": p["k"] / of_k[i]} for i, p in each)
    folded = dataclasses.replace(m, params=m.params | {"layers": layers})
    online = kvjax.prefill(m, MAIN.first, method=kvjax.method("qserve", fitted=fitted), room=8)[1]
    inside = kvjax.prefill(folded, MAIN.first, method=kvjax.method("zeroquant", bits=4), room=8)[1]
    for token in MAIN.steps[:2]:
        got, online = kvjax.step(m, online, token)
        want, inside = kvjax.step(folded, inside, token)
        assert off(got, want) < 2e-3


def test_a_fit_of_another_model_and_an_unknown_rule_are_refused(rng):
    fitted = Fitted({n: x[:1] for n, x in made_up(rng).arrays.items()}, "InBasis", "")
    with pytest.raises(InputError, match=r"the \(layers, KV heads, channels, channels\) of its basis are"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("qserve", fitted=fitted))
    word = InBasis("key", "nobody") >> Affine(4)
    with pytest.raises(InputError, match="no rule is known for the basis of nobody"):
        kvjax.fit(model("4/2"), Method(store=Store(word)), TEXTS)
    with pytest.raises(ValueError, match="a basis is of a 'key' or a 'value'"):
        InBasis("keys", "qserve")


def through(fitted, of, x, codec):
    """Compute the squared error of rows that come back of codes in a basis, as a share of them, by layer."""
    m, inverse = (fitted.arrays[f"{of} {n}"].astype(float) for n in ("matrix", "inverse"))
    np.testing.assert_allclose(m @ inverse, np.broadcast_to(np.eye(16), m.shape), atol=1e-4)
    by = fitted.arrays.get(f"{of} shift", np.zeros((2, 2, 16)))[:, :, None].astype(float)
    return lost(codec((x - by) @ inverse) @ m + by, x)


def lost(found, x):
    return np.square(found - x).sum((1, 2, 3)) / np.square(x).sum((1, 2, 3))


def test_a_basis_learnt_through_codes_comes_back_closer_than_a_rotation_and_than_none():
    m, code = model("4/2"), affine(2, 16)
    x = read_keys_values(m, [TEXTS]).k.astype(float)
    got = through(kvjax.fit(m, "flatquant:bits=2", TEXTS), "key", x, code)
    turn = Rotate().matrix(16)
    for other in (code(x), code(x @ turn.T) @ turn):
        assert (got < lost(other, x)).all()
    numbers = jnp.asarray(x, jnp.float32)
    # Ranges in float16 and in float32: a number between two codes may become the other one.
    assert (np.abs(np.asarray(rounded(numbers, 2, 1.0, 16)) - code(x)) < 5e-3).mean() > 0.99


def test_main_directions_are_those_of_the_texts():
    m = model("4/2")
    x = read_keys_values(m, [TEXTS]).k.astype(float)
    turned = x @ kvjax.fit(m, "resq:rank=4", TEXTS).arrays["key inverse"]
    squares = np.square(turned).sum(2)
    singular = np.linalg.svd(x, compute_uv=False)
    np.testing.assert_allclose(squares, singular**2, rtol=1e-3)


def test_spinquant_learns_a_rotation_by_which_values_come_back_closer():
    m, code = model("4/2"), affine(2, 16)
    x = read_keys_values(m, [TEXTS]).v.astype(float)
    fitted = kvjax.fit(m, "spinquant:bits=2", TEXTS)
    assert set(fitted.arrays) == {"value matrix", "value inverse"}
    turn = fitted.arrays["value inverse"].astype(float)
    np.testing.assert_allclose(
        turn @ turn.swapaxes(-1, -2), np.broadcast_to(np.eye(16), turn.shape), atol=1e-5
    )
    np.testing.assert_array_equal(turn[:, 0], turn[:, 1])
    drawn = Rotate().matrix(16)
    assert (through(fitted, "value", x, code) < lost(code(x @ drawn.T) @ drawn, x)).all()


@pytest.mark.rotating
@pytest.mark.parametrize(("id", "group"), [("omniquant", 16), ("wkvquant", 8)])
def test_learnt_scales_and_shifts_bring_channels_back_closer(id, group):
    m, code = model("4/2"), affine(2, group)
    fitted = kvjax.fit(m, f"{id}:bits=2" + (f",group={group}" if id == "wkvquant" else ""), TEXTS)
    for of, x in read_keys_values(m, [TEXTS])._asdict().items():
        of = {"k": "key", "v": "value"}[of]
        scales = np.einsum("lkhh->lkh", fitted.arrays[f"{of} matrix"])
        np.testing.assert_array_equal(fitted.arrays[f"{of} matrix"], scales[..., None] * np.eye(16))
        paired = np.allclose(scales, np.roll(scales, 8, -1), rtol=1e-5)
        assert paired == (id == "omniquant" and of == "key")
        assert (f"{of} shift" in fitted.arrays) == (id == "wkvquant" or of == "value")
        assert (through(fitted, of, x.astype(float), code) < lost(code(x.astype(float)), x)).all()


def test_oscar_turns_to_what_queries_ask_and_mixes_that_as_the_authors_do():
    """U H P of the authors' compute_kv_rotation.py ("qqt_sst", "r_h_pbr"), from float64 readings."""
    fitted = kvjax.fit(model("4/2"), "oscar", TEXTS)
    prompts = [Prompt(decoder("4/2"), tokens) for tokens in TEXTS]
    mixed = np.array([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) / 4
    backwards = [int(f"{i:04b}"[::-1], 2) for i in range(16)]
    for layer in range(2):
        q, k, v = (np.concatenate([getattr(p, n)[layer] for p in prompts], 1) for n in "qkv")
        of_queries = [np.einsum("gth,gti->hi", x, x) / x[..., 0].size for x in q.reshape(2, 2, -1, 16)]
        weights = [np.einsum("th,hi,ti->t", x, c, x) for x, c in zip(k, of_queries, strict=True)]
        of_values = [(x.T * w / w.sum()) @ x for x, w in zip(v, weights, strict=True)]
        for of, covariance in (("key", np.mean(of_queries, 0)), ("value", np.mean(of_values, 0))):
            turn = fitted.arrays[f"{of} inverse"][layer].astype(float)
            np.testing.assert_array_equal(turn[0], turn[1])
            # The channel of rank i, by falling eigenvalues, stands where i read backwards says.
            order = np.empty(16, int)
            order[backwards] = np.arange(16)[::-1]
            u = turn[0] @ np.eye(16)[order] @ mixed.T
            found = u.T @ covariance @ u
            np.testing.assert_allclose(found, np.diag(np.linalg.eigvalsh(covariance)), atol=2e-5)


@pytest.mark.rotating
def test_rows_are_cut_at_a_quantile_of_their_sizes(rng):
    x = rng.normal(size=(2, 3, 100))
    codec = Clipped(0.29) >> Affine(8)
    got = codec.decode(codec.encode(jnp.asarray(x, jnp.float32)), 100, jnp.float32)
    np.testing.assert_allclose(got, clipped(29, affine(8, 100))(x), atol=1e-4)
    np.testing.assert_array_equal((Clipped(1.0) >> Affine(4)).encode(jnp.ones((1, 4)))["words"], 0)
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="rows are cut at a share"):
            Clipped(share)


def test_codes_that_a_basis_cannot_be_learnt_through_are_refused():
    for inner, says in (
        (Affine(4, "channel", 8), "an Affine of tokens"),
        (Affine(4, group=5), "must divide"),
    ):
        word = InBasis("value", "spinquant") >> inner
        with pytest.raises(InputError, match=says):
            kvjax.fit(model("4/2"), Method(store=Store(Affine(4), word)), TEXTS)


def test_affinequant_learns_matrices_whose_diagonals_dominate():
    m, code = model("4/2"), affine(2, 16)
    x = read_keys_values(m, [TEXTS]).v.astype(float)
    fitted = kvjax.fit(m, "affinequant:bits=2", TEXTS)
    assert set(fitted.arrays) == {"key matrix", "key inverse", "value matrix", "value inverse", "value shift"}
    learnt = fitted.arrays["value inverse"]
    diagonal = np.abs(np.einsum("lkhh->lkh", learnt))
    beside = np.abs(learnt).sum(-1) - diagonal
    assert (beside < diagonal).all() and (beside > 0.01 * diagonal).any()
    by = np.sqrt(np.abs(x).max(2))[:, :, None]
    middle = ((x.max(2) + x.min(2)) / 2)[:, :, None]
    start = lost(code((x - middle) / by) * by + middle, x)
    got = through(fitted, "value", x, code)
    assert (got < 0.9 * np.minimum(start, lost(code(x), x))).all()


def test_a_gradual_mask_grows_from_the_diagonal_and_rows_shrink_to_their_bound(rng):
    x = rng.normal(size=(2, 4, 4)).astype(np.float32)
    for share, width in ((0.25, 1), (0.5, 2), (1.0, 3)):
        got = gradual({"beside": jnp.asarray(x), "scales": jnp.ones((2, 4))}, jnp.float32(share))
        want = np.stack([np.tril(np.triu(a, -width), width) for a in x])
        np.testing.assert_array_equal(got["beside"], want)
    small, large = 0.01 * x[0], 10 * x[0]
    off = lambda a: a - np.diag(np.diag(a))  # noqa: E731
    np.testing.assert_allclose(dominated(jnp.asarray(small)), off(small), rtol=1e-6)
    shrunk = np.asarray(dominated(jnp.asarray(large)))
    np.testing.assert_allclose(np.abs(shrunk).sum(-1), 0.9, rtol=1e-5)
    share = 0.9 / np.abs(off(large)).sum(-1, keepdims=True)
    np.testing.assert_allclose(shrunk, off(large) * share, rtol=1e-5, atol=1e-7)
