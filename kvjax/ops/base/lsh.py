"""Locality-sensitive hashing by random hyperplanes: codes of vectors, and collision probabilities.

A hyperplane gives a vector one bit, its side of the plane; two vectors agree in it with probability
p = 1 - angle / pi (Charikar, 2002). A table has K bits, so two vectors collide in it with probability p^K.
"""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.ops.base.dtypes import wide

# The most projected numbers that are held at once; more are computed word by word.
AT_ONCE = 2**24


def words_of(bits: int, tables: int) -> int:
    """How many 32-bit words hold the codes of a vector; a table's bits are in one word.

    >>> words_of(10, 150)
    50
    """
    return -(-tables // (32 // bits))


@lru_cache(maxsize=64)
def hyperplanes(width: int, bits: int, tables: int, seed: int) -> Float[np.ndarray, "H P"]:
    """Draw normals of the tables' hyperplanes from a Gaussian, on the host: the same on every device.

    >>> hyperplanes(4, bits=3, tables=2, seed=0).shape
    (4, 6)
    """
    drawn = np.random.RandomState([seed, width]).standard_normal((width, tables * bits))
    drawn.flags.writeable = False
    return drawn


def hash_codes(
    x: Float[Array, "*b S H"], normals: Float[Array | np.ndarray, "H P"], bits: int
) -> UInt32[Array, "*b S W"]:
    """Hash vectors to codes in L tables: bit i says whether a vector is on the side of the i-th normal.

    normals: those of all P hyperplanes, `bits` for each table. A word holds 32 // bits tables, the first one
    in its lowest bits; padding tables in the last word have code 0.

    >>> hash_codes(jnp.asarray([[1.0, -1.0]]), jnp.eye(2), bits=1).tolist()
    [[1]]
    """
    width, columns = normals.shape
    words, block = words_of(bits, columns // bits), 32 // bits * bits
    planes = jnp.pad(jnp.asarray(normals, wide(x)), ((0, 0), (0, words * block - columns)))
    planes = planes.reshape(width, words, block)
    place = jnp.left_shift(jnp.uint32(1), jnp.arange(block, dtype=jnp.uint32))

    def packed(planes: Array) -> Array:
        before = jnp.tensordot(x, planes, 1) > 0
        bits = jnp.where(before, place.reshape(*(1,) * (before.ndim - 1), block), jnp.uint32(0))
        return bits.sum(-1, dtype=jnp.uint32)

    x = x.astype(wide(x))
    if math.prod(x.shape[:-1]) * columns <= AT_ONCE:
        return packed(planes)
    return jnp.moveaxis(jax.lax.map(packed, jnp.moveaxis(planes, 1, 0)), 0, -1)


def collisions(
    a: UInt32[Array, "*b R W"], b: UInt32[Array, "*b S W"], bits: int, tables: int
) -> Int[Array, "*b R S"]:
    """In how many tables each vector of `a` has the same code as each vector of `b`; both by `hash_codes`.

    >>> one, two = jnp.asarray([[0b0111]], jnp.uint32), jnp.asarray([[0b0110], [0b0111]], jnp.uint32)
    >>> collisions(one, two, bits=2, tables=2).tolist()
    [[1, 2]]
    """
    apart = a[..., :, None, :] ^ b[..., None, :, :]
    mask = jnp.uint32((1 << bits) - 1)
    same = sum(((apart >> jnp.uint32(i * bits)) & mask == 0).astype(jnp.int32) for i in range(32 // bits))
    return jnp.asarray(same).sum(-1) - (32 // bits * a.shape[-1] - tables)


def log_chance_of_two(cosine: Float[Array, "*b"], bits: int, tables: int) -> Float[Array, "*b"]:
    """Compute log u, with u the probability that vectors of this cosine collide in two tables or more.

    u = 1 - (1 - x)^L - L x (1 - x)^(L - 1) with x = p^K, p = 1 - arccos(cosine) / pi, K bits and L tables
    (MagicPIG, arXiv:2410.16179). Small u do not lose digits. Gradients are finite for all cosines.

    >>> round(float(jnp.exp(log_chance_of_two(jnp.asarray(0.0), bits=1, tables=3))), 6)
    0.5
    """
    near = 1 - 2.0**-22
    log_x = bits * jnp.log1p(-jnp.arccos(jnp.clip(cosine, -near, near)) / math.pi)
    x, more = jnp.exp(log_x), tables - 1
    rare = tables * x < 0.1
    # If collisions are rare: the terms C(L, i) x^i (1 - x)^(L - i) of i = 2 .. 5, by ratios of neighbours.
    few = jnp.where(rare, x, 0.0)
    odds = few / (1 - few)
    three, four, five = ((tables - i + 1) / i * odds for i in (3, 4, 5))
    rest = jnp.log1p(three * (1 + four * (1 + five)))
    of_few = math.log(tables * more / 2) + 2 * log_x + (tables - 2) * jnp.log1p(-few) + rest
    many = jnp.where(rare, 0.5, x)
    of_many = jnp.log(-jnp.expm1(more * jnp.log1p(-many) + jnp.log1p(more * many)))
    return jnp.where(rare, of_few, of_many)
