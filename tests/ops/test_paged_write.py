"""Many tokens of a list at once are the same tokens one by one, in every payload."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.decode.page_pool import make_pool
from kvjax.ops.decode.paged_append import paged_append
from kvjax.ops.decode.paged_write import paged_write
from tests.sweep import sweep

LAYERS, HEADS, WIDTH, PAGE, BLOCKS = 2, 2, 8, 8, 7


def pool_of(rng, dtype, packed, names):
    shape = LAYERS, HEADS * BLOCKS, PAGE, WIDTH
    k, v = (jnp.asarray(rng.integers(-2, 2, shape), dtype) for _ in "kv")
    numbers = {name: jnp.asarray(rng.normal(size=shape[:3]), jnp.float32) for name in names}
    return make_pool(k, v, packed=packed, **numbers)


CASES = [
    ("float32", False, ("pos",)),
    ("bfloat16", True, ("pos", "bias")),
    ("int8", False, ("pos", "key_scale", "value_scale")),
    ("int4", False, ()),
]


@pytest.mark.parametrize("dtype, packed, names", sweep(CASES, CASES[-1]))
def test_many_tokens_at_once_are_the_same_one_by_one(dtype, packed, names, rng):
    pool = pool_of(rng, dtype, packed, names)
    blocks = rng.permutation(BLOCKS)[:6].reshape(2, 3)
    table = jnp.asarray(np.arange(HEADS)[None, :, None] * BLOCKS + blocks[:, None], jnp.int32)
    # The second list of row 0 runs out of pages, row 1 stores fewer tokens than it is given.
    starts, counts = jnp.asarray([[5, 20], [0, 9]], jnp.int32), jnp.asarray([6, 2], jnp.int32)
    k, v = (jnp.asarray(rng.integers(-2, 2, (2, HEADS, 6, WIDTH)), dtype) for _ in "kv")
    side = {name: jnp.asarray(rng.normal(size=(2, HEADS, 6)), jnp.float32) for name in names}
    got = jax.jit(paged_write)(pool, table, starts, counts, k, v, 1, numbers=side)

    @jax.jit
    def one(pool, i):
        numbers = {name: x[:, :, i] for name, x in side.items()}
        return paged_append(
            pool, table, starts + i, k[:, :, i], v[:, :, i], 1, numbers=numbers, active=counts > i
        )

    want = pool
    for i in range(6):
        want = one(want, i)
    np.testing.assert_array_equal(got.words, want.words)
    assert (np.asarray(got.words) != np.asarray(pool.words)).any()


def test_other_numbers_than_the_pools_are_refused(rng):
    pool = pool_of(rng, "float32", False, ("pos",))
    one = jnp.zeros((1, HEADS, 2, WIDTH))
    table, starts = jnp.zeros((1, HEADS, 1), jnp.int32), jnp.zeros((1, HEADS), jnp.int32)
    with pytest.raises(ValueError, match="expected one for each of the pool's: pos"):
        paged_write(pool, table, starts, jnp.asarray([2]), one, one)
