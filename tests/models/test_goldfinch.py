"""GoldFinch against its equations in float64, and what its one cache must do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.config import Config
from kvjax.models.expand import with_previous
from kvjax.models.feed_forward import NoMLP
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.goldfinch import FinchC2, Gold, digits, from_digits, to_digits
from kvjax.models.model import Model
from kvjax.models.params import init, plan
from kvjax.models.transformer import forward
from kvjax.ops.attention.union import Keys
from kvjax.state.codes import Codes
from tests.models.single import D, close, drawn, run

T, HEADS, WIDTH = 9, 2, 4
STORE = Gold(rank=3, mix_rank=2, adapt_rank=5, kv_input=0)
READ = dataclasses.replace(STORE, source=0, kv_input=None)
CONFIG = Config(
    vocab=700, d_model=HEADS * WIDTH, layers=2, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH, d_ff=12,
    mixers=(STORE, READ), mlps=(NoMLP(), NoMLP()), embed_scale=1.5,
)  # fmt: skip


def rms(x, weight=1.0, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x, p, name, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    norm = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return norm * p[f"{name}_norm"] + p[f"{name}_norm_bias"]


@pytest.mark.rotating
def test_finch_c2_is_its_equation_token_by_token(rng):
    mixer = FinchC2(heads=HEADS, head_dim=WIDTH, mix_rank=3, decay_rank=2, second_rank=4)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    states, last, out = np.zeros((HEADS, WIDTH, WIDTH)), np.zeros(D), []
    for now in x:
        delta = last - now
        low = np.split(np.tanh((now + delta * p["mix_x"]) @ p["mix_down"]), 5)
        mixed = {n: now + delta * (p[f"mix_{n}"] + low[i] @ p["mix_up"][i]) for i, n in enumerate("rkvwu")}
        d = np.tanh(mixed["w"] @ p["decay_down"]) @ p["decay_up"] + p["decay_up_bias"]
        decay = np.exp(-np.exp(d))
        r, k, v = (mixed[n] @ p[n] for n in "rkv")
        k = k * (1 - decay)
        o = mixed["u"] @ p["v"] + np.tanh(mixed["u"] @ p["second_down"]) @ p["second_up"]
        for h in range(HEADS):
            at = slice(h * WIDTH, (h + 1) * WIDTH)
            o[at] += states[h].T @ r[at]
            states[h] = np.diag(decay[at]) @ states[h] + np.outer(k[at], v[at])
        out.append(layer_norm(o, p, "out") @ p["o"])
        last = now
    close(run(mixer, p, x), np.stack(out))


def gold(p, x, hidden, embedded):
    """One layer's attention for all tokens, from its normed input, the compressed hidden state and tokens."""
    c = hidden
    z = np.stack([rms(np.concatenate([e, low]) @ p["restore"]) for e, low in zip(embedded, c, strict=True)])
    n = rms(embedded)
    keys, values = [], []
    for t in range(T):
        zero = np.zeros(D_MODEL)
        z_before, n_before = (z[t - 1], n[t - 1]) if t else (zero, zero)
        a = n[t] + (n_before - n[t]) * p["mix_x"]
        low = np.split(np.tanh(a @ p["mix_down"]), 2)
        k = z[t] + (z_before - z[t]) * (p["mix_k"] + low[0] @ p["mix_up"][0])
        v = n[t] + (n_before - n[t]) * (p["mix_v"] + low[1] @ p["mix_up"][1])
        k = k + np.tanh(k @ p["adapt_k_down"]) @ p["adapt_k_up"]
        v = v + np.tanh(v @ p["adapt_v_down"]) @ p["adapt_v_up"]
        keys.append(layer_norm(k, p, "k"))
        values.append(layer_norm(v, p, "v"))
    keys, values, q = np.stack(keys), np.stack(values), layer_norm(x @ p["q"], p, "q")
    out = np.zeros((T, D_MODEL))
    for t in range(T):
        for h in range(HEADS):
            at = slice(h * WIDTH, (h + 1) * WIDTH)
            weight = np.exp(keys[: t + 1, at] @ q[t, at] / np.sqrt(WIDTH))
            out[t, at] = weight @ values[: t + 1, at] / weight.sum()
    return layer_norm(out, p, "out") @ p["o"]


D_MODEL = CONFIG.d_model


def random_params(rng):
    params = init(CONFIG, jax.random.key(0), groups=plan(CONFIG, stacked=False))
    return jax.tree.map(lambda x: np.asarray(x, np.float64) + 0.3 * rng.standard_normal(x.shape), params)


