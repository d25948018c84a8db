"""Per-layer embeddings: a narrow vector of every token for every layer, beside the hidden state."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import Axes
from kvjax.models.config import Config
from kvjax.models.layer_part import LayerPart
from kvjax.models.layers import ACTIVATIONS, Params, Shapes, linear, rms_norm

TOP_AXES: dict[str, Axes] = {
    "layer_embed": ("vocab", None),
    "layer_map": ("embed", None),
    "layer_embed_norm": (None,),
}


class LayerEmbeddings(LayerPart):
    """Adds a layer's vector e of a token after the feed-forward, and multiplies by a learned scale s.

        x = s (x + norm(up(act(x gate) * e)))

    (Gemma 3n and 4). `Config.layer_embeddings` is the width of e, `Config.layer_scales` whether there is s.
    """

    axes = {"embed_gate": ("embed", None), "embed_up": (None, "embed"), "layer_scale": (None,)}

    def shapes(self, config: Config) -> Shapes:
        """Return the name and shape of every parameter of a layer."""
        d, width = config.d_model, config.layer_embeddings
        out: Shapes = {"layer_scale": (1,)} if config.layer_scales else {}
        if width:
            out |= {"embed_gate": (d, width), "embed_up": (width, d), "embed_post_norm": (d,)}
        return out

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], embedded: Float[Array, "B T P"] | None, config: Config
    ) -> Float[Array, "B T D"]:
        x = x if embedded is None else x + self.said(p, x, embedded, config)
        return x * p["layer_scale"][None, None] if "layer_scale" in p else x

    def said(
        self, p: Params, x: Float[Array, "B T D"], embedded: Float[Array, "B T P"], config: Config
    ) -> Float[Array, "B T D"]:
        """Compute what is added to the hidden state: norm(up(act(x gate) * e))."""
        y = ACTIVATIONS[config.activation](linear(p, "embed_gate", x)) * embedded
        return rms_norm(linear(p, "embed_up", y), p["embed_post_norm"], config.norm_eps, config.norm_offset)


LAYER_EMBEDDINGS = LayerEmbeddings()


def top_shapes(config: Config) -> Shapes:
    """Return the name and shape of the parameters outside the layers; empty without such embeddings."""
    width = config.layer_embeddings
    all_layers = config.layers * width
    rows = config.layer_vocab or config.vocab
    tables: Shapes = {"layer_embed": (rows, all_layers), "layer_map": (config.d_model, all_layers)}
    return tables | {"layer_embed_norm": (width,)} if width else {}


def layer_embeddings(
    params: Params, tokens: Array, x: Float[Array, "B T D"], config: Config
) -> Float[Array, "B T L P"]:
    """Return every layer's vectors of tokens: (table[token] sqrt(P) + norm(x W / sqrt(D))) / sqrt(2).

    x: the tokens' embeddings. A token beyond the table has the row of token 0.
    InputError if tokens are given as vectors.
    """
    width = config.layer_embeddings
    if tokens.ndim != 2:
        raise InputError(
            "this model looks up an embedding of every token for every layer, and was given vectors in place "
            "of tokens: use a method without prompts or memory of its own"
        )
    ids: Int[Array, "B T"] = tokens
    if config.layer_vocab:
        ids = jnp.where(ids < config.layer_vocab, ids, 0)
    shape = (*ids.shape, config.layers, width)
    table = params["layer_embed"]
    said = table[ids].reshape(shape) * jnp.asarray(math.sqrt(width), table.dtype)
    seen = (linear(params, "layer_map", x) * config.d_model**-0.5).reshape(shape)
    seen = rms_norm(seen, params["layer_embed_norm"], config.norm_eps, config.norm_offset)
    return (seen + said) * 2**-0.5
