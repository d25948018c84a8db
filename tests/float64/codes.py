"""Encoded slots in float64 numpy: their decoded values, as `tests.float64.reference.Row` takes them."""

import copy

import ml_dtypes
import numpy as np

from kvjax.store.codebooks import sphere_codebook
from kvjax.store.gaussian_vectors import gaussian_codebook
from kvjax.store.rotate import hadamard
from kvjax.store.sphere import gaussian
from tests.float64.reference import best, rope, softmax, window_score


def float16(x):
    return x.astype(np.float16).astype(float)


def affine(bits, group, channel=False):
    """Affine codes of rows [g, H], by the range of `group` channels of a token, or of a channel's tokens."""

    def code(x):
        rows = x if channel else x.reshape(*x.shape[:-1], -1, group)
        axis = -2 if channel else -1
        low, high = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
        zero, step = float16(low), float16((high - low) / (2**bits - 1))
        return (np.clip(np.rint((rows - zero) / step), 0, 2**bits - 1) * step + zero).reshape(x.shape)

    return code


def grouped(bits, label, clip=1.0):
    """SKVQ (arXiv:2405.06219): codes of rows [g, H] by the clipped range of the channels of one label."""
    float8 = lambda x: np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(float)  # noqa: E731

    def code(x):
        out = np.empty_like(x)
        for mine in (label == number for number in np.unique(label)):
            low, high = (clip * end(x[..., mine], axis=-1, keepdims=True) for end in (np.min, np.max))
            step = np.maximum((high - low) / (2**bits - 1), 1e-5)
            codes = np.rint(np.clip((x[..., mine] - low) / step, 0, 2**bits - 1))
            out[..., mine] = codes * float8(step) + float8(low)
        return out

    return code


def sketch_apart(signs, own, *, count, group, seed=0):
    """QJL with outliers, as the authors' `qjl_score` multiplies it by every unit vector as a query.

    Of every `group` tokens, the `count` channels of the largest norm are sketched by `own` orthogonal rows
    for every channel, all others by `signs`. A query's sketch is divided likewise.
    """

    def code(x):
        t, h = x.shape
        drawn = gaussian(h, seed, signs).astype(float).T
        blocks = [np.linalg.qr(drawn[:, i * h : (i + 1) * h])[0] for i in range(signs)]
        s = np.concatenate(blocks, 1) * np.sqrt(h)
        found = np.empty_like(x)
        for start in range(0, t, group):
            run = x[start : start + group]
            at = np.argsort(-np.linalg.norm(run, axis=0), kind="stable")[:count]
            for i, key in enumerate(run):
                large = np.isin(np.arange(h), at)
                for c in range(h):
                    m = own * h if large[c] else s.shape[1]
                    same = np.where(large == large[c], key, 0)
                    signed = np.where(same @ s[:, :m] >= 0, 1.0, -1.0)
                    length = float16(np.linalg.norm(same))
                    found[start + i, c] = np.sqrt(np.pi / 2) / m * length * (s[c, :m] @ signed)
        return found

    return code


def coded(keys, values, *, granule=1, residual=0, sinks=0):
    """Attention over slots whose oldest whole granules are decoded codes, except the first `sinks` tokens."""

    def attends(q, k, v, pos, at):
        k, v = k.copy(), v.copy()
        for block in encoded(pos, at, granule, residual, sinks):
            k[block], v[block] = keys(k[block]), values(v[block])
        return softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v

    return attends


