"""Steps over more slots than a strip holds, where keys are computed from what is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.attention.union import Keys, attend
from kvjax.steps.decoding.computed_keys import by_strips
from tests.models.architectures import TABLE
from tests.sweep import sweep

# Rows with room for two strips and a rest, whose last slots are empty.
LENGTHS, ROOM = (300, 261), 40


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(["tpa", "grouped latents", "dha"], "tpa"))
def test_a_step_over_several_strips_says_what_the_forward_pass_says(rng, name):
    config = TABLE[name].config
    # Weights larger than those of `init`, so that attention is not even over so many slots.
    params = jax.tree.map(lambda x: 3 * x, init(config, jax.random.key(1)))
    model = Model(config, params, name=name)
    texts = [rng.integers(0, config.vocab, n).tolist() for n in LENGTHS]
    logits, cache = kvjax.prefill(model, [text[:-2] for text in texts], room=ROOM)
    for ahead in (2, 1):
        logits, cache = kvjax.step(model, cache, jnp.asarray([text[-ahead] for text in texts]))
    for row, text in enumerate(texts):
        want = model(jnp.asarray([text]))[0, -1]
        np.testing.assert_allclose(logits[row], want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("slots", [1, 3, 4, 5, 8, 11, 12])
def test_strips_of_any_number_of_slots_make_the_whole(rng, slots):
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, n, s, 4)), jnp.float32) for n, s in ((4, 1), (2, slots), (2, slots))
    )
    pos = jnp.asarray(rng.permutation(2 * slots).reshape(2, 1, slots) - 2, jnp.int32)
    bias = jnp.asarray(rng.normal(size=(2, 4, slots)), jnp.float32)
    keys, at = Keys(k, v, pos, bias, until=pos + 5), jnp.full((2, 1), slots)

    def one(keys):
        return attend(q, keys, at, scale=0.5)[:2]

    for got, want in zip(*jax.jit(lambda keys: (by_strips(one, keys, 4), one(keys)))(keys), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
