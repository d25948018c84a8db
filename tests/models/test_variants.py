"""Attention that is weighted otherwise, and layers side by side: against float64 numpy or each other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.exchange import published
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.shared_weights import SharedWeights
from kvjax.models.model import Model
from tests.float64.reference import Decoder, rms_norm, rope, softmax
from tests.models import conversation
from tests.models.architectures import HEADS, MLA, SMALL, TABLE, with_layers

T = 11


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(0, 40, (1, T))


class Reference(Decoder):
    """The decoder whose layers may take their logits from each other."""

    def __init__(self, model):
        self.config = model.config
        self.layers = [
            {n: np.asarray(w[0], np.float64) for n, w in p.items()} for p in model.params["layers"]
        ]
        self.rest = {n: np.asarray(w, np.float64) for n, w in model.params.items() if n != "layers"}

    def turned(self, y, heads):
        y = y.reshape(T, heads, -1).swapaxes(0, 1)
        return rope(y, np.arange(T), self.config.rope.theta)

    def own_logits(self, layer, h):
        """[N, T, S] of normed hidden states."""
        c = self.config
        q, k = self.turned(h @ layer["q"], c.heads), self.turned(h @ layer["k"], c.kv_heads)
        return q @ np.repeat(k, c.heads // c.kv_heads, 0).swapaxes(1, 2) / np.sqrt(c.head_dim)

    def run(self, tokens, logits, weights):
        """logits(layer, h, s of the layer below) and weights(masked logits) are the layers' rules."""
        c, s = self.config, None
        x = self.rest["embed"][tokens]
        hidden = np.triu(np.ones((T, T), bool), 1)
        for layer in self.layers:
            h = rms_norm(x, layer["attn_norm"], c.norm_eps)
            s = logits(layer, h, s)
            v = (h @ layer["v"]).reshape(T, c.kv_heads, -1).swapaxes(0, 1)
            p = weights(np.where(hidden, -np.inf, s))
            x = self.finish(layer, x, p @ np.repeat(v, c.heads // c.kv_heads, 0))
        return self.logits(x)


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5 * np.abs(want).max(), rtol=0)


def test_a_clipped_softmax_is_its_equation(tokens):
    model = conversation.model("clipped softmax")
    reference = Reference(model)
    gamma, zeta = model.config.mixers[0].clip
    clipped = lambda s: np.clip((zeta - gamma) * softmax(s) + gamma, 0, 1)  # noqa: E731
    want = reference.run(tokens[0], lambda layer, h, s: reference.own_logits(layer, h), clipped)
    close(model(tokens)[0], want)
    plain = reference.run(tokens[0], lambda layer, h, s: reference.own_logits(layer, h), softmax)
    assert np.abs(want - plain).max() > 0.01 * np.abs(plain).max()


def test_shared_weights_are_those_of_the_layer_below(tokens):
    reference = Reference(conversation.model("shared attention"))

    def logits(layer, h, s):
        return reference.own_logits(layer, h) if s is None else s

    close(conversation.model("shared attention")(tokens)[0], reference.run(tokens[0], logits, softmax))


def test_aligned_weights_are_a_feed_forward_over_heads_and_a_narrow_product(tokens):
    model = conversation.model("lisa")
    reference, c = Reference(model), model.config

    def logits(layer, h, s):
        if s is None:
            return reference.own_logits(layer, h)
        inner = np.einsum("nts,nm->mts", s, layer["align_up"])
        aligned = np.einsum("mts,mn->nts", inner / (1 + np.exp(-inner)), layer["align_down"])
        q, k = reference.turned(h @ layer["q_low"], c.heads), reference.turned(h @ layer["k_low"], c.kv_heads)
        return aligned + q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(2)

    close(model(tokens)[0], reference.run(tokens[0], logits, softmax))


@pytest.mark.rotating
def test_layers_side_by_side_may_change_places(tokens):
    """Both add what they make of one input, so their order is nothing but the order of a sum."""
    model = conversation.model("recurformer")
    config = model.config
    heads, narrow = HEADS, config.mixers[0]
    swapped = dataclasses.replace(config, mixers=(heads, narrow))
    attention, recurrent = model.params["layers"]
    mlp = ("gate", "up", "down", "mlp_norm")
    mixer, feed = ({n: w for n, w in recurrent.items() if (n in mlp) == own} for own in (False, True))
    other = Model(swapped, model.params | {"layers": (mixer, attention | feed)}, name="swapped")
    close(other(tokens), np.asarray(model(tokens)))
    apart = dataclasses.replace(config, inputs=())
    after = Model(apart, model.params, name="one after the other")
    assert np.abs(np.asarray(after(tokens)) - np.asarray(model(tokens))).max() > 0.01


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("gqa", {}),
        ("yoco", {1: {"slots"}}),
        ("lckv", {2: {"slots"}}),
        ("svformer", {0: {"slots"}}),
        ("resformer", {0: {"values"}}),
        ("swiftkv", {1: {"input"}}),
        ("recurformer", {0: {"input"}}),
        ("goldfinch", {2: {"input", "slots"}}),
        ("shared attention", {0: {"logits"}}),
        ("xc-cache", {0: {"slots"}}),
    ],
)
def test_layers_publish_what_others_take_and_nothing_else(name, names):
    assert published(TABLE[name].config) == names


