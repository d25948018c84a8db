"""DefensiveKV (arXiv:2510.13334) in float64, head by head, as the authors' code does it."""

import numpy as np

from tests.float64.reference import best, pool


def defensive_kept(prompt, count, *, window, kernel, mass=0.9):
    """Per layer, which tokens of each KV head stay."""
    found = []
    for i, every in enumerate(prompt.p):
        c, length = prompt.decoder.config, prompt.length
        n, older = count(length), length - window
        p = every[:, -window:, :older].reshape(c.kv_heads, prompt.group, window, older)
        smooth = pool(p.reshape(-1, older), kernel, "mean").reshape(p.shape)
        smooth = smooth / smooth.sum(-1, keepdims=True) * p.sum(-1, keepdims=True)
        worst = smooth.max((1, 2))
        out = prompt.decoder.layers[i]["o"].reshape(c.kv_heads, prompt.group, c.head_dim, -1)
        norm = np.abs(np.einsum("ksv,kgvd->kgsd", prompt.v[i][:, :older], out)).sum(-1).mean(1)
        score = np.maximum(worst, worst.mean(-1, keepdims=True)) * norm / norm.sum(0)
        mean = p.mean((1, 2))
        share = mass - p[..., max(older - window, 0) :].sum(-1).mean()
        for head in range(c.kv_heads):
            order = np.argsort(-mean[head], kind="stable")
            reached = np.cumsum(mean[head][order] / mean[head].sum()) >= share
            score[head, order[: min(int(reached.argmax()), n - window)]] = np.inf
        whole = np.concatenate([score, np.full((c.kv_heads, window), np.inf)], -1)
        found.append(best(whole.reshape(-1), c.kv_heads * n).reshape(whole.shape))
    return found
