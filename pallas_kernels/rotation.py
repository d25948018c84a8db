"""Logits of keys that are not rotated yet: rotary position embedding inside the decode kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels.streaming import LANES, product


class RotatedChannels(NamedTuple):
    """The rotated channels: pairs (i, i + half) of the 2 half channels from `start`, times `amplitude`."""

    start: int
    half: int
    amplitude: float = 1.0


def rotated_logits(
    q: Any, codes: Any, numbers: dict[str, Any], phase: Any, angles: Any, rotated: RotatedChannels
) -> Any:
    """Compute q k' [R, tokens] of rotated keys: codes [pages, page, W] in the scales among `numbers`.

    A page is laid out with its channels along sublanes: phases [1, tokens] and numbers of tokens are along
    lanes, and the channels of a pair in separate registers, so that only the keys are moved. angles [half,
    128] int32: the angle of a pair per step of the phase, in units of 2^-32 of a full turn.
    """
    codes, numbers = _filled(codes, numbers)
    (pages, page, _), kind = codes.shape, codes.dtype
    found = []
    for n in range(pages):
        at = slice(n * page, (n + 1) * page)
        keys = _of_channels(codes[n], numbers, n).T.astype(jnp.float32)
        for name, take in (("key_scale", jnp.multiply), ("key_zero", jnp.add)):
            keys = take(keys, numbers[name][:, at]) if name in numbers else keys
        found.append(logits_of_channels(q, keys.astype(jnp.float32), phase[:, at], angles, rotated, kind))
    return jnp.concatenate(found, axis=1)


def logits_of_channels(
    q: Any, keys: Any, phase: Any, angles: Any, rotated: RotatedChannels, kind: Any
) -> Any:
    """Compute q k' [R, S] of keys [W, S] with channels along sublanes, rotated by phases [1, S]."""
    first, middle, last = (rotated.start + i * rotated.half for i in range(3))
    units = phase.astype(jnp.int32) * jnp.concatenate([angles] * (phase.shape[1] // LANES), axis=1)
    parts = rotated_pairs(keys[first:middle], keys[middle:last], waves(units, kind, rotated.amplitude))
    parts = [keys[:first], *parts] if first else parts
    parts = [*parts, keys[last:]] if last < len(keys) else parts
    return product(q.astype(kind), jnp.concatenate(parts).astype(kind), 0)


def rotated_pairs(a: Any, b: Any, waves: tuple[Any, Any]) -> list[Any]:
    """Rotate the two channels of every pair."""
    cos, sin = waves
    return [a * cos - b * sin, b * cos + a * sin]


def _filled(codes: Any, numbers: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Join small pages, and the numbers of their slots, to fill the lanes."""
    pages, page, width = codes.shape
    many = max(LANES // page, 1)
    taken = {
        name: [sum(x[i : i + many], []) for i in range(0, pages, many)]
        for name, x in numbers.items()
        if isinstance(x, list)
    }
    return codes.reshape(pages // many, page * many, width), numbers | taken


def _of_channels(codes: Any, numbers: dict[str, Any], n: int) -> Any:
    """Keys [page, W] of page n, without the scales of its tokens."""
    if "channel_scale" not in numbers:
        return codes
    scales, zeros = numbers["channel_scale"][n], numbers["channel_zero"][n]
    size = codes.shape[0] // len(scales)
    groups = (codes[i * size : (i + 1) * size].astype(jnp.float32) for i in range(len(scales)))
    keys = [x * scale + zero for x, scale, zero in zip(groups, scales, zeros, strict=True)]
    return jnp.concatenate(keys).astype(codes.dtype)


def waves(units: Any, kind: Any, amplitude: float) -> tuple[Any, Any]:
    """Compute amplitude (cos, sin) of angles, exact in float32 or, for bfloat16 keys, to 3e-4.

    units: int32, in units of 2^-32 of a full turn: an integer phase times the angle per step, which wraps as
    angles do and so loses no precision at late positions.
    """
    half_turns = units.astype(jnp.float32) * 2.0**-31
    square = half_turns * half_turns
    cosine, sine = ([amplitude * c for c in x] for x in POLYNOMIALS[kind])
    return _sum(cosine, square), _sum(sine, square) * half_turns


def _sum(coefficients: list[float], x: Any) -> Any:
    out, *rest = coefficients[::-1]
    for c in rest:
        out = out * x + c
    return out


def _polynomial(what: Callable[[Any], Any], degree: int) -> list[float]:
    fit = np.polynomial.Chebyshev.interpolate(what, degree, domain=[0, 1])
    return fit.convert(kind=np.polynomial.Polynomial).coef.tolist()


# cos(pi sqrt(u)) and sin(pi sqrt(u)) / sqrt(u) for u in 0..1.
POLYNOMIALS = {
    jnp.dtype(kind): (
        _polynomial(lambda u: np.cos(np.pi * np.sqrt(u)), cosine),
        _polynomial(lambda u: np.pi * np.sinc(np.sqrt(u)), sine),
    )
    for kind, cosine, sine in ((jnp.bfloat16, 4, 3), (jnp.float32, 6, 6))
}