def test_layer_0_mixes_its_own_values_with_themselves(tokens):
    model = conversation.model("resformer")
    mixing = dataclasses.replace(model.config, mixers=(Attention(value_mix=0.5),) * model.config.layers)
    close(Model(mixing, model.params, name="mixing")(tokens), np.asarray(model(tokens)))


def test_fewer_heads_are_those_heads_of_more(tokens):
    """Heads whose output weights are zero are the same as no heads."""
    few = conversation.model("gqa")
    layers = []
    for p in few.params["layers"]:
        o = np.asarray(p["o"]).copy()
        o[:, 16:] = 0
        layers.append(p | {"o": jnp.asarray(o)})
    masked = Model(SMALL, few.params | {"layers": tuple(layers)}, name="masked")
    cut = {"q": np.s_[:, :, :16], "k": np.s_[:, :, :8], "v": np.s_[:, :, :8], "o": np.s_[:, :16]}
    small = tuple({n: w[cut[n]] if n in cut else w for n, w in p.items()} for p in few.params["layers"])
    config = with_layers(*[Attention(heads=2, kv_heads=1)] * 2, mlps=())
    close(Model(config, few.params | {"layers": small}, name="cut")(tokens), np.asarray(masked(tokens)))


@pytest.mark.parametrize(
    ("mixers", "options", "why"),
    [
        ((Attention(), Attention(heads=3, kv_heads=2)), {}, "3 query heads cannot share 2 KV heads"),
        ((Attention(clip=(0.1, 1.0)), Attention()), {}, "needs gamma <= 0 and zeta >= 1"),
        ((Attention(sink=True), SharedWeights(0)), {}, "layer 0 has no attention weights to share"),
        ((HEADS, SharedWeights(0)), {}, "layer 0 has no attention weights to share"),
        ((Attention(), SharedWeights(1)), {}, "takes the attention weights of layer 1, expected one below"),
        ((Attention(), SharedWeights(0)), {"windows": (None, 4)}, "the same window: theirs are None and 4"),
        ((Attention(), SharedWeights(0, rank=3)), {}, "rank even"),
        ((Attention(), SharedWeights(5)), {}, "names no layer of 0 to 1"),
        ((HEADS, Attention(value_mix=0.5)), {}, "takes the values of layer 0, which offers none"),
        ((MLA, dataclasses.replace(MLA, source=2)), {}, "layer 1 reads layer 2: there are 0 to 1"),
        ((HEADS, Attention(source=0)), {}, "layer 1 reads layer 0, which has no slots of its own to read"),
        ((Attention(), Attention(source=0)), {"windows": (4, 6)}, "would miss some of its window of 6"),
        ((Attention(), Attention(source=0)), {"windows": (4, None)}, "would miss some of its window of all"),
        ((Attention(), Attention()), {"inputs": (None, 1)}, "takes the input of layer 1, expected one below"),
        ((Attention(), Attention(source=0)), {"inputs": (None, 0)}, "and reads another: choose one"),
        ((Attention(), Attention()), {"inputs": (None,)}, "inputs names 1 layers, the model has 2"),
    ],
)
def test_what_does_not_go_together_is_refused(mixers, options, why):
    with pytest.raises(ValueError, match=why):
        with_layers(*mixers, **options)


@pytest.mark.parametrize(
    ("name", "method", "why"),
    [
        ("shared attention", "h2o", "share attention weights slot by slot"),
        ("lisa", "quest", "share attention weights slot by slot"),
        ("clipped softmax", "kvzip", "parts of a clipped softmax do not merge"),
    ],
)
def test_methods_that_would_break_them_are_refused(name, method, why, tokens):
    assert name in TABLE
    with pytest.raises(kvjax.InputError, match=why):
        kvjax.prefill(conversation.model(name), tokens, method=kvjax.method(method, budget=0.5), room=4)
