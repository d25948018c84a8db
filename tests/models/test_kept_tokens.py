"""Layers whose state grows with the tokens: their equations in float64, and how the cache gives them room."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.deltaformer import DeltaFormer
from kvjax.models.mixers.dmc import DynamicMerging
from kvjax.models.mixers.forgetting import Forgetting, Path
from kvjax.models.mixers.local_linear import LocalLinear
from kvjax.models.mixers.native_sparse import NativeSparse
from kvjax.models.mixers.proximal import SharedKeys
from tests.models.architectures import with_layers
from tests.models.conversation import TEXTS, model, whole
from tests.models.conversation import close as near
from tests.models.single import CONFIG, D, T, close, drawn, run, sigmoid
from tests.models.test_layers_of_ops import H, K, V, convolved, silu, softmax, turned

N = 4  # query heads, two of each key head


def heads(x, p, name):
    return (x @ p[name]).reshape(T, -1, V if name == "v" else K)


def logits(q, k):
    """[N, T, T], -inf behind the diagonal; every key head serves as many query heads."""
    s = np.einsum("tnk,snk->nts", q, np.repeat(k, q.shape[1] // k.shape[1], 1)) / np.sqrt(K)
    return np.where(np.tril(np.ones((T, T), bool)), s, -np.inf)


def mixed(p, weights, v):
    v = np.repeat(v, len(weights) // v.shape[1], 1)
    return np.einsum("nts,snv->tnv", weights, v).reshape(T, -1) @ p["o"]


def forgetting(mixer, p, x):
    q, k, v = (heads(x, p, n) for n in "qkv")
    total = np.cumsum(np.log(sigmoid(x @ p["forget_gate"] + p["forget_gate_bias"])), 0).T
    return mixed(p, softmax(logits(q, k) + total[:, :, None] - total[:, None]), v)


def path(mixer, p, x):
    q, k, v = (heads(x, p, n) for n in "qkv")
    w = silu(convolved(x @ p["w_down"] @ p["w_up"], p["conv"])).reshape(T, H, K)
    w = w / np.sqrt((w**2).sum(-1, keepdims=True) + 1e-6)
    beta = 2 * sigmoid(x @ p["beta"] + p["beta_bias"])
    g = np.log(sigmoid(x @ p["forget_gate"] + p["forget_gate_bias"]))
    s = np.full((H, T, T), -np.inf)
    for h, i in np.ndindex(H, T):
        for t in range(i, T):
            key = k[i, h]
            for at in range(i + 1, t + 1):
                key = key - beta[at, h] * w[at, h] * (w[at, h] @ key)
            s[h, t, i] = (q[t, h] @ key + g[i + 1 : t + 1, h].sum()) / np.sqrt(K)
    return mixed(p, softmax(s), v)


def delta(mixer, p, x):
    q, k, v = (heads(x, p, n) for n in "qkv")
    q, k, beta, u = turned(q), turned(k), x @ p["beta"] + p["beta_bias"], np.array(v)
    s = logits(k, k)
    for t, h in np.ndindex(T, H):
        if t:
            u[t, h] -= beta[t, h] * softmax(s[h, t, :t]) @ u[:t, h]
    return mixed(p, softmax(logits(q, k)), u)


def merging(mixer, p, x):
    q, k, v = (heads(x, p, n) for n in "qkv")
    merge, weight = k[..., 0] > mixer.offset, sigmoid(q[:, ::2, 0])
    q[..., 0] = k[..., 0] = 0
    q, k, out = turned(q), turned(k), np.zeros((T, N, V))
    for h in range(H):
        slots = []
        for t in range(T):
            new = weight[t, h], weight[t, h] * k[t, h], weight[t, h] * v[t, h]
            if slots and merge[t, h]:
                slots[-1] = tuple(a + b for a, b in zip(slots[-1], new, strict=True))
            else:
                slots.append(new)
            keys, values = (np.stack([s[i] / s[0] for s in slots]) for i in (1, 2))
            for n in (2 * h, 2 * h + 1):
                out[t, n] = softmax(keys @ q[t, n] / np.sqrt(K)) @ values
    return out.reshape(T, -1) @ p["o"]


def regression(mixer, p, x):
    """Weighted least squares of the values on the keys, with an intercept that no ridge shrinks, at q."""
    q, k, v = (heads(x, p, n) for n in "qkv")
    q, k = turned(q), turned(k)
    weights, out = softmax(logits(q, k)), np.zeros((T, N, V))
    ridge = mixer.ridge * np.diag([0.0] + [1.0] * K)
    for t, n in np.ndindex(T, N):
        z = np.concatenate([np.ones((T, 1)), k[:, n // 2] - q[t, n]], 1)
        z, w = z[: t + 1], weights[n, t, : t + 1, None]
        out[t, n] = np.linalg.solve(z.T @ (w * z) + ridge, z.T @ (w * v[: t + 1, n // 2]))[0]
    return out.reshape(T, -1) @ p["o"]


def probed(mixer, p, x):
    q, k, v = (heads(x, p, n) for n in "qkv")
    r = turned((x @ p["probe"]).reshape(T, -1, K))
    q, k = turned(q), turned(k)
    weights = softmax(logits(q, k))
    c = np.einsum("tnk,snk->nts", r, k)
    return mixed(p, weights * (1 - c + (weights * c).sum(-1, keepdims=True)), v)


def sparse(mixer, p, x):
    """Equations 5 to 12, token by token and block by block; eq. 9 as the strides that two blocks share."""
    q, k, v = (heads(x, p, n) for n in "qkv")
    q, k, out = turned(q), turned(k), np.zeros((T, N, V))
    gate = sigmoid(x @ p["branch_gate"] + p["branch_gate_bias"]).reshape(T, N, 3)
    size, step, wide = mixer.compress, mixer.stride, mixer.block

    def phi(of, tokens):
        joined = np.concatenate(list(tokens + p[f"phi_{of}_place"]))
        return tokens.mean(0) + silu(joined @ p[f"phi_{of}_in"]) @ p[f"phi_{of}_out"]

    def attend(query, keys, values):
        return softmax(keys @ query / np.sqrt(K)) @ values

    for t, h in np.ndindex(T, H):
        starts = [s for s in range(0, T, step) if s + size - 1 <= t]
        ck, cv = (np.array([phi(n, y[s : s + size, h]) for s in starts]) for n, y in (("k", k), ("v", v)))
        mine, score = range(N // H * h, N // H * (h + 1)), np.zeros(t // wide + 1)
        for n in mine if starts else ():
            weights = softmax(ck @ q[t, n] / np.sqrt(K))
            out[t, n] += gate[t, n, 0] * weights @ cv
            for s, weight in zip(starts, weights, strict=True):
                for unit in range(s, s + size, step):
                    if unit // wide < len(score):
                        score[unit // wide] += weight
        fixed = {j for j in range(len(score)) if j < mixer.initial or j > t // wide - mixer.local}
        rest = [j for j in np.argsort(-score, kind="stable") if j not in fixed]
        blocks = fixed | {*rest[: mixer.top - len(fixed)]}
        at = [j for j in range(t + 1) if j // wide in blocks]
        near = range(max(0, t + 1 - mixer.window), t + 1)
        for n in mine:
            out[t, n] += gate[t, n, 1] * attend(q[t, n], k[at, h], v[at, h])
            out[t, n] += gate[t, n, 2] * attend(q[t, n], k[near, h], v[near, h])
    return out.reshape(T, -1) @ p["o"]


def softmax_layer(mixer, p, x):
    q, k, v = (heads(x, p, n) for n in "qkv")
    return mixed(p, softmax(logits(turned(q), turned(k))), v)


CASES = {
    "forgetting": (Forgetting(N, K, V, groups=H), forgetting),
    "path": (Path(H, K, V, rank=3, forgets=True), path),
    "deltaformer": (DeltaFormer(H, K, V), delta),
    "dmc": (DynamicMerging(N, K, V, groups=H, offset=0.0), merging),
    "nsa": (
        NativeSparse(N, K, V, groups=H, compress=2, stride=1, block=2, top=3, initial=1, local=1, window=2),
        sparse,
    ),
    "lla": (LocalLinear(N, K, V, groups=H), regression),
    "parallax": (LocalLinear(H, K, V, learned=True), probed),
    "the lowest layer of a block": (SharedKeys(N, K, V, groups=H), softmax_layer),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("path", "nsa") else [pytest.mark.rotating]) for n in CASES]
)
def test_a_layer_is_its_equation_token_by_token(name, rng):
    mixer, equation = CASES[name]
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    close(run(mixer, p, x), equation(mixer, p, x))


def test_distant_tokens_are_met_with_the_keys_of_the_lowest_layer(rng):
    mixer = SharedKeys(N, K, V, groups=H, sinks=1, recent=3, source=0)
    p, x, shared = drawn(mixer, rng), rng.standard_normal((T, D)), rng.standard_normal((1, T, H, K))
    q, k, v = (heads(x, p, n) for n in "qkv")
    apart = np.arange(T)[:, None] - np.arange(T)
    own = (apart < 3) | (np.arange(T) < 1)
    s = np.where(own, logits(turned(q), turned(k)), logits(turned(q), shared[0]))
    close(run(mixer, p, x, keys=shared), mixed(p, softmax(s), v))


@pytest.mark.rotating
@pytest.mark.parametrize("name", [pytest.param("pod", marks=pytest.mark.xdist_group("pod"))])
def test_a_long_prompt_in_pieces_and_a_step_beyond_the_room(name):
    m, want = model(name), whole(name).logits
    logits, cache = kvjax.prefill(m, TEXTS[:2, :9], chunk=4, room=1)
    near(logits, want[:2, 8])
    logits, cache = kvjax.prefill(m, TEXTS[:2, 9:21], cache=cache, chunk=4, room=4)
    near(logits, want[:2, 20])
    for t in range(21, 24):
        logits, cache = kvjax.step(m, cache, TEXTS[:2, t])
        near(logits, want[:2, t])
    with pytest.raises(InputError, match="room"):
        for _ in range(64):
            logits, cache = kvjax.step(m, cache, TEXTS[:2, 24])


def test_a_block_needs_a_lowest_layer_below_with_the_same_keys():
    upper = SharedKeys(N, K, V, source=0)
    for lowest in (Attention(), SharedKeys(N, K, V, groups=H), SharedKeys(N, 2 * K, V)):
        with pytest.raises(ValueError, match="layer 1 takes the keys of layer 0"):
            with_layers(lowest, upper)
    assert jax.tree.leaves(with_layers(SharedKeys(N, K, V), upper).mixers[1].takes["keys"]) == ["keys", 0]
    assert CONFIG.rope.theta == 10000.0  # what `turned` has
