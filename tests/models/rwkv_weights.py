"""A tiny RWKV-7 under its authors' names, and its logits by the paper's equations in float64."""

import ml_dtypes
import numpy as np

VOCAB, D, N, F, LAYERS = 24, 16, 8, 20, 3
RANKS = {"w": 3, "a": 4, "g": 5, "v": 2}


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as the authors save them; layer 0 has the unused v0 to v2 too."""
    out = {"emb.weight": (VOCAB, D), "head.weight": (VOCAB, D), "ln_out.weight": (D,), "ln_out.bias": (D,)}
    for i in range(LAYERS):
        block = f"blocks.{i}."
        for norm in ("ln0", "ln1", "ln2") if i == 0 else ("ln1", "ln2"):
            out |= {f"{block}{norm}.{end}": (D,) for end in ("weight", "bias")}
        out |= {f"{block}att.x_{n}": (1, 1, D) for n in "rwkvag"}
        for n, rank in RANKS.items():
            out |= {f"{block}att.{n}1": (D, rank), f"{block}att.{n}2": (rank, D)}
            out |= {} if n == "g" else {f"{block}att.{n}0": (1, 1, D)}
        out |= {f"{block}att.{n}": (1, 1, D) for n in ("k_k", "k_a")} | {f"{block}att.r_k": (D // N, N)}
        out |= {f"{block}att.{n}.weight": (D, D) for n in ("receptance", "key", "value", "output")}
        out |= {f"{block}att.ln_x.{end}": (D,) for end in ("weight", "bias")}
        out |= {
            f"{block}ffn.x_k": (1, 1, D),
            f"{block}ffn.key.weight": (F, D),
            f"{block}ffn.value.weight": (D, F),
        }
    return out


def weights() -> dict[str, np.ndarray]:
    """Random numbers that bfloat16 holds."""
    rng, out = np.random.default_rng(7), {}
    for name, shape in shapes().items():
        matrix = len(shape) == 2 and "r_k" not in name
        x = rng.normal(size=shape) * (1.2 * shape[-1] ** -0.5 if matrix and "emb" not in name else 0.6)
        x = x + (1.0 if "ln" in name and name.endswith("weight") else 0.0)
        out[name] = x.astype(ml_dtypes.bfloat16)
    return out


def layer_norm(x, p, name, eps=1e-5):
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return y * p[f"{name}.weight"] + p[f"{name}.bias"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def time_mix(x, p, first):
    """One text [T, D] through a time mix (arXiv:2503.14456, section 4): (output, values of the layer)."""
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    r, w, k, v, a, g = (x + (before - x) * p[f"x_{n}"].reshape(-1) for n in "rwkvag")
    bias = {n: p[f"{n}0"].reshape(-1) for n in "wav"}
    decay = np.exp(-np.exp(-0.5) * sigmoid(bias["w"] + np.tanh(w @ p["w1"]) @ p["w2"]))
    share = sigmoid(bias["v"] + v @ p["v1"] @ p["v2"])
    r, k, v = r @ p["receptance.weight"].T, k @ p["key.weight"].T, v @ p["value.weight"].T
    own, v = v, v if first is None else v + (first - v) * share
    a, g = sigmoid(bias["a"] + a @ p["a1"] @ p["a2"]), sigmoid(g @ p["g1"]) @ p["g2"]
    erased = (k * p["k_k"].reshape(-1)).reshape(-1, D // N, N)
    erased = erased / np.linalg.norm(erased, axis=-1, keepdims=True)
    k = k * (1 + (a - 1) * p["k_a"].reshape(-1))
    r, k, v, a, decay = (y.reshape(-1, D // N, N) for y in (r, k, v, a, decay))
    state, out = np.zeros((D // N, N, N)), []
    for t in range(len(x)):
        # Rows are values, columns keys: S = S (diag(w) - kk (a * kk)') + v k'.
        gone = np.einsum("hvk,hk->hv", state, erased[t])[:, :, None] * (a[t] * erased[t])[:, None]
        state = state * decay[t][:, None] - gone + v[t][:, :, None] * k[t][:, None]
        out.append(np.einsum("hvk,hk->hv", state, r[t]))
    out = np.stack(out)
    y = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 64e-5)
    y = y.reshape(-1, D) * p["ln_x.weight"] + p["ln_x.bias"]
    y = y + ((r * k * p["r_k"]).sum(-1, keepdims=True) * v).reshape(-1, D)
    return (y * g) @ p["output.weight"].T, own


def logits(p, tokens):
    """Logits [T, V] of one text, in float64."""
    p = {name: np.asarray(x, np.float64) for name, x in p.items()}
    x, first = layer_norm(p["emb.weight"][tokens], p, "blocks.0.ln0"), None
    for i in range(LAYERS):
        block = f"blocks.{i}."
        att = {n.removeprefix(block + "att."): y for n, y in p.items() if n.startswith(block + "att.")}
        out, own = time_mix(layer_norm(x, p, block + "ln1"), att, first)
        first, x = own if i == 0 else first, x + out
        y = layer_norm(x, p, block + "ln2")
        y = y + (np.concatenate([np.zeros_like(y[:1]), y[:-1]]) - y) * p[block + "ffn.x_k"].reshape(-1)
        x = x + np.maximum(y @ p[block + "ffn.key.weight"].T, 0) ** 2 @ p[block + "ffn.value.weight"].T
    return layer_norm(x, p, "ln_out") @ p["head.weight"].T
