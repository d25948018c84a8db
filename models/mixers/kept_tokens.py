"""Attention with a growing state that is not keys and values: something is kept of every token.

Keys that later tokens reflect, slots that merge by learned decisions, values minus what the memory predicts:
such state changes with the layer's equation, so no method may evict or encode it. It is stored in the cache
as a state whose parts in `Mixer.grows` have places for tokens, in order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import Mixer, RecurrentState
from kvjax.ops.attention.token_cache import TokenCache
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class KeptTokens(Mixer, abstract=True):
    """The base class of such mixers: query heads, and `groups` key and value heads (None: as many)."""

    heads: int
    key_dim: int
    value_dim: int
    groups: int | None = None
    grows = frozenset({"k", "v"})

    @property
    def key_heads(self) -> int:
        return self.groups or self.heads

    def check(self, config: Config) -> None:
        if self.heads % self.key_heads:
            raise ValueError(f"{self.key_heads} key heads cannot serve {self.heads} query heads evenly")

    def query_heads(self, config: Config) -> int:
        return self.heads

    axes = {
        "q": ("embed", "heads"),
        "k": ("embed", "kv_heads"),
        "v": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, k = config.d_model, self.key_heads
        shapes: Shapes = {"q": (d, self.heads * self.key_dim), "k": (d, k * self.key_dim)}
        return shapes | {"v": (d, k * self.value_dim), "o": (self.heads * self.value_dim, d)}

    state_axes = {"k": (None, "heads"), "v": (None, "heads"), "count": ()}

    def state(self, config: Config) -> Shapes:
        k, v = (0, self.key_heads, self.key_dim), (0, self.key_heads, self.value_dim)
        return {"k": k, "v": v, "count": ()}

    def projected(
        self, p: Params, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T N K"], Float[Array, "B T H K"], Float[Array, "B T H V"]]:
        """Project queries, keys and values, split into heads."""
        q, k, v = (linear(p, name, x).reshape(*x.shape[:2], heads, -1) for name, heads in (
            ("q", self.heads), ("k", self.key_heads), ("v", self.key_heads)
        ))  # fmt: skip
        return q, k, v

    def out(self, p: Params, out: Float[Array, "B T N V"], x: Array) -> Float[Array, "B T D"]:
        return linear(p, "o", out.astype(x.dtype).reshape(*x.shape[:2], -1))


def rotated(config: Config, x: Float[Array, "B T N H"], pos: Array) -> Float[Array, "B T N H"]:
    """Rotate queries or keys by the config's RoPE."""
    cos, sin = angles(config.rope, pos[..., None], x.shape[-1], dtype=wide(x))
    return rotate(x, cos, sin)


def kept_of(past: RecurrentState | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of an op over a `TokenCache`: the kept arrays, and a fixed capacity."""
    if past is None:
        return {}
    before = TokenCache({n: past[n] for n in names}, jnp.zeros_like(past["count"]), past["count"])
    return dict(initial_state=before, capacity=before.capacity)


def state_of(new: TokenCache, dtypes: dict[str, Any]) -> RecurrentState:
    """Return an op's new state, each part in the dtype in which it is stored."""
    return {n: x.astype(dtypes.get(n, x.dtype)) for n, x in new.kept.items()} | {"count": new.count}
