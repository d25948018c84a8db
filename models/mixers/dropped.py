"""A layer without a mixer, which has only its feed-forward."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer


@dataclasses.dataclass(frozen=True)
class Dropped(Mixer):
    """No attention layer and no KV in this layer (What Matters in Transformers?, arXiv:2406.15786)."""

    absent = True

    def shapes(self, config: Config) -> Shapes:
        return {}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        raise TypeError("a dropped layer mixes nothing and is never called")
