"""Slots in codes, in float64 numpy: what comes back of them, as `tests.float64.reference.Row` takes it."""

import copy

import numpy as np

from kvjax.store.gaussian_vectors import gaussian_codebook
from kvjax.store.rotate import hadamard
from kvjax.store.sphere import gaussian
from tests.float64.reference import best, rope, softmax, window_score


def float16(x):
    return x.astype(np.float16).astype(float)


def affine(bits, group, channel=False):
    """Codes of rows [g, H] between the ends of `group` channels of a token, or of a channel's g tokens."""

    def code(x):
        rows = x if channel else x.reshape(*x.shape[:-1], -1, group)
        axis = -2 if channel else -1
        low, high = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
        zero, step = float16(low), float16((high - low) / (2**bits - 1))
        return (np.clip(np.rint((rows - zero) / step), 0, 2**bits - 1) * step + zero).reshape(x.shape)

    return code


def sketch(signs, seed=0):
    """QJL (arXiv:2406.03482): sqrt(pi / 2) / m ||k|| S' sign(S k)."""

    def code(x):
        s = gaussian(x.shape[-1], seed, signs).astype(float)
        length = float16(np.linalg.norm(x, axis=-1, keepdims=True))
        return np.sqrt(np.pi / 2) / len(s) * length * np.where(x @ s.T >= 0, 1.0, -1.0) @ s

    return code


def coded(keys, values, *, granule=1, residual=0, sinks=0):
    """Attention over slots of which the oldest whole granules, behind `sinks` tokens, come back of codes."""

    def attends(q, k, v, pos, at):
        order = np.argsort(pos)
        able = order[(pos[order] >= sinks) & ((pos[order] < at.stored) | (granule == 1 and not residual))]
        k, v = k.copy(), v.copy()
        for start in range(0, max(len(able) - residual, 0) // granule * granule, granule):
            block = able[start : start + granule]
            k[block], v[block] = keys(k[block]), values(v[block])
        return softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v

    return attends


def zipcache(count, theta, *, window, high, low, group):
    """What a prompt's slots hold: salient ones many bits, the others few; and what steps add, many."""

    def stored(prompt):
        out, at = copy.copy(prompt), np.arange(prompt.length)
        out.k, out.raw_k, out.v = [], [], []
        for i in range(len(prompt.p)):
            score = window_score(prompt, i, window, 1, reduce="mean")
            salient = best(score, [count(prompt.length)] * len(score))[..., None]
            each = [
                np.where(salient, affine(high, group)(x), affine(low, group)(x))
                for x in (prompt.k[i], prompt.v[i])
            ]
            out.k, out.v = [*out.k, each[0]], [*out.v, each[1]]
            out.raw_k.append(rope(each[0], -at, theta))
        return out

    def attends(q, k, v, pos, at):
        new = pos >= at.prompt
        k, v = (np.where(new[:, None], affine(high, group)(x), x) for x in (k, v))
        return softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v

    return dict(stored=stored, attends=attends)


def think(norms, share, granule, residual):
    """ThinK (arXiv:2407.21018): of keys the channels of the largest |q_c| |k_c|, granule by granule.

    norms: |q_c| [L, K, H].
    """

    def attends(q, k, v, pos, at):
        asked = norms[at.layer][at.number].astype(float)

        def keys(x):
            c = np.argsort(-asked * np.linalg.norm(x, axis=0), kind="stable")[: int(share * x.shape[-1])]
            return np.where(np.isin(np.arange(x.shape[-1]), c), x, 0)

        whole = lambda x: x  # noqa: E731
        return coded(keys, whole, granule=granule, residual=residual)(q, k, v, pos, at)

    return attends


def behind(matrix, code):
    """Codes of rows in another basis."""
    return lambda x: code(x @ matrix.T) @ matrix


def balanced(of, turns, code):
    """KVarN (arXiv:2606.03458): x / (a b), a of tokens and b of channels; only one of them is taken off.

    The other one is no part of it: it would be multiplied by a code's scales and divided out again.
    """

    def coded(x):
        def apart(y):
            return sum(s.max() / max(s.min(), 1e-8) for s in (y.std(1, ddof=1), y.std(0, ddof=1)))

        log_a, log_b = np.zeros(len(x)), np.zeros(x.shape[1])
        best = (apart(x), log_a, log_b)
        over = lambda: x / np.exp(log_a)[:, None] / np.exp(log_b)[None]  # noqa: E731
        for _ in range(turns):
            log_a = np.clip(log_a + np.log(np.clip(over().std(1, ddof=1), 1e-3, 1e3)), -0.3, 10)
            log_b = np.clip(log_b + np.log(np.clip(over().std(0, ddof=1), 1e-3, 1e3)), -0.3, 10)
            best = (found, log_a, log_b) if (found := apart(over())) <= best[0] else best
        scale = float16(np.exp(best[1]))[:, None] if of == "token" else float16(np.exp(best[2]))[None]
        return code(x / scale) * scale

    return coded


def razor(bits, base, group):
    """QRazor (arXiv:2501.13331), number by number in whole numbers."""

    def code(x):
        most, top, out = 2 ** (base - 1) - 1, 2 ** (bits - 1) - 1, np.zeros(x.shape)
        for at in np.ndindex(x.shape[:-1]):
            scale = np.abs(x[at]).max() / most or 1.0
            whole = [int(n) for n in np.rint(x[at] / scale)]
            for start in range(0, len(whole), group):
                some = whole[start : start + group]
                cut = max(max(abs(n) for n in some).bit_length() - (bits - 1), 0)
                half = 1 << cut >> 1
                m = [min((abs(n) + half) >> cut, top) << cut for n in some]
                out[at][start : start + group] = scale * np.copysign(m, some)
        return out

    return code


def normal_vectors(bits, seed=0):
    """NSNQuant (arXiv:2505.18231): normalise, shift, normalise, rotate, the nearest of given vectors."""

    def code(x):
        width = x.shape[-1]
        turn, book = hadamard(width, seed), gaussian_codebook(8 // bits, seed)
        a = np.sqrt((x**2).mean(-1, keepdims=True))
        mean = float16((x / a).mean(0))
        y = x / a - mean
        b = np.sqrt((y**2).mean(-1, keepdims=True))
        vectors = (y / b @ turn.T).reshape(len(x), -1, 8 // bits)
        near = ((vectors[..., None, :] - book) ** 2).sum(-1).argmin(-1)
        return float16(a * b) * (book[near].reshape(x.shape) @ turn) + float16(a) * mean

    return code


def outliers(count, code):
    """The `count` largest numbers of each row as they are."""

    def coded(x):
        at = np.argsort(-np.abs(x), axis=-1, kind="stable")[..., :count]
        out = x.copy()
        np.put_along_axis(out, at, 0.0, -1)
        out = code(out)
        np.put_along_axis(out, at, np.take_along_axis(x, at, -1), -1)
        return out

    return coded
