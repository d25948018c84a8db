"""Blocks of slots between host memory and the device, against numpy; several narrow slots share a word."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.memory import copy_blocks, in_host, offers_host, to_host
from tests.sweep import sweep

SHAPE, BLOCKS = (2, 1, 2, 24, 3), 96


@pytest.mark.skipif(not offers_host(), reason="the backend offers no host memory")
@pytest.mark.parametrize(
    ("dtype", "size", "fetches"),
    sweep(
        itertools.product(("bfloat16", "uint8", "float32"), (1, 2, 3, 8), (True, False)),
        ("bfloat16", 1, True), ("bfloat16", 1, False), ("uint8", 3, True), ("uint8", 3, False),
    ),
)  # fmt: skip
def test_blocks_are_copied_alone_whatever_shares_their_words(dtype, size, fetches):
    rng = np.random.default_rng(0)
    source, to = (jnp.asarray(rng.integers(0, 99, SHAPE), dtype) for _ in range(2))
    count, blocks = 5, BLOCKS // size
    moves = [rng.permutation(blocks) for _ in range(2)]
    # The first and the last block, which lie at the ends of the arrays, and neighbours.
    moves[0][:2], moves[1][:4] = (blocks - 1, 0), (0, blocks - 1, 5, 6)
    want = np.asarray(to).reshape(-1, size, 3).copy()
    want[moves[1][:count]] = np.asarray(source).reshape(-1, size, 3)[moves[0][:count]]
    moves = tuple(jnp.asarray(x, jnp.int32) for x in moves)
    source, to = (to_host(source), to) if fetches else (source, to_host(to))
    got = jax.jit(partial(copy_blocks, size=size))(to, source, moves, jnp.int32(count))
    assert in_host(got) != fetches
    np.testing.assert_array_equal(np.asarray(got, np.float32).reshape(want.shape), want.astype(np.float32))
