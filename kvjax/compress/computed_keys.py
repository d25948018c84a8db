"""Keys that a layer computes from what it stores, such as latents, as a read ranks them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import over_layers
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Mixer

# The name of the layers' parameters among a group's arrays (`GroupMethod.codec_arrays`).
COMPUTED = "computed keys"


@dataclasses.dataclass(frozen=True)
class ComputedKeys:
    """How a group's layers compute keys from stored slots, whose lists each serve `each` KV heads.

    A read sees the keys of a list's KV heads side by side, as one key, and queries with zeros in the channels
    of the other KV heads. Their products are those of the queries with their own KV head's keys, and a bound
    on the former is one on the latter, so the read needs to know neither latents nor lists.
    """

    mixer: Mixer
    config: Config
    window: int | None
    each: int

    def params(self, params: Params) -> Params:
        """Return those of the layers' parameters that compute queries, keys and values."""
        return {name: x for name, x in params.items() if name[0] in "qkv"}

    def keys(
        self, params: Params, k: Float[Array, "l B X S R"], pos: Int[Array, "l B X S"]
    ) -> Float[Array, "l B X S W"]:
        """Compute the rotated keys of l layers with these parameters, W = `each` times a head's channels."""

        def one(p: Params, k: Float[Array, "B X S R"], pos: Int[Array, "B X S"]) -> Float[Array, "B X S W"]:
            # Values do not matter here, and have the keys' place because a mixer computes both.
            met, _ = self.mixer.met(p, self.config, self.window, k, k, jnp.maximum(pos, 0))
            b, lists, s = pos.shape
            heads = met.reshape(b, lists, self.each, s, -1)
            return jnp.moveaxis(heads, 2, 3).reshape(b, lists, s, -1).astype(k.dtype)

        return over_layers(one, params, k, pos)

    def queries(self, q: Float[Array, "B N T H"], lists: int) -> Float[Array, "B N T W"]:
        """Return queries with zeros in the channels of a list's other KV heads."""
        b, n, t, h = q.shape
        mine = jnp.eye(self.each, dtype=q.dtype)[None, None, :, None, None, :, None]
        heads = q.reshape(b, lists, self.each, -1, t, 1, h) * mine
        return heads.reshape(b, n, t, self.each * h)
