"""No mixer: the layer is its feed-forward alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.models.config import Config
from kvjax.models.layers import Shapes
from kvjax.ops.rope import Rope


@dataclasses.dataclass(frozen=True)
class Dropped:
    """An attention layer left out, with its KV (What Matters in Transformers?, arXiv:2406.15786)."""

    source = value_source = kv_input = None

    def check(self, config: Config) -> None:
        pass

    def shapes(self, config: Config) -> Shapes:
        return {}

    def slots(self, config: Config) -> None:
        return None

    def rope(self, config: Config, layer: int) -> Rope:
        return Rope(kind="none")

    def state(self, config: Config) -> Shapes:
        return {}

    def __call__(self, *args: Any) -> Any:
        raise TypeError("a dropped layer mixes nothing and is never called")