def encoded(pos, at, granule=1, residual=0, sinks=0):
    """Find the slots whose tokens are encoded, `granule` at a time."""
    order = np.argsort(pos)
    able = order[(pos[order] >= sinks) & ((pos[order] < at.stored) | (granule == 1 and not residual))]
    starts = range(0, max(len(able) - residual, 0) // granule * granule, granule)
    return [able[start : start + granule] for start in starts]


def zipcache(count, theta, *, window, high, low, group):
    """ZipCache (arXiv:2405.14256): as many salient tokens as the budget has, by the last queries."""

    def salient(prompt, i):
        score = window_score(prompt, i, window, 1, reduce="mean")
        return best(score, [count(prompt.length)] * len(score))

    return two_tiers(salient, theta, high=high, low=low, group=group)


def zipvl(theta, *, share, high, low, group):
    """ZipVL (arXiv:2410.08584): as many salient tokens as hold the share of a layer's attention."""

    def salient(prompt, i):
        mass, t = prompt.p[i].sum((0, 1)), prompt.length
        total = np.cumsum(np.sort(mass)[::-1])
        most = int(np.argmax(total >= share * total[-1])) + 1
        matter = np.argsort(-mass / (t - np.arange(t)), kind="stable")[:most]
        return np.broadcast_to(np.isin(np.arange(t), matter), prompt.k[i].shape[:2])

    return two_tiers(salient, theta, high=high, low=low, group=group)


def needed_bits(prompt, i, last, key_error, value_error, apart):
    """QAQ (arXiv:2403.04643), equation by equation: bits [K, T] of keys or of values, the larger number."""
    t, width = prompt.length, prompt.k[i].shape[-1]
    out = np.zeros(prompt.k[i].shape[:2])
    for head, own in np.ndindex(out.shape):
        of_head = slice(head * prompt.group, (head + 1) * prompt.group)
        a = prompt.p[i][of_head, -last:].max((0, 1))
        jacobian = np.abs(np.diag(a) - np.outer(a, a)).max(0)[own]
        error = np.sqrt(key_error / width) / t / (np.abs(prompt.q[i][of_head, -last:]).max() * jacobian)
        for x, e in ((prompt.k[i], error), (prompt.v[i], np.sqrt(value_error) / t / a[own])):
            rest = sorted(x[head, own], key=abs)[: width - apart]
            bits = np.ceil(np.log2((max(rest) - min(rest)) / (2 * e) + 1))
            out[head, own] = max(out[head, own], bits)
    return out


def qaq(theta, apart, *, window, key_error, value_error, high, low, width=16):
    """QAQ: tokens that need more than `low` bits, and the newest, in `high`; `apart` numbers as computed."""

    def salient(prompt, i):
        new = np.arange(prompt.length) >= prompt.length - window
        return (needed_bits(prompt, i, window, key_error, value_error, apart) > low) | new

    around = lambda code: outliers(apart, code)  # noqa: E731
    return two_tiers(salient, theta, high=high, low=low, group=width, around=around)


def two_tiers(salient, theta, *, high, low, group, around=lambda code: code):
    """Decode a prompt's slots: salient tokens in many bits, others in few; those of steps in many.

    around: makes the codec of a codec.
    """
    many, few = (around(affine(bits, group)) for bits in (high, low))

    def stored(prompt):
        out, at = copy.copy(prompt), np.arange(prompt.length)
        out.k, out.raw_k, out.v = [], [], []
        for i in range(len(prompt.p)):
            each = [
                np.where(salient(prompt, i)[..., None], many(x), few(x)) for x in (prompt.k[i], prompt.v[i])
            ]
            out.k, out.v = [*out.k, each[0]], [*out.v, each[1]]
            out.raw_k.append(rope(each[0], -at, theta))
        return out

    def attends(q, k, v, pos, at):
        new = pos >= at.prompt
        k, v = (np.where(new[:, None], many(x), x) for x in (k, v))
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


def orthogonal_error(run, rank, weight, code, values, **granules):
    """SQuat (arXiv:2503.24358): runs of a key's channels, each moved by the errors of those before it.

    Of all channels that are left, the best are found anew for every run: delta' A delta is smallest where
    (A delta)_left = 0.
    """

    def attends(q, k, v, pos, at):
        asked = at.queries[:, : at.prompt].reshape(-1, k.shape[-1])
        _, s, turn = np.linalg.svd(asked, full_matrices=False)
        a = np.eye(k.shape[-1]) + weight * (turn[:rank].T * s[:rank] ** 2) @ turn[:rank]

        def keys(x):
            x, out = x.copy(), np.zeros_like(x)
            for start in range(0, x.shape[-1], run):
                own, left = slice(start, start + run), slice(start + run, None)
                out[:, own] = code(x[:, own])
                error = out[:, own] - x[:, own]
                x[:, left] -= error @ a[own, left] @ np.linalg.inv(a[left, left])
            return out

        return coded(keys, values, **granules)(q, k, v, pos, at)

    return attends


def in_layers(*attends):
    """Make an attention function that differs in every layer."""
    return lambda q, k, v, pos, at: attends[at.layer](q, k, v, pos, at)


def of_lists(keys, values, theta=None, **whole):
    """Every list's own codes, token by token: keys(layer, head) and values(layer, head) give them.

    theta: keys are encoded before RoPE of this theta. whole: which tokens stay unencoded, as in `coded`.
    """

    def attends(q, k, v, pos, at):
        of_keys, of_values = keys(at.layer, at.number), values(at.layer, at.number)
        if theta is None:
            return coded(of_keys, of_values, **whole)(q, k, v, pos, at)
        k, v = k.copy(), v.copy()
        for block in encoded(pos, at, **whole):
            k[block] = rope(of_keys(rope(k[block], -pos[block], theta)), pos[block], theta)
            v[block] = of_values(v[block])
        return softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v

    return attends


def vectors(books):
    """CQ (arXiv:2405.03917): the nearest of the vectors [G, C, c] of every c channels."""

    def code(x):
        split = x.reshape(*x.shape[:-1], len(books), -1)
        found = [
            book[((y[..., None, :] - book) ** 2).sum(-1).argmin(-1)]
            for y, book in zip(np.moveaxis(split, -2, 0), books, strict=True)
        ]
        return np.stack(found, -2).reshape(x.shape)

    return code


def commuting_sums(books):
    """CommVQ (arXiv:2506.18879): of every stage [C, H] the a + J b nearest to the rest.

    J maps the channels (j, j + H / 2) by the block [[0, -1], [1, 0]].
    """

    def code(x):
        half = x.shape[-1] // 2
        turn = np.kron([[0, -1], [1, 0]], np.eye(half))
        out = np.zeros_like(x)
        for book in books:
            pairs = (book[:, None] + book[None] @ turn.T).reshape(-1, x.shape[-1])
            near = (((x - out)[..., None, :] - pairs) ** 2).sum(-1).argmin(-1)
            out = out + pairs[near]
        return out

    return code


def factored(code):
    """DecoQuant (arXiv:2405.12591): x = A B with the roots of the singular values in both, and codes of A."""

    def coded(x):
        u, s, v = np.linalg.svd(x, full_matrices=False)
        sign = np.sign(np.take_along_axis(v, np.abs(v).argmax(1)[:, None], 1))
        return code(u * np.sqrt(s) * sign[:, 0]) @ float16(np.sqrt(s)[:, None] * v * sign)

    return coded


def directions(bits, seed=0):
    """Rows after a Hadamard rotation, as lengths and codes of a codebook for random directions."""

    def code(x):
        levels, turn = sphere_codebook(x.shape[-1], bits).centroids, hadamard(x.shape[-1], seed)
        length = float16(np.linalg.norm(x, axis=-1, keepdims=True))
        y = x @ turn.T / length
        return levels[np.abs(y[..., None] - levels).argmin(-1)] * length @ turn

    return code


def over_below(maps, granule, residual, first=4, bits=2):
    """AQUA-KV (arXiv:2501.19392): the decoded slots of a prompt, each layer predicted from the one below."""

    def flat(x):
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)

    def stored(prompt):
        out, at = copy.copy(prompt), np.arange(prompt.length)
        out.k, out.raw_k, out.v = [], [], []
        coded, below = at < max(prompt.length - residual, 0) // granule * granule, None
        for i, (raw, v) in enumerate(zip(prompt.raw_k, prompt.v, strict=True)):
            near = {"key": 0.0, "value": 0.0}
            code = directions(first if i == 0 else bits)
            if below is not None:
                y = flat(below[0]) @ maps["key weights"][i] + maps["key bias"][i]
                near["key"] = y.reshape(prompt.length, len(raw), -1).swapaxes(0, 1)
            k = near["key"] + code(raw - near["key"])
            if below is not None:
                y = np.concatenate([flat(k), flat(below[1])], 1) @ maps["value weights"][i]
                y = y + maps["value bias"][i]
                near["value"] = y.reshape(prompt.length, len(v), -1).swapaxes(0, 1)
            below = k, near["value"] + code(v - near["value"])
            k, v = (np.where(coded[:, None], x, y) for x, y in zip(below, (raw, v), strict=True))
            out.raw_k, out.v = [*out.raw_k, k], [*out.v, v]
            out.k.append(rope(k, at, prompt.decoder.config.rope.theta))
        return out

    return stored


