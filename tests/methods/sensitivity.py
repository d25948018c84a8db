"""KVgrad in float64: gradients by central differences of a decoder that reads its prompt once more."""

import numpy as np

from tests.float64.reference import Prompt, rms_norm, rope, softmax
from tests.methods.expected import PREFIX, best, sinks
from tests.methods.rows import count

STEP = 1e-4


def attended(prompt, layer, x, new):
    """Compute what attention writes for the last `new` tokens, x [E, new, D] there, the others unchanged."""
    d, c, group = prompt.decoder, prompt.decoder.config, prompt.group
    w, old, pos = d.layers[layer], prompt.length - new, np.arange(prompt.length)
    h = rms_norm(x, w["attn_norm"], c.norm_eps)
    split = lambda y, n: y.reshape(len(x), new, n, c.head_dim).swapaxes(1, 2)  # noqa: E731
    q = rope(split(h @ w["q"], c.heads), pos[old:], c.rope.theta)
    k, v = rope(split(h @ w["k"], c.kv_heads), pos[old:], c.rope.theta), split(h @ w["v"], c.kv_heads)
    before = lambda y: np.broadcast_to(y[None, :, :old], (len(x), len(y), old, c.head_dim))  # noqa: E731
    k, v = (
        np.repeat(np.concatenate([before(was), y], 2), group, 1)
        for was, y in ((prompt.k[layer], k), (prompt.v[layer], v))
    )
    s = q @ k.swapaxes(2, 3) / np.sqrt(c.head_dim)
    p = softmax(np.where(pos[None] > pos[old:, None], -np.inf, s))
    return (p @ v).swapaxes(1, 2).reshape(len(x), new, -1) @ w["o"]


def fed(decoder, layer, x):
    """Compute the hidden states behind a layer's MLP."""
    w = decoder.layers[layer]
    h = rms_norm(x, w["mlp_norm"], decoder.config.norm_eps)
    gate = h @ w["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]


def sensitivities(prompt, new):
    """|d phi / d a_i| [L, new] of the last tokens: phi is the square of their last hidden states."""
    d = prompt.decoder
    behind, x = [], d.rest["embed"][np.asarray(prompt.tokens)][None, prompt.length - new :]
    for i in range(len(d.layers)):
        behind.append(x + attended(prompt, i, x, new))
        x = fed(d, i, behind[-1])

    def phi(layer, a):
        a = fed(d, layer, a)
        for i in range(layer + 1, len(d.layers)):
            a = fed(d, i, a + attended(prompt, i, a, new))
        return np.square(a).sum((1, 2))

    found = []
    for i, a in enumerate(behind):
        nudge = STEP * np.eye(a[0].size).reshape(-1, *a[0].shape)
        slope = (phi(i, a + nudge) - phi(i, a - nudge)) / (2 * STEP)
        found.append(np.linalg.norm(slope.reshape(a[0].shape), axis=-1))
    return np.stack(found)


def kvgrad_kept(prompt):
    """Attention of the repeated prompt, by what a value writes and what the last hidden states owe to it."""
    d, t = prompt.decoder, prompt.length
    again = Prompt(d, [*prompt.tokens, *PREFIX, *prompt.tokens])
    weight, scores = sensitivities(again, t + len(PREFIX)), []
    for i, p in enumerate(again.p):
        out = d.layers[i]["o"].reshape(d.config.heads, d.config.head_dim, -1)
        writes = np.linalg.norm(np.repeat(again.v[i][:, :t], prompt.group, 0) @ out, axis=-1)
        taken = (p[:, t:, :t] * weight[i][:, None]).max(1) * writes
        scores.append(np.where(sinks(prompt), np.inf, taken.reshape(-1, prompt.group, t).max(1)))
    flat = np.stack(scores).reshape(1, -1)
    return list(best(flat, [len(scores) * len(scores[0]) * count(t)]).reshape(len(scores), -1, t))
