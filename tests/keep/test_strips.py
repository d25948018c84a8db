"""What compares all with all does so in strips: memory grows with the prompt, not with its square."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.keep.merges.merge import nearest
from kvjax.ops.attention.strips import STRIP, causal_in_strips
from kvjax.ops.attention.union import Keys


def planned(f, *like):
    """Bytes of temporaries by the compiler."""
    return jax.jit(f).lower(*like).compile().memory_analysis().temp_size_in_bytes


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_a_merge_compares_a_strip_of_leaving_keys_at_a_time(rng):
    def taken(slots):
        return planned(nearest, shape(1, 1, slots, 8), shape(1, 1, slots, 8), shape(1, 1, slots, dtype=bool))

    assert taken(4096) < 3 * taken(2048)
    # And it finds what one comparison of all finds, also where the last strip is not whole.
    e, k = (rng.normal(size=(1, 2, n, 8)).astype(np.float32) for n in (300, 50))
    index, cosine = nearest(jnp.asarray(e), jnp.asarray(k), jnp.ones((1, 2, 50), bool))
    e, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (e, k))
    all_of_them = np.einsum("bkeh,bksh->bkes", e, k)
    np.testing.assert_array_equal(index, all_of_them.argmax(-1))
    np.testing.assert_allclose(cosine, all_of_them.max(-1), atol=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("more", [0, 5], ids=["whole strips", "and some tokens more"])
def test_a_prompt_of_any_length_is_attended_in_strips(more):
    def taken(t):
        def f(q, k, v, pos):
            return causal_in_strips(q, Keys(k, v, pos), [], pos[:, 0], scale=1.0)[0]

        x = shape(1, 1, t, 8)
        return planned(f, x, x, x, shape(1, 1, t, dtype=jnp.int32))

    assert taken(112 * STRIP + more) < 3 * taken(56 * STRIP + more)
