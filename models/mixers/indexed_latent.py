"""Latent attention whose queries attend to the tokens that an indexer picks."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.base.ranges import Count, Whole
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, group_norm, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, SlotShape, Take
from kvjax.models.mixers.key_as_value import rotated
from kvjax.models.mixers.latent import Latent
from kvjax.models.picking import Picking


@dataclasses.dataclass(frozen=True)
class IndexedLatent(Latent):
    """MLA with a lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, eq. 1-2; GLM-5).

        k_s = RoPE(LayerNorm(x_s W_k)), q_th = RoPE(c_t W_q)_h, I(t, s) = sum_h (x_t w)_h relu(q_th k_s)

    A query attends to the `index_top` visible tokens with the largest I. c is the latent of queries; the
    first `rope_dim` channels rotate. k, of `index_dim` channels, is stored after the latent and the rotated
    key, before its rotation, so methods move and encode it with them. Among slots that a method left, a query
    picks as many of these. Factors that do not change the order, and the float8 of the authors' kernels, are
    left out. index_source: a lower layer whose tokens this one takes, without an indexer of its own
    (IndexCache, arXiv:2603.12201).
    """

    index_heads: Count = 64
    index_dim: Count = 128
    index_top: Count = 2048
    index_source: Whole | None = None
    picks = True
    without_gradient = frozenset({"index_q", "index_k", "index_k_norm", "index_k_norm_bias", "index_weights"})

    axes = Latent.axes | {
        "index_q": (None, None),
        "index_k": ("embed", None),
        "index_weights": ("embed", None),
    }

    def check(self, config: Config) -> None:
        super().check(config)
        if self.q_rank is None:
            raise ValueError("an indexer reads the latents of queries: give q_rank")
        if self.source is not None:
            raise ValueError("a layer with an indexer has latents of its own: leave source out")
        if self.index_source is None and self.index_dim < self.rope_dim:
            raise ValueError(f"index_dim={self.index_dim}, expected at least the {self.rope_dim} that turn")
        if config.rope.by_length:
            raise ValueError(
                f"an indexer turns its keys by position and cannot follow a rope of kind {config.rope.kind!r}"
            )

    @property
    def takes(self) -> dict[str, Take]:
        own = {} if self.index_source is None else {"picked": Take("picked", self.index_source)}
        return super().takes | own

    def offers(self, config: Config) -> frozenset[str]:
        # What another layer would do with the weights of picked tokens is not defined.
        return super().offers(config) - {"logits"} | {"picked"}

    def check_takes(self, config: Config, layer: int) -> None:
        super().check_takes(config, layer)
        if self.index_source is not None and self.index_source >= layer:
            raise ValueError(
                f"layer {layer} takes the tokens that layer {self.index_source} picks, expected one below"
            )
        if self.index_source is not None and config.window(self.index_source) != config.window(layer):
            raise ValueError(
                f"layer {layer} takes the tokens that layer {self.index_source} picks, and their windows are "
                f"{config.window(layer)} and {config.window(self.index_source)}, expected equal ones"
            )

    def shapes(self, config: Config) -> Shapes:
        if self.index_source is not None:
            return super().shapes(config)
        assert self.q_rank is not None
        d, width = config.d_model, self.index_dim
        return super().shapes(config) | {
            "index_q": (self.q_rank, self.index_heads * width),
            "index_k": (d, width),
            "index_k_norm": (width,),
            "index_k_norm_bias": (width,),
            "index_weights": (d, self.index_heads),
        }

    def slots(self, config: Config) -> SlotShape:
        slots = super().slots(config)
        return slots if self.index_source is not None else slots._replace(key=slots.key + self.index_dim)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        found: list[Array] | None = [] if "picked" in layer.publishes else None
        out, state, left = self.attended(p, x, layer, memory, state, self._picking(p, x, layer, found))
        return out, state, left if not found else left | {"picked": found[0]}

    def _picking(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, found: list[Array] | None
    ) -> Picking:
        if self.index_source is not None:
            return Picking(self.index_top, taken=layer.taken["picked"], found=found)
        turn = partial(rotated, dataclasses.replace(layer.config.rope, rotary_dim=self.rope_dim))
        q = linear(p, "index_q", self.query_latents(p, x)).reshape(*x.shape[:2], self.index_heads, -1)
        at = jnp.maximum(layer.pos, 0)[:, None]
        q = jnp.swapaxes(turn(jnp.swapaxes(q, 1, 2), at), 1, 2)
        weights = linear(p, "index_weights", x)
        return Picking(self.index_top, q, weights, self.rank + self.rope_dim, turn, found=found)

    def stored(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Array | None:
        mine = super().stored(p, x, config)
        if mine is None or self.index_source is not None:
            return mine
        k = group_norm(p, "index_k_norm", linear(p, "index_k", x), 1, 1e-6)
        return jnp.concatenate([mine, k[:, None]], -1)
