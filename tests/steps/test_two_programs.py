"""A prompt read by one program and compressed by another: what one program gives, and whom it serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.steps import Run

PROMPT = np.random.default_rng(0).integers(0, 32, (2, 16))
CONFIG = Config(vocab=32, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16)
MODEL = Model(CONFIG, init(CONFIG, jax.random.key(5)))
SNAPKV = kvjax.method("snapkv", budget=0.5, window=4)


def test_methods_with_the_same_observations_are_read_by_one_program():
    for one in (steps.prefill, steps.read, steps.compress):
        one.clear_cache()
    for method in (SNAPKV, kvjax.method("adakv", budget=0.5, window=4), kvjax.method("int8")):
        kvjax.prefill(MODEL, PROMPT, method=method, room=2)
    # What only stores takes one program.
    assert [f._cache_size() for f in (steps.read, steps.compress, steps.prefill)] == [1, 2, 1]


def test_two_programs_give_what_one_gives():
    logits, cache = kvjax.prefill(MODEL, PROMPT, method=SNAPKV, room=2)
    tokens, lengths = jnp.asarray(PROMPT, jnp.int32), jnp.full((2,), 16, jnp.int32)
    want = steps.prefill(
        Run(CONFIG, SNAPKV), MODEL.params, tokens, lengths, None, tokens_bound=16, room=2, compress=True
    )
    for x, y in zip(jax.tree.leaves((logits, cache)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "hyper", "own"),
    [
        ("snapkv", {"window": 4}, False),
        ("kvzip", {}, False),
        ("h2o", {}, False),
        ("streamingllm", {}, True),  # Keys turn by rank.
        ("less", {}, True),  # The merge answers for what has left.
        ("fastkv", {"window": 4}, True),  # Layers above one see fewer tokens.
        ("gemfilter", {}, True),  # Some tokens are read again.
    ],
)
def test_what_changes_the_reading_of_a_prompt_is_read_by_a_program_of_its_own(name, hyper, own):
    run = Run(CONFIG, kvjax.method(name, budget=0.5, **hyper))
    assert steps.reading(run) == (run if own else Run(CONFIG, kvjax.method("full")))
