"""FreqKV: slots between the first and the newest ones become fewer, the low frequencies of all of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.protocols import Observation, Seen, View

# Frequencies that are computed at a time.
STRIP = 128


@dataclasses.dataclass(frozen=True)
class LowPass:
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

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset()

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Seen
    ) -> View:
        """The view with other keys and values in `kept` slots between the first and the newest ones."""
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
        there = jnp.where(low[..., None], cosines(frequency, given), 0.0)
        spectrum = jnp.einsum("bkfs,bksh->bkfh", there, x, precision="highest")
        back = jnp.einsum("bkfs,bkfh->bksh", cosines(frequency, asked), spectrum, precision="highest")
        return total + back, None

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
    high, small = jnp.divmod(frequency, 512)
    turn = (odd * high % (4 * many) * 512 + odd * small) % (4 * many)
    n = many.astype(jnp.float32)
    size = jnp.sqrt(jnp.where(frequency == 0, 1.0, 2.0) / n)
    return jnp.where(among[..., None, :], size * jnp.cos(jnp.pi / 2 * turn.astype(jnp.float32) / n), 0.0)
