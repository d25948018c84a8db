"""Tokens of a prompt in two ranks of their heads' weights, in float64."""

import copy

import numpy as np

from tests.float64.reference import best


def stored(count, share, score, recent=0.5):
    """Prompt -> the prompt as its cache holds it: tokens of low scores in `share` of the weights' directions.

    Keys and values are x W, and W V_r V_r' of the right singular vectors V of W is nearest to W in rank r.
    """

    def of(prompt):
        held = copy.copy(prompt)
        held.raw_k, held.v = list(prompt.raw_k), list(prompt.v)
        for number, layer in enumerate(prompt.decoder.layers):
            n = count(prompt.length)
            found = score(prompt, number).copy()
            found[:, prompt.length - int(n * recent) :] = np.inf
            stays = best(found, n)
            for name, rows in (("k", held.raw_k), ("v", held.v)):
                new = rows[number].copy()
                for head, w in enumerate(np.split(layer[name], len(new), 1)):
                    v = np.linalg.svd(w, full_matrices=False)[2]
                    v = v[: max(1, round(share * len(v)))]
                    new[head] = np.where(stays[head][:, None], new[head], new[head] @ v.T @ v)
                rows[number] = new
        return held

    return of
