"""XQuant: layers store their inputs, and compute keys and values from them when they are read."""

from __future__ import annotations

import dataclasses

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.model_kinds import Make
from kvjax.make.latents import only_plain
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.layer_inputs import LayerInputs
from kvjax.models.params import plan, regroup


@dataclasses.dataclass(frozen=True)
class StoredInputs(Make):
    """Plain attention as `LayerInputs`, with the same weights (XQuant, arXiv:2508.10395, section 3)."""

    @property
    def breaks(self) -> Reasons:
        return {
            Fact.GIVEN_WEIGHTS: "rewrites the model",
            Fact.KV_HEADS: "stores one slot of a token for all KV heads",
            Fact.STORED_KEYS: "stores the inputs of layers",
        }

    def config(self, config: Config) -> Config:
        """Return the rewritten model's config. Raises ValueError for layers other than plain attention."""
        only_plain(config, "layers with plain attention can compute keys and values from their inputs")
        return dataclasses.replace(config, mixers=(LayerInputs(),) * config.layers)

    def params(self, params: Params, config: Config) -> Params:
        """Return the parameters of the rewritten model: the same arrays."""
        return regroup(params, plan(self.config(config)))
