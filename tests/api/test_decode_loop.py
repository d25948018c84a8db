"""Tokens are written in slices on the device: what one by one gives, in few dispatches of one program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api import decode_loop as samples
from kvjax.api.decode_loop import SLICE, write, write_slice
from kvjax.api.logit_processors import RepetitionPenalty
from kvjax.api.sampling import Sampler
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.cache import Cache

VOCAB = 7


class Clock(NamedTuple):
    """A decoder that says its position modulo VOCAB, and no number from position `broken` on."""

    broken: int

    def __call__(self, params, cache, token, append):
        at = jnp.where(append, cache.next + 1, cache.next)
        logits = -5.0 * (jnp.arange(VOCAB)[None] != (at % VOCAB)[:, None]).astype(jnp.float32)
        return jnp.where((at >= self.broken)[:, None], jnp.nan, logits), Cache((), at)


class Broken(Exception):
    """The step at which logits were found not to be numbers."""


def said(starts, new, stop, broken=1000):
    """Return what `write` gives for clocks that stand at `starts`, and the lengths of slices that it ran."""

    def refuse(step):
        raise Broken(step)

    logits, cache = Clock(broken)(None, Cache((), jnp.asarray(starts, jnp.int32)), None, False)
    out = write(
        Clock(broken), {}, logits, cache, new=new, sampler=Sampler(), key=jax.random.key(0),
        stop=jnp.asarray(stop, jnp.int32), refuse_nan=refuse,
    )  # fmt: skip
    return [np.asarray(x) for x in (*out[:2], out[2].next)]


@pytest.fixture
def lengths(monkeypatch):
    """How many tokens every slice was asked for."""
    asked = []

    def counted(*args):
        asked.append(int(args[-1]))
        return write_slice(*args)

    monkeypatch.setattr(samples, "write_slice", counted)
    return asked


@pytest.mark.rotating
def test_many_tokens_take_few_slices(lengths):
    new = 2 * SLICE + 6
    tokens, logprobs, after = said([0, 3], new, [-1])
    np.testing.assert_array_equal(tokens, (np.arange(new) + np.array([[0], [3]])) % VOCAB)
    np.testing.assert_allclose(logprobs, -np.log1p((VOCAB - 1) * np.exp(-5.0)), rtol=1e-5)
    assert after.tolist() == [new, new + 3] and lengths == [SLICE, SLICE, 6]


def test_a_slice_ends_when_all_rows_have_stopped_and_rows_that_have_write_nothing(lengths):
    # The first row says 6 at its second token; the second, which stands far ahead, at its sixth.
    tokens, logprobs, after = said([5, 701], 3 * SLICE, [6])
    assert (
        tokens[0, :3].tolist() == [5, 6, -1] and (tokens[0, 2:] == -1).all() and (logprobs[0, 2:] == 0).all()
    )
    assert tokens[1, :8].tolist() == [1, 2, 3, 4, 5, 6, -1, -1] and (tokens[1, 6:] == -1).all()
    assert after.tolist() == [7, 707] and lengths == [SLICE]


@pytest.mark.rotating
@pytest.mark.parametrize("broken", [0, 1, SLICE - 1, SLICE, SLICE + 13])
def test_the_first_token_whose_logits_are_no_numbers_is_named(broken):
    with pytest.raises(Broken) as named:
        said([0, -100], 2 * SLICE, [-1], broken=broken)
    assert str(named.value) == str(broken)


def test_a_row_that_is_done_may_be_no_number():
    tokens, *_ = said([4, -50], 20, [6], broken=7)
    assert tokens[0, :4].tolist() == [4, 5, 6, -1] and (tokens[1] >= 0).any()


@pytest.mark.rotating
def test_slices_write_what_single_tokens_do_in_one_program():
    config = Config(vocab=32, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    model = Model(config, init(config, jax.random.key(5)))
    new, prompts = SLICE + 4, [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2]]
    options = dict(max_new_tokens=new, method=kvjax.method("h2o", budget=6), stop=[])
    write_slice.clear_cache()
    for sampler in (Sampler(), Sampler(1.5, top_k=9, top_p=0.9, min_p=0.01)):
        many = kvjax.generate(model, prompts, sampler=sampler, **options)
        each = kvjax.generate(model, prompts, sampler=sampler, on_token=lambda i, t: None, **options)
        for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(each), strict=True):
            np.testing.assert_array_equal(x, y)
    # Where the host draws, or there are other tokens to stop at, it is the same program.
    kvjax.generate(model, prompts, processors=[RepetitionPenalty(1.2)], **options)
    kvjax.generate(model, prompts, **{**options, "stop": [1, 2, 3]})
    assert write_slice._cache_size() == 1
