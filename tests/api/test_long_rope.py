"""A LongRoPE model rotates whole rows by their length: prompts do, and no cache grows across the switch."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.io.checkpoint import save_checkpoint
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.long_rope import LongRope

ROPE = LongRope(
    theta=100.0,
    factor=4.0,
    original_max=16,
    short_factor=(1.0, 1.25, 1.5, 2.0),
    long_factor=(1.5, 3.0, 5.0, 8.0),
)
CONFIG = Config(
    vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=16, max_positions=64, rope=ROPE
)
PARAMS = init(CONFIG, jax.random.key(0))
MODEL = Model(CONFIG, PARAMS)
TEXT = np.random.default_rng(0).integers(0, 32, 40).tolist()


@pytest.mark.rotating
@pytest.mark.parametrize("start", [8, 20])
def test_steps_on_either_side_of_the_switch_equal_a_whole_reading(start):
    logits, cache = kvjax.prefill(MODEL, [TEXT[:start]], room=8)
    found = [logits[0]]
    for at in range(start, start + 6):
        logits, cache = kvjax.step(MODEL, cache, [TEXT[at]])
        found.append(logits[0])
    expected = MODEL([TEXT[: start + 6]])[0, start - 1 :]
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.rotating
def test_rows_of_either_length_in_one_batch_are_those_alone():
    both, _ = kvjax.prefill(MODEL, [TEXT[:10], TEXT[:24]])
    for row, n in zip(both, (10, 24), strict=True):
        np.testing.assert_allclose(row, kvjax.prefill(MODEL, [TEXT[:n]])[0][0], atol=2e-5)


def test_a_cache_does_not_grow_across_the_switch():
    _, cache = kvjax.prefill(MODEL, [TEXT[:14]], room=8)
    with pytest.raises(InputError, match="a row of 14 tokens would grow beyond 16, .*add at most 2 tokens"):
        kvjax.prefill(MODEL, [TEXT[14:18]], cache=cache)
    with pytest.raises(InputError, match="a row of 12 tokens would grow beyond 16"):
        kvjax.generate(MODEL, [TEXT[:12]], max_new_tokens=5)
    with pytest.raises(
        InputError, match="3 tokens were given and the model has 2 positions after this cache"
    ):
        kvjax.verify(MODEL, cache, [TEXT[14:17]])
    for token in TEXT[14:16]:
        _, cache = kvjax.step(MODEL, cache, [token])
    with pytest.raises(InputError, match="the cache stands at this model's last position, 16"):
        kvjax.step(MODEL, cache, [TEXT[16]])


def test_chunks_of_a_long_text_are_refused():
    with pytest.raises(InputError, match="beyond 16 tokens this model's rotation depends on the length"):
        kvjax.prefill(MODEL, [TEXT[:20]], chunk=8)


def test_a_checkpoint_keeps_the_factors(tmp_path):
    save_checkpoint(MODEL, tmp_path / "a")
    assert kvjax.load(tmp_path / "a").config == CONFIG
    other = dataclasses.replace(CONFIG, rope=dataclasses.replace(ROPE, long_factor=(9.0,) * 4))
    assert Model(other, PARAMS).fingerprint != MODEL.fingerprint
