"""Steps that do not attend to every slot, in float64 numpy, as `tests.reference.Row` takes them."""

import numpy as np

from tests.reference import best, softmax


def sparq_guesses(q, k, channels):
    """Logits [G, S] by the largest channels of a group's queries q [G, H], and which channels these are."""
    c = np.argsort(-np.abs(q).sum(0), kind="stable")[:channels]
    found = []
    for one in q:
        heat = np.sqrt(len(one) * np.abs(one[c]).sum() / np.abs(one).sum())
        found.append(k[:, c] @ one[c] / heat)
    return np.stack(found), c


def sparq_chosen(guesses, pos, stored, *, count, newest):
    """Boolean [S]: the newest tokens, and of the others the `count` largest sums over the group."""
    old = pos < stored - newest
    if not old.any():
        return ~old
    return ~old | best(np.where(old, guesses.sum(0), -np.inf), count(old.sum()))


def sparq(count, *, channels, newest):
    """SparQ (arXiv:2312.04985): alpha * attention over the chosen slots + (1 - alpha) * mean value."""

    def attends(q, k, v, pos, stored):
        guesses, _ = sparq_guesses(q, k, channels)
        chosen, outs = sparq_chosen(guesses, pos, stored, count=count, newest=newest), []
        for one, guess in zip(q, guesses, strict=True):
            alpha = softmax(guess)[chosen].sum()
            p = softmax(k[chosen] @ one / np.sqrt(len(one)))
            outs.append(alpha * (p @ v[chosen]) + (1 - alpha) * v.mean(0))
        return np.stack(outs)

    return attends
