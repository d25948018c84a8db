"""No mixer: the layer is its feed-forward alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.models.config import Config
from kvjax.models.layers import Shapes
from kvjax.models.mixer import Mixer


@dataclasses.dataclass(frozen=True)
class Dropped(Mixer):
    """An attention layer left out, with its KV (What Matters in Transformers?, arXiv:2406.15786)."""

    def shapes(self, config: Config) -> Shapes:
        return {}

    def __call__(self, *args: Any) -> Any:
        raise TypeError("a dropped layer mixes nothing and is never called")
