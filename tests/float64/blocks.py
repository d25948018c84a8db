"""Formats whose blocks of channels share a scale, in numpy by their specifications, with ml_dtypes' casts.

Each function returns a function that encodes and decodes rows [..., H] in their dtype.
"""

import ml_dtypes
import numpy as np

TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


def most_of(kind):
    return float(ml_dtypes.finfo(TYPES[kind]).max)


def cast(x, kind):
    """ml_dtypes' nearest number, of numbers within the format's range."""
    return np.clip(x, -most_of(kind), most_of(kind)).astype(TYPES[kind]).astype(x.dtype)


def microscaled(kind, block=32, part=None):
    """OCP Microscaling Formats, version 1.0, section 6.3.

    part: the power of two is that nearest to this part of the largest number, as in UltraQuant
    (arXiv:2606.20474).
    """

    def code(x):
        rows = x.astype(np.float64).reshape(*x.shape[:-1], -1, block)
        most = 0 if kind == "int8" else np.floor(np.log2(most_of(kind)))
        largest = np.abs(rows).max(-1, keepdims=True)
        e = np.floor(np.log2(largest, where=largest > 0, out=np.full_like(largest, -126))) - most
        if part is not None:
            e = np.floor(np.log2(part * largest, where=largest > 0, out=np.full_like(largest, -126)) + 0.5)
        # The scale's own format holds it.
        two = np.maximum(2.0**e, 2.0**-126).astype(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        p = np.clip(np.rint(rows / two * 64), -127, 127) / 64 if kind == "int8" else cast(rows / two, kind)
        return (p * two).reshape(x.shape)

    return code


def shared(fraction, block=16):
    """arXiv:2302.08007, section 3, block by block and pair by pair."""

    def code(x):
        out = np.zeros(x.size)
        for i, row in enumerate(x.astype(np.float64).reshape(-1, block)):
            if not row.any():
                continue
            e = np.floor(np.log2(np.abs(row).max()))
            for j in range(0, block, 2):
                pair = row[j : j + 2]
                own = np.floor(np.log2(np.abs(pair).max())) if pair.any() else -np.inf
                step = 2.0 ** (e - min(e - own, 1) - fraction + 1)
                m = np.minimum(np.rint(np.abs(pair) / step), 2**fraction - 1)
                out[i * block + j : i * block + j + 2] = np.sign(pair) * m * step
        return out.reshape(x.shape)

    return code


def nvfp4(block=16, scale=None, two=False):
    """arXiv:2509.25149, section 2; two: arXiv:2512.02010, algorithm 1."""

    def code(x):
        kind = x.dtype.type
        rows = x.reshape(*x.shape[:-1], -1, block)
        largest = np.abs(rows).max(-1, keepdims=True)
        over = kind(6 * (256 if two else 448))
        tensor = largest.max(-2, keepdims=True) / over if scale is None else np.full_like(largest, scale)
        tensor = np.where(tensor == 0, kind(1), tensor)

        def one(top):
            s = cast(largest / tensor / kind(top), "e4m3") * tensor
            return cast(np.divide(rows, s, where=s > 0, out=np.zeros_like(rows)), "e2m1") * s

        six, four = one(6), one(4)
        errors = [np.square(y - rows).sum(-1, keepdims=True) for y in (six, four)]
        return (np.where(errors[1] < errors[0], four, six) if two else six).reshape(x.shape)

    return code


def symmetric(bits, group=None):
    """Integers around 0, scaled so that the largest number of a group becomes the largest integer."""

    def code(x):
        rows = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
        scale = np.abs(rows).max(-1, keepdims=True) / x.dtype.type(2 ** (bits - 1) - 1)
        return (np.rint(rows / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)

    return code