@pytest.mark.rotating
def test_gold_layers_share_one_cache_of_compressed_rows_and_tokens(rng):
    params, ids = random_params(rng), rng.integers(0, 700, T)
    first, second = ({n: w[0] for n, w in p.items()} for p in params["layers"])
    embedded = params["embed"][ids] * 1.5
    # Both layers read what the first one compressed of its own input, before the norm.
    c = embedded @ first["compress"]
    x = embedded + gold(first, rms(embedded, first["attn_norm"]), c, embedded)
    x = x + gold(second, rms(x, second["attn_norm"]), c, embedded)
    want = rms(x, params["norm"]) @ params["unembed"]
    low = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
    close(np.asarray(forward(low, jnp.asarray(ids[None], jnp.int32), CONFIG)[0]), want)


@pytest.mark.rotating
def test_the_token_before_is_found_in_any_set_and_order(rng):
    place = rng.permutation(8)
    rows = rng.standard_normal((2, 8, 3)).astype(np.float32)
    sets, pos = [], np.full((2, 1, 11), -1, np.int32)
    for b, length in enumerate((8, 5)):
        for t in range(length):
            pos[b, 0, place[t] + (place[t] > 3) + 2 * (place[t] > 5)] = t
    stored = np.where(
        pos[..., None] >= 0, np.take_along_axis(rows[:, None], np.maximum(pos, 0)[..., None], 2), 7
    )
    for a, z in ((0, 4), (4, 5), (5, 11)):
        k = jnp.asarray(stored[:, :, a:z], jnp.float32)
        sets.append(Keys(k, k[..., :1], jnp.asarray(pos[:, :, a:z])))
    both = with_previous(sets)
    got = np.concatenate([np.asarray(s.k) for s in both], 2)
    for b, s in zip(*np.nonzero(pos[:, 0] >= 0), strict=True):
        t = pos[b, 0, s]
        before = rows[b, t - 1] if t else np.zeros(3)
        np.testing.assert_array_equal(got[b, 0, s], np.concatenate([rows[b, t], before]))
    assert [s.v.shape for s in both] == [(2, 1, 4, 2), (2, 1, 1, 2), (2, 1, 6, 2)]


@pytest.mark.rotating
@pytest.mark.parametrize("store", ["int8", "kivi"])
def test_codecs_leave_token_ids_alone(rng, store):
    model = Model(CONFIG, init(CONFIG, jax.random.key(0), groups=plan(CONFIG, stacked=False)), name="gold")
    ids = rng.integers(0, 700, (1, T))
    method = kvjax.method(store, **(dict(group=2, residual=4) if store == "kivi" else {}))
    _, cache = kvjax.prefill(model, ids, method=method, room=2)
    held = {}
    for part in cache.groups[0].parts:
        pos = np.asarray(part.pos).ravel()
        tokens = np.asarray(from_digits(part.v)).ravel()
        held |= {int(t): int(token) for t, token in zip(pos, tokens, strict=True) if t >= 0}
    assert isinstance(cache.groups[0].parts[0].k, Codes)
    assert [held[t] for t in range(T)] == ids[0].tolist()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("vocab", [1, 256, 257, 70_000])
@pytest.mark.rotating
def test_token_ids_are_exact_in_half_precision(vocab, dtype):
    ids = jnp.arange(vocab, dtype=jnp.int32)
    stored = to_digits(ids, vocab).astype(dtype)
    assert stored.shape[-1] == digits(vocab) == {1: 1, 256: 1, 257: 2, 70_000: 3}[vocab]
    np.testing.assert_array_equal(from_digits(stored), ids)


@pytest.mark.rotating
def test_a_layer_may_project_keys_from_its_own_input(rng):
    plain = dataclasses.replace(CONFIG, mixers=(Attention(), Attention()))
    named = dataclasses.replace(plain, mixers=(Attention(), Attention(kv_input=1)))
    params = init(plain, jax.random.key(0), groups=plan(plain, stacked=False))
    ids = jnp.asarray(rng.integers(0, 700, (1, T)), jnp.int32)
    np.testing.assert_array_equal(forward(params, ids, plain), forward(params, ids, named))
    with pytest.raises(
        ValueError, match="layer 0 projects from the input of layer 1, expected none above it"
    ):
        dataclasses.replace(plain, mixers=(Attention(kv_input=1), Attention()))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(mixers=(Gold(rank=3), READ)), "either stores the cache .* or reads it"),
        (dict(kv_heads=1), "expected kv_heads = heads and d_model = heads"),
        (dict(d_model=16), "expected kv_heads = heads and d_model = heads"),
        (dict(windows=(None, 4)), "layer 1 has a window"),
    ],
)
def test_what_gold_cannot_do_is_said(change, why):
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(CONFIG, **change)
