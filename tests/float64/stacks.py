"""MiniCache by its equations, in float64 numpy: which tokens two layers merge, and the resulting slots."""

import copy

import numpy as np


def slerp(x1, x2, t):
    """(e, |x1|, |x2|) of rows [.., H]: the direction on the arc between x1 and x2, and their lengths."""
    n1, n2 = np.linalg.norm(x1, axis=-1), np.linalg.norm(x2, axis=-1)
    w = angle(x1, x2)
    u1, u2 = x1 / n1[..., None], x2 / n2[..., None]
    e = (np.sin((1 - t) * w) / np.sin(w))[..., None] * u1 + (np.sin(t * w) / np.sin(w))[..., None] * u2
    return e, n1, n2


def angle(x1, x2):
    dot = (x1 * x2).sum(-1) / np.linalg.norm(x1, axis=-1) / np.linalg.norm(x2, axis=-1)
    return np.arccos(np.clip(dot, -1, 1))


def apart(k, v, gamma, most):
    """Which tokens [K, T] stay as computed, of the keys and values ([K, T, H] of two layers each).

    Those with an angle in the highest part gamma of its range, at most `most` of a head's, the largest first.
    """
    found = np.zeros(k[0].shape[:2], bool)
    for head in range(len(found)):
        scores = []
        for low, high in (k, v):
            d = angle(low[head], high[head])
            scores.append((d - d.min()) / (d.max() - d.min()))
        score = np.maximum(*scores)
        best = np.argsort(-score, kind="stable")[:most]
        found[head, best] = score[best] > 1 - gamma
    return found


def merged(low, high, t, stay):
    """Rows of two layers after merging and restoring; the rows `stay` are unchanged."""
    e, n1, n2 = slerp(low, high, t)
    return [np.where(stay[..., None], x, e * n[..., None]) for x, n in ((low, n1), (high, n2))]


def minicache(*pairs, t, gamma, most):
    """Prompt -> the prompt as its cache holds it, where these layers are merged with those above them.

    most: how many tokens of a head at most stay as computed, of so many.
    """

    def stored(prompt):
        held = copy.copy(prompt)
        held.raw_k, held.k, held.v = list(prompt.raw_k), list(prompt.k), list(prompt.v)
        for low in pairs:
            both = slice(low, low + 2)
            stay = apart(prompt.k[both], prompt.v[both], gamma, most(prompt.length))
            for rows in (held.raw_k, held.k, held.v):
                # Both layers are rotated equally, so rotating before or after merging gives the same.
                rows[both] = merged(*rows[both], t, stay)
        return held

    return stored
