"""Mixers and feed-forwards without parameters act; only those that say so are absent."""

import dataclasses

import jax
import numpy as np

import kvjax
from kvjax.models.config import Config
from kvjax.models.feed_forward import GATED_MLP, FeedForward, NoMLP
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.model import Model
from kvjax.models.params import init, layer_shapes
from tests.float64.reference import rms_norm


@dataclasses.dataclass(frozen=True)
class HalfOfInput(Mixer):
    """Half of each token's normalised input."""

    def shapes(self, config):
        return {}

    def __call__(self, p, x, layer, memory, state):
        return x / 2, state, {}


@dataclasses.dataclass(frozen=True)
class Squared(FeedForward):
    def shapes(self, config):
        return {}

    def __call__(self, p, x, config):
        return x * x


def test_a_layer_without_matrices_changes_the_stream():
    c = Config(
        vocab=16, d_model=8, layers=2, heads=2, kv_heads=1, head_dim=4, d_ff=16,
        mixers=(HalfOfInput(), Attention()), mlps=(Squared(), NoMLP()),
    )  # fmt: skip
    tokens, params = np.arange(10)[None], init(c, jax.random.key(0))
    # Attention gives nothing to the stream.
    params["layers"][1]["o"] *= 0
    m = Model(c, params)
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    layer, x = {name: y[0] for name, y in w["layers"][0].items()}, w["embed"][tokens]
    x = x + rms_norm(x, layer["attn_norm"], c.norm_eps) / 2
    x = x + rms_norm(x, layer["mlp_norm"], c.norm_eps) ** 2
    want = rms_norm(x, w["norm"], c.norm_eps) @ w["unembed"]
    logits, cache = kvjax.prefill(m, tokens[:, :9], room=1)
    np.testing.assert_allclose(logits, want[:, 8], atol=1e-5)
    np.testing.assert_allclose(kvjax.step(m, cache, tokens[:, 9])[0], want[:, 9], atol=1e-5)


def test_layers_that_lack_a_part_have_no_norm_before_it():
    c = Config(
        vocab=16, d_model=8, layers=2, heads=2, kv_heads=1, head_dim=4, d_ff=16,
        mixers=(Attention(), Dropped()), mlps=(NoMLP(), GATED_MLP),
    )  # fmt: skip
    assert "mlp_norm" not in layer_shapes(c, 0) and "attn_norm" not in layer_shapes(c, 1)
