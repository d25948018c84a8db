"""What every architecture must do: decode what it computes, cost what it says, learn.

What follows from the kind of its memory is in test_memory_classes.py, what methods do with it in
test_methods_on_architectures.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.mixers.attention import mixer_of
from tests.models.architectures import TABLE
from tests.models.conversation import (
    BATCHES,
    RESTING,
    ROOM,
    STEPS,
    TEXTS,
    close,
    equal,
    loss_of,
    model,
    talk,
    whole,
)  # fmt: skip
from tests.models.memory_classes import PLAIN


def marks(name):
    """With several workers, all tests of an architecture run in one and share programs."""
    group = pytest.mark.xdist_group(name)
    return group if name in (*PLAIN, "tpa", "retnet", "gsa") else (group, pytest.mark.rotating)


EVERY = pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in TABLE])


@EVERY
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_of_unequal_lengths_decode_what_the_forward_pass_computes(name, batch):
    done, want = talk(name, batch), whole(name).logits
    for turn in (done.prompt, *done.steps):
        close(turn.logits, want[done.texts, turn.read - 1])
    assert done.programs <= 1


@pytest.mark.rotating
@EVERY
def test_a_token_asked_again_from_the_cache_changes_nothing(name):
    done, want = talk(name), whole(name).logits
    close(done.asked.logits, want[done.texts, done.asked.read - 1])
    equal(done.asked.cache.groups, done.prompt.cache.groups)
    # One row rests while its companions go on.
    before, after = done.steps[RESTING - 1].cache, done.steps[RESTING].cache
    (row,) = np.flatnonzero(~STEPS[RESTING])
    equal(*(jax.tree.map(lambda x: x[:, row], c.groups) for c in (before, after)))


@EVERY
def test_bytes_are_those_of_the_formula(name):
    cache = talk(name).prompt.cache
    assert kvjax.nbytes(cache) == TABLE[name].bytes(3, 16 + ROOM)
    assert len(kvjax.kept_positions(cache)) == TABLE[name].config.layers


@pytest.mark.rotating
@EVERY
def test_the_gradient_reaches_every_parameter_and_is_the_slope_of_the_loss(name):
    gradient, params, config = whole(name).gradient, model(name).params, TABLE[name].config
    # Nothing reaches a layer that reads a context, where there is none.
    idle = [mixer_of(config, i).slots(config) for i in range(config.layers)]
    layers = [
        {n: g for n, g in p.items() if n not in mixer_of(config, i).without_gradient}
        for i, (p, slots) in enumerate(zip(gradient["layers"], idle, strict=True))
        if not (slots and slots.fixed)
    ]
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient | {"layers": layers}))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    if any(mixer_of(config, i).without_gradient for i in range(config.layers)):
        return  # Straight through codes, a gradient is no slope: tests/ops has what it is.
    size = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    losses = []
    for way in (3e-4, -3e-4):
        moved = jax.tree.map(lambda x, g, w=way: x + w * np.float32(1 / size) * g, params, gradient)
        losses.append(float(loss_of(name)(moved)[0][0]))
    assert losses[0] - losses[1] == pytest.approx(6e-4 * size, rel=1e-2)


@pytest.mark.slow
@EVERY
def test_bfloat16_decodes_what_it_computes(name):
    tokens, t = TEXTS[:2, :21], 13
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model(name).params)
    narrow = dataclasses.replace(model(name), params=params)
    exact, wide = (np.asarray(m(tokens), np.float64) for m in (model(name), narrow))
    size = np.sqrt((exact**2).mean())
    # The median token: deep stacks of tiny delta rules carry a rounding of a weight far at single ones.
    assert np.median(np.sqrt(((wide - exact) ** 2).mean(-1))) < 0.1 * size
    _, cache = kvjax.prefill(narrow, tokens[:, :t], room=16)
    for i in range(t, t + 3):
        logits, cache = kvjax.step(narrow, cache, tokens[:, i])
        assert np.sqrt(((np.asarray(logits, np.float64) - wide[:, i]) ** 2).mean()) < 0.05 * size
