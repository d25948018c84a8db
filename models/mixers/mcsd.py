"""MCSD's block: weighted sums of earlier tokens per channel, times a projection of the token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState
from kvjax.ops.base.packed_sequences import segment_offsets
from kvjax.ops.recurrent.hgrn import hgrn


@dataclasses.dataclass(frozen=True)
class SlopeDecay(Mixer):
    """MCSD's block (Yang et al., 2024, arXiv:2406.12230): a slope section and a decay section, side by side.

    Each multiplies a projection x W of the token with a history of another projection, y = x W', per channel
    c:

        slope: sum_{s <= t} w_s y_s / sum_{s <= t} w_s, w_s = e^(-m_c (t - s)), m_c = 2^(-8 (c + 1) / width)
        decay: sum_{s <= t} gamma_c^(t - s) y_s, gamma_c = 1 - 2^(-5 - 7 c / width)

    Both histories are recurrences, so a state is two numbers per channel. Deviation: the text of the paper
    was not at hand, and no code is public. Descriptions of it mention the two sections, their fixed weights
    of short and of long range, the element-wise products and the concatenation; the weights themselves are
    our choice: those that ALiBi (arXiv:2108.12409) gives to equal logits, and the decays of RetNet.
    """

    width: int
    in_segments = True

    axes = {"token": ("embed", None), "history": ("embed", None), "out": (None, "embed")}

    def shapes(self, config: Config) -> Shapes:
        into: Shapes = {name: (config.d_model, 2 * self.width) for name in ("token", "history")}
        return into | {"out": (2 * self.width, config.d_model)}

    state_axes = {"sums": ()}

    def state(self, config: Config) -> Shapes:
        return {"sums": (2 * self.width,)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        slopes, rates = self.rates()
        y = (x @ p["history"]).astype(jnp.float32)
        g = jnp.broadcast_to(jnp.asarray(rates)[None, None], y.shape)
        # A sum of the weights of t + 1 tokens, in closed form.
        place = memory.pos if memory.segments is None else segment_offsets(memory.segments)
        tokens = jnp.maximum(place, 0)[..., None].astype(jnp.float32) + 1
        total = jnp.expm1(-jnp.asarray(slopes)[None, None] * tokens) / np.expm1(-slopes)[None, None]
        total = jnp.concatenate([total, jnp.ones_like(total)], -1)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            out, last = hgrn(
                y,
                g,
                initial_state=None if past is None else past["sums"],
                mask=mask,
                segments=memory.segments,
            )
            return out, {"sums": last}

        out, state, left = memory.recur(layer, step, state)
        out = (out / total).astype(x.dtype) * (x @ p["token"])
        return linear(p, "out", out), state, left

    def rates(self) -> tuple[np.ndarray, np.ndarray]:
        """(m of the slope section, log decays of both sections side by side)."""
        share = np.arange(self.width, dtype=np.float32) / self.width
        slopes = 2.0 ** (-8 * (share + 1 / self.width))
        return slopes.astype(np.float32), np.concatenate([-slopes, np.log1p(-(2.0 ** (-5 - 7 * share)))])
