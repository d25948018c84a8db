"""FreqKV: slots between the first and the newest ones become fewer, the low frequencies of all of them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import Merge, Observed, View

# Frequencies that are computed at a time.
STRIP = 128
# (-1)^i / (2 i + 1)!; the first term that is left out is at most (pi / 2)^15 / 15! = 7e-10.
SERIES = tuple((-1) ** i / math.factorial(2 * i + 1) for i in range(7))


@dataclasses.dataclass(frozen=True)
class LowPass(Merge):
    """The low frequencies of the slots between `sinks` first and `newest` last tokens (arXiv:2505.00570).

    Of N such slots n stay, and get

        y = sqrt(n / N) C_n' (C_N x)[:n]

    of all N keys before rotation, channel by channel, and of their values, where C_m is the orthonormal
    discrete cosine transform (DCT-II) of m numbers in the order of positions. They have the positions of the
    n first ones, by which a layer's window counts. A KV head without evictions is unchanged. Raises
    ValueError for numbers of tokens that are negative or not whole.
    """

    sinks: int
    newest: int

    writes = ("k", "v")
    ordered = True
    unrotated = True

    def __post_init__(self):
        for name in ("sinks", "newest"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 0:
                raise ValueError(f"{name} must be a whole number of tokens >= 0, got {given!r}")

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Change keys and values in the view's `kept` slots between the first and the newest ones."""
        between = (view.pos >= self.sinks) & (view.pos < (seen.length - self.newest)[:, None, None])
        stays = between & kept
        whole, fewer = between.sum(-1), stays.sum(-1)
        changes = stays & (fewer < whole)[..., None]
        shrinks = jnp.sqrt(fewer.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32))
        new = {}
        for name in ("k", "v"):
            x = getattr(view, name)
            given = jnp.where(between[..., None], x, jnp.zeros((), x.dtype)).astype(jnp.float32)
            low = shrinks[..., None, None] * _resampled(given, between, stays)
            new[name] = jnp.where(changes[..., None], low.astype(x.dtype), x)
        return view._replace(**new)


def _resampled(
    x: Float[Array, "B K S H"], given: Bool[Array, "B K S"], asked: Bool[Array, "B K S"]
) -> Float[Array, "B K S H"]:
    """C_n' (C_N x)[:n] of the N slots `given`, at the n slots `asked`; strip by strip of frequencies."""
    strips = -(-x.shape[2] // STRIP)

    def add(total: Array, at: Array) -> tuple[Array, None]:
        frequency = at * STRIP + jnp.arange(STRIP, dtype=jnp.int32)
        low = frequency[None, None] < asked.sum(-1)[..., None]
        # Apart from the products: a TPU's compiler takes twice as long to fuse both.
        there, back = jax.lax.optimization_barrier((cosines(frequency, given), cosines(frequency, asked)))
        there = jnp.where(low[..., None], there, 0.0)
        spectrum = jnp.einsum("bkfs,bksh->bkfh", there, x, precision="highest")
        return total + jnp.einsum("bkfs,bkfh->bksh", back, spectrum, precision="highest"), None

    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), jnp.arange(strips, dtype=jnp.int32))[0]


def cosines(frequency: Int[Array, "F"], among: Bool[Array, "*b S"]) -> Float[Array, "*b F S"]:
    """C[f, i] = sqrt((1 or 2) / N) cos(pi (2 i + 1) f / 2N) at the N slots of a list; 0 at other slots.

    >>> cosines(jnp.arange(2), jnp.array([True, False, True])).round(3).tolist()
    [[0.7070000171661377, 0.0, 0.7070000171661377], [0.7070000171661377, 0.0, -0.7070000171661377]]
    """
    many = jnp.maximum(among.sum(-1, dtype=jnp.int32), 1)[..., None, None]
    odd = 2 * jnp.cumsum(among, -1, dtype=jnp.int32)[..., None, :] - 1
    frequency = frequency.reshape(*(1,) * (among.ndim - 1), -1, 1)
    # Whole numbers of quarter periods / N, of which 4 N are a turn. float32 would round large products and
    # int32 overflow, so frequencies are multiplied in two parts, which serves 600,000 slots.
    high, small = frequency >> 9, frequency & 511
    turn = _remainder(_remainder(odd * high, 4 * many) * 512 + odd * small, 4 * many)
    n = many.astype(jnp.float32)
    size = jnp.sqrt(jnp.where(frequency == 0, 1.0, 2.0) / n)
    # cos(pi / 2 u) = sin(pi / 2 (|u - 2| - 1)) for u in [0, 4].
    part = (jnp.abs(turn - 2 * many) - many).astype(jnp.float32) / n
    return jnp.where(among[..., None, :], size * _sine(part), 0.0)


def _sine(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """sin(pi x / 2) of numbers in [-1, 1], to float32's last bits, by its Taylor series.

    jnp.cos serves all angles, in so many operations that a TPU's compiler takes a minute for an array.

    >>> _sine(jnp.array([-1.0, 0.0, 1 / 3])).round(6).tolist()
    [-1.0, 0.0, 0.5]
    """
    a = jnp.pi / 2 * x
    out = jnp.full_like(a, SERIES[-1])
    for term in SERIES[-2::-1]:
        out = out * a * a + term
    return out * a


def _remainder(x: Int[Array, "*b"], of: Int[Array, "*c"]) -> Int[Array, "*b"]:
    """Remainders of whole numbers x >= 0, by a quotient in float32 that is wrong by at most 1.

    That holds for quotients below 2^22. TPUs do not divide integers: their compiler takes minutes for an
    array of remainders.

    >>> _remainder(jnp.array([0, 6, 7, 2**24 + 1]), jnp.array(7)).tolist()
    [0, 6, 0, 2]
    """
    quotient = (x.astype(jnp.float32) * (1.0 / of.astype(jnp.float32))).astype(jnp.int32)
    left = x - quotient * of
    return jnp.where(left < 0, left + of, jnp.where(left >= of, left - of, left))
