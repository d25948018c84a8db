"""Layers of single ops against their papers' equations in float64, as sums over tokens."""

import numpy as np
import pytest

from kvjax.models.mixers.features import Based, LinearAttention, Performer, _projection
from kvjax.models.mixers.gau import GatedUnit
from kvjax.models.mixers.hgrn import Hgrn
from kvjax.models.mixers.lattice import Lattice
from kvjax.models.mixers.mamba import Conba, Mamba
from kvjax.models.mixers.mcsd import SlopeDecay
from kvjax.models.mixers.mesa import Mesa
from kvjax.models.mixers.transformer_vq import VectorQuantised
from tests.models.single import D, T, close, drawn, run, sigmoid
from tests.models.test_recurrent_layers import convolved, rms, silu, softplus

H, K, V = 2, 4, 3


def heads(x, p, *names):
    """Projections [T, H, width] of every name."""
    return [(x @ p[n]).reshape(T, H, -1) for n in names]


def turned(x):
    """RoPE (arXiv:2104.09864) of [T, ..., K], halves apart, theta 10^4."""
    half = x.shape[-1] // 2
    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angle).reshape(T, *[1] * (x.ndim - 2), half) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def softmax(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def weighed(weights, v, epsilon=0.0):
    """Causal sums of values, divided by those of the weights [H, T, T]."""
    weights = np.tril(weights)
    total = weights.sum(-1).T[..., None] + epsilon
    return (np.einsum("hts,shv->thv", weights, v) / total).reshape(T, -1)


def by_features(phi, epsilon=0.0):
    def layer(mixer, p, x):
        q, k, v = heads(x, p, "q", "k", "v")
        return weighed(np.einsum("thf,shf->hts", phi(q), phi(k)), v, epsilon) @ p["o"]

    return layer


def taylor(mixer, p, x):
    q, k, v = heads(x, p, "q", "k", "v")
    s = np.einsum("thk,shk->hts", q, k) / np.sqrt(K)
    return weighed(1 + s + s**2 / 2, v, 1e-6) @ p["o"]


def positive(x):
    w, x = np.asarray(_projection(0, 5, K), np.float64), x / K**0.25
    return np.exp(x @ w.T - (x**2).sum(-1, keepdims=True) / 2)


def mesa(mixer, p, x):
    flat = silu(convolved(np.concatenate([x @ p["q"], x @ p["k"]], -1), p["conv"]))
    q, k = (unit(y.reshape(T, H, K)) for y in np.split(flat, 2, -1))
    (v,), keep, beta = heads(x, p, "v"), *(sigmoid(x @ p[n] + p[n + "_bias"]) for n in ("decay", "beta"))
    ridge = 0.25 + softplus(p["ridge"]).reshape(H, K)
    out = np.zeros((T, H, V))
    for h in range(H):
        kk, kv = np.zeros((K, K)), np.zeros((K, V))
        for t in range(T):
            kk = keep[t, h] * kk + beta[t, h] * np.outer(k[t, h], k[t, h])
            kv = keep[t, h] * kv + beta[t, h] * np.outer(k[t, h], v[t, h])
            out[t, h] = kv.T @ np.linalg.solve(kk + np.diag(ridge[h]), q[t, h])
    return rms(out, p["out_norm"]).reshape(T, -1) @ p["o"]


def lattice(mixer, p, x):
    q, k, v = heads(x, p, "q", "k", "v")
    q, k, size, slots = softmax(q), softmax(k), sigmoid(x @ p["beta"]), np.array(p["slots"])
    out = np.zeros((T, H, V))
    for t, h in np.ndindex(T, H):
        norm = np.linalg.norm(slots[h], axis=-1, keepdims=True)
        n = slots[h] / norm
        e = v[t, h] - k[t, h] @ n
        across = e[None] - n * (n @ e)[:, None]
        slots[h] += size[t, h] * k[t, h][:, None] * across / norm
        out[t, h] = q[t, h] @ (slots[h] / np.linalg.norm(slots[h], axis=-1, keepdims=True))
    return rms(out, p["out_norm"]).reshape(T, -1) @ p["o"]


def gau(mixer, p, x):
    u, v, z = (silu(x @ p[n]) for n in ("unit_gate", "unit_value", "unit_key"))
    shift = p["copy_shift"].reshape(4, -1)
    quad_q, quad_k, lin_q, lin_k = (turned(z * p["copy_scale"][i] + shift[i]) for i in range(4))
    c, block = mixer.chunk, np.arange(T) // mixer.chunk
    inside = np.maximum(quad_q @ quad_k.T / c, 0) ** 2 * (block[:, None] == block)
    across = lin_q @ lin_k.T / c * (block[:, None] > block)
    return (u * (np.tril(inside + across) @ v)) @ p["unit_out"]


def vector_quantised(mixer, p, x):
    q, k, v = heads(x, p, "q", "k", "v")
    q, k, book = (np.sqrt(K) * unit(y) for y in (q, k, np.swapaxes(p["codebook"], 1, 2)))
    apart = ((k[:, :, None] - book[None]) ** 2).sum(-1)
    k = np.stack([book[h][apart[:, h].argmin(-1)] for h in range(H)], 1)
    s = np.einsum("thk,shk->hts", q, k) / np.sqrt(K)
    return (weighed(np.exp(s), v) * silu(x @ p["out_gate"])) @ p["o"]


def gated_sum(mixer, p, x):
    a = mixer.lower_bound + (1 - mixer.lower_bound) * sigmoid(x @ p["keep"])
    new, h, out = (1 - a) * silu(x @ p["candidate"]), np.zeros(mixer.width), []
    for t in range(T):
        h = a[t] * h + new[t]
        out.append(rms(h, p["out_norm"]))
    return (np.stack(out) * silu(x @ p["out_gate"])) @ p["out"]


def mamba(mixer, p, x):
    y = silu(convolved(x @ p["inner"], p["conv"], p["conv_bias"]))
    rank, n = p["dt_up"].shape[0], mixer.states
    dt, b, c = np.split(y @ p["selection"], [rank, rank + n], -1)
    if mixer.normed:
        dt, b, c = (rms(z, p[f"{name}_norm"]) for z, name in ((dt, "dt"), (b, "b"), (c, "c")))
    dt, a = softplus(dt @ p["dt_up"] + p["dt_bias"]), -np.exp(p["a_log"]).T
    h, out = np.zeros((mixer.width, n)), []
    for t in range(T):
        h = np.exp(dt[t][:, None] * a) * h + (dt[t] * y[t])[:, None] * b[t]
        out.append(h @ c[t] + p["skip"] * y[t])
    return (np.stack(out) * silu(x @ p["inner_gate"])) @ p["out"]


def conba(mixer, p, x):
    y = mamba(mixer, p, x)
    y = y * (y @ p["state_scale"] + p["state_scale_bias"])
    y = y + y @ p["delay"] + p["delay_bias"]
    return y - y @ p["control"]


def slope_decay(mixer, p, x):
    y, width, out = x @ p["history"], mixer.width, np.zeros((T, 2 * mixer.width))
    for t in range(T):
        apart = t - np.arange(t + 1)
        for c in range(width):
            w = np.exp(-apart * 2.0 ** (-8 * (c + 1) / width))
            out[t, c] = w @ y[: t + 1, c] / w.sum()
            out[t, width + c] = (1 - 2.0 ** (-5 - 7 * c / width)) ** apart @ y[: t + 1, width + c]
    return (out * (x @ p["token"])) @ p["out"]


CASES = {
    "linear transformer": (
        LinearAttention(H, K, V),
        by_features(lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), 1e-6),
    ),
    "based": (Based(H, K, V), taylor),
    "performer": (Performer(H, K, V, features=5), by_features(positive)),
    "mesa": (Mesa(H, K, V), mesa),
    "mesa by conjugate gradients": (Mesa(H, K, V, iterations=2 * K), mesa),
    "lattice": (Lattice(H, K, V), lattice),
    "gau": (GatedUnit(6, key_dim=K, chunk=4), gau),
    "transformer-vq": (VectorQuantised(H, K, V, codes=5, block=2), vector_quantised),
    "hgrn": (Hgrn(6), gated_sum),
    "hgrn with a lower bound": (Hgrn(6, lower_bound=0.3), gated_sum),
    "mamba": (Mamba(6, states=3), mamba),
    "conba": (Conba(6, states=3), conba),
    "mcsd": (SlopeDecay(5), slope_decay),
}
ALWAYS = ("mamba", "lattice")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else [pytest.mark.rotating]) for n in CASES]
)
def test_a_layer_is_its_equation_token_by_token(name, rng):
    mixer, equation = CASES[name]
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    close(run(mixer, p, x), equation(mixer, p, x))