def faithful(code, *rows):
    """1 less the relative error of decoded rows [*b, H]: the mean of a key's and a value's."""
    error = [np.linalg.norm(x - code(x), axis=-1) / np.linalg.norm(x, axis=-1) for x in rows]
    return np.maximum(1 - np.mean(error, 0), 0)


def behind(matrix, code):
    """Codes of rows in another basis, given by `matrix`."""
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
    """Rows whose `count` largest numbers are not encoded."""

    def coded(x):
        at = np.argsort(-np.abs(x), axis=-1, kind="stable")[..., :count]
        out = x.copy()
        np.put_along_axis(out, at, 0.0, -1)
        out = code(out)
        np.put_along_axis(out, at, np.take_along_axis(x, at, -1), -1)
        return out

    return coded


def clipped(at, code):
    """OSCAR (arXiv:2605.17757): no number of a row is larger than its number `at`, by size, from 0 on."""

    def cut(x):
        most = np.sort(np.abs(x), -1)[..., at, None]
        return code(np.where(np.abs(x) > most, np.sign(x) * most, x))

    return cut


def of_range(low, step, bits):
    """Codes with a given range."""
    return lambda x: np.clip(np.rint((x - low) / step), 0, 2**bits - 1) * step + low


def pursued(atoms, count):
    """CSR (arXiv:2412.11741): matching pursuit with `count` atoms, and weights in float8."""

    def code(x):
        out = np.zeros_like(x)
        for _ in range(count):
            met = (x - out) @ atoms.T
            best = np.abs(met).argmax(-1)
            weight = np.take_along_axis(met, best[..., None], -1)
            out = out + weight.astype(ml_dtypes.float8_e4m3fn).astype(float) * atoms[best]
        return out

    return code
