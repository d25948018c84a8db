"""Several texts in one row: each sees itself alone, from position 0 on. And gradients that keep less."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import Config
from kvjax.models.mixers.recurrent import KimiDelta
from kvjax.models.params import init
from kvjax.models.transformer import carrying, forward
from tests.compilation import optimised
from tests.models.architectures import TABLE
from tests.sweep import sweep

CUTS = (0, 7, 8, 20)
PACKED = [
    name for name, row in TABLE.items() if not carrying(row.config) and name not in ("xc-cache", "cepe")
]


_logits = jax.jit(forward, static_argnames="config")


def _square(tokens, config, remat, params):
    return jnp.square(forward(params, tokens, config, remat=remat)).mean()


def model(name):
    config = TABLE[name].config
    tokens = np.random.default_rng(0).integers(0, config.vocab, (2, CUTS[-1])).astype(np.int32)
    return config, init(config, jax.random.key(0)), jnp.asarray(tokens)


@pytest.mark.parametrize("name", sweep(PACKED, "mla", "no rotation", "indexed latents"))
def test_texts_in_one_row_give_what_each_gives_alone(name):
    config, params, tokens = model(name)
    segments = jnp.asarray(np.repeat([3, 4, 5], np.diff(CUTS))[None].repeat(2, 0), jnp.int32)
    together = _logits(params, tokens, config, segments=segments)
    lengths = np.diff(CUTS)
    alone = np.zeros((3, max(lengths)), np.int32)
    for i, (start, stop) in enumerate(zip(CUTS, CUTS[1:], strict=False)):
        alone[i, : stop - start] = tokens[0, start:stop]
    apart = _logits(params, alone, config, lengths=jnp.asarray(lengths, jnp.int32))
    for i, (start, stop) in enumerate(zip(CUTS, CUTS[1:], strict=False)):
        np.testing.assert_allclose(together[0, start:stop], apart[i, : stop - start], atol=2e-5)


def test_all_layers_but_goldfinchs_and_runs_of_positions_keep_texts_of_a_row_apart():
    found = [name for name, row in TABLE.items() if carrying(row.config)]
    assert found == ["goldfinch", "picked blocks", "chunks", "nsa"]


def test_layers_whose_state_goes_on_refuse_texts_that_share_a_row(monkeypatch):
    config, params, tokens = model("kda")
    monkeypatch.setattr(KimiDelta, "in_segments", False)
    with pytest.raises(ValueError, match=r"layers \[0\] carry something.*give each text a row of its own"):
        forward(params, tokens, config, segments=jnp.zeros_like(tokens))


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(["gqa", "kda", "moe"], "gqa"))
def test_what_is_computed_anew_for_a_gradient_is_the_same_gradient(name):
    config, params, tokens = model(name)

    def gradient(remat):
        return jax.jit(jax.grad(partial(_square, tokens, config, remat)))(params)

    for a, b in zip(jax.tree.leaves(gradient(False)), jax.tree.leaves(gradient(True)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.rotating
def test_a_gradient_that_computes_anew_needs_less_memory_for_every_layer():
    tokens = jnp.zeros((1, 128), jnp.int32)

    def needed(layers, remat):
        config = Config(vocab=16, d_model=16, layers=layers, heads=2, kv_heads=1, head_dim=8, d_ff=512)
        params = jax.eval_shape(partial(init, config), jax.random.key(0))
        gradient = jax.jit(jax.grad(partial(_square, tokens, config, remat)))
        return gradient.lower(params).compile().memory_analysis().temp_size_in_bytes

    with optimised(True):
        stored, anew = (needed(5, remat) - needed(2, remat) for remat in (False, True))
    # Without it the inputs of every feed-forward's last product stay, 512 channels per token.
    assert stored > 3 * 128 * 512 * 4 > 2 * anew
