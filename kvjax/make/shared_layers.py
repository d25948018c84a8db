"""KVSharer: layers that read another layer's keys and values instead of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.model_kinds import Make
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import ATTENTION, Attention, mixer_of
from kvjax.models.params import plan, regroup


@dataclasses.dataclass(frozen=True)
class SharedLayers(Make, FittedWord):
    """Some layers read the slots of a lower one, and neither compute nor store their own (arXiv:2410.18517).

    fitted: "source" [L], as `kvjax fit kvsharer` writes it: for every layer the layer whose slots it reads,
    or its own number.

    The rewritten model has `Attention(source=...)` in those layers. Raises ValueError for a model whose
    layers are not all plain attention without windows, and for a source that is not below or has no slots.
    """

    fitted: Fitted | None = None
    by = "kvsharer"

    @property
    def breaks(self) -> Reasons:
        return {Fact.GIVEN_WEIGHTS: "rewrites them"}

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "map of layers", "layers", "source", (model.layers,))

    def config(self, config: Config) -> Config:
        """Return the config of the rewritten model."""
        for layer in range(config.layers):
            if (mixer := mixer_of(config, layer)) != ATTENTION or config.window(layer) is not None:
                raise ValueError(
                    f"layers share what plain attention to all tokens keeps, and layer {layer} is {mixer!r}"
                    f" with the window {config.window(layer)}"
                )
        sources = self._sources()
        for layer, source in enumerate(sources):
            if not (source == layer or (0 <= source < layer and sources[source] == source)):
                raise ValueError(
                    f"layer {layer} cannot read layer {source}, expected a lower one that keeps its own slots"
                )
        mixers = tuple(Attention() if s == i else Attention(source=s) for i, s in enumerate(sources))
        return dataclasses.replace(config, mixers=mixers)

    def params(self, params: Params, config: Config) -> Params:
        """Build the parameters of the rewritten model: the same arrays without those that are not used."""
        made = self.config(config)
        old = regroup(params, plan(config, stacked=False))["layers"]
        gone = {f"{name}{part}" for name in "kv" for part in ("", "_bias", "_norm")}

        def layer(i: int, p: Any) -> Any:
            return p if self._sources()[i] == i else {n: x for n, x in p.items() if n not in gone}

        layers = tuple(layer(i, p) for i, p in enumerate(old))
        return regroup({**params, "layers": layers}, plan(made))

    def _sources(self) -> list[int]:
        assert self.fitted is not None
        return [int(i) for i in self.fitted.arrays["source"]]
