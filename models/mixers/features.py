"""Linear attentions by a feature map: phi(q)' phi(k) instead of exp(q' k), normalised."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.recurrent import Recurrent
from kvjax.ops.recurrent.features import (
    RandomSums,
    based_attention,
    normalised,
    orthogonal_projection,
    performer_attention,
)
from kvjax.ops.recurrent.slot_memory import LogSum


@dataclasses.dataclass(frozen=True)
class _ByFeatures(Recurrent, abstract=True):
    """Projections of q, k and v, an attention `attended` by features, and an output matrix."""

    in_segments = True

    def shapes(self, config: Config) -> Shapes:
        return {name: shape for name, shape in super().shapes(config).items() if name != "out_norm"}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.split(*(linear(p, name, x) for name in "qkv"))

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            return self.attended(q, k, v, past, dict(mask=mask, segments=memory.segments))

        out, state, left = memory.recur(layer, step, state)
        return linear(p, "o", out.astype(x.dtype).reshape(*x.shape[:2], -1)), state, left

    def attended(
        self, q: Array, k: Array, v: Array, past: RecurrentState | None, tokens: dict[str, Any]
    ) -> tuple[Float[Array, "B T H V"], RecurrentState]:
        """(o, new state); tokens: an op's arguments that say which tokens count, and the rows' segments."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearAttention(_ByFeatures):
    """The Linear Transformer's layer (arXiv:2006.16236, equations 16 to 20): phi = elu + 1.

    S += phi(k) v', z += phi(k), o = S' phi(q) / z' phi(q); z is one more value channel of S.
    """

    def state(self, config: Config) -> Shapes:
        return {"S": (self.heads, self.key_dim, self.value_dim + 1)}

    def attended(
        self, q: Array, k: Array, v: Array, past: RecurrentState | None, tokens: dict[str, Any]
    ) -> tuple[Float[Array, "B T H V"], RecurrentState]:
        start = None if past is None else past["S"]
        phi_q, phi_k = (jax.nn.elu(x.astype(jnp.float32)) + 1 for x in (q, k))
        out, new = normalised(phi_q, phi_k, v, epsilon=1e-6, initial_state=start, **tokens)
        return out, {"S": new}


@dataclasses.dataclass(frozen=True)
class Based(_ByFeatures):
    """Based's linear attention (arXiv:2402.18668): weights 1 + s + s^2 / 2 with s = q'k / sqrt(key_dim).

    The state has 1 + K + K (K + 1) / 2 rows, so keys are few: 16 in the paper, whose models have layers of
    sliding-window attention beside these (`Config.windows`).
    """

    def state(self, config: Config) -> Shapes:
        features = 1 + self.key_dim + self.key_dim * (self.key_dim + 1) // 2
        return {"S": (self.heads, features, self.value_dim + 1)}

    def attended(
        self, q: Array, k: Array, v: Array, past: RecurrentState | None, tokens: dict[str, Any]
    ) -> tuple[Float[Array, "B T H V"], RecurrentState]:
        start = None if past is None else past["S"]
        out, new = based_attention(q, k, v, initial_state=start, **tokens)
        return out, {"S": new}


@dataclasses.dataclass(frozen=True)
class Performer(_ByFeatures):
    """Performer's layer (arXiv:2009.14794): `features` positive random features of the softmax kernel.

    The features are drawn once, from `seed`, and are not parameters. Deviation: the paper's training redraws
    them from time to time.
    """

    features: int = 64
    seed: Whole = 0

    def check(self, config: Config) -> None:
        if self.groups not in (None, self.heads):
            raise ValueError(f"every head has features of its own: leave groups out, got {self.groups}")

    state_axes = {"means": ("heads",), "top": ("heads",), "total": ("heads",)}

    def state(self, config: Config) -> Shapes:
        sums = (self.heads, self.features)
        return {"means": (*sums, self.value_dim), "top": sums, "total": sums}

    def attended(
        self, q: Array, k: Array, v: Array, past: RecurrentState | None, tokens: dict[str, Any]
    ) -> tuple[Float[Array, "B T H V"], RecurrentState]:
        start = None
        if past is not None:
            # An emptied row has zeros; an empty sum has no largest exponent.
            top = jnp.where(past["total"] > 0, past["top"], -jnp.inf)
            start = RandomSums(past["means"], LogSum(top, past["total"]))
        projection = jnp.asarray(_projection(self.seed, self.features, self.key_dim))
        out, new = performer_attention(q, k, v, projection, initial_state=start, **tokens)
        return out, {"means": new.v, "top": new.weight.top, "total": new.weight.total}


@functools.cache
def _projection(seed: int, features: int, dim: int) -> Any:
    """Draw the directions of the features, once, outside of programs."""
    with jax.ensure_compile_time_eval():
        return np.asarray(orthogonal_projection(jax.random.key(seed), features, dim))
