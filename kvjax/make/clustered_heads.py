"""CHAI: heads of a layer that attend alike are clustered; one attends for all, each has its own values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.model_kinds import Make
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import ATTENTION, mixer_of
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.params import plan, regroup


@dataclasses.dataclass(frozen=True)
class ClusteredHeads(Make, FittedWord):
    """Query heads use the attention of the head that represents their cluster (CHAI, arXiv:2403.08058).

    fitted: "source" [L, N], as `kvjax fit chai` writes it: for every query head the index of the head whose
    attention it uses, which is its own if it represents a cluster.

    The rewritten model has `HeadMaps` in every layer: queries of the representative heads, the keys that
    these attend to, and the values of all heads. Raises ValueError for a model whose layers are not all plain
    attention without windows, and for a source that does not represent itself.
    """

    fitted: Fitted | None = None
    by = "chai"

    @property
    def breaks(self) -> Reasons:
        return {Fact.GIVEN_WEIGHTS: "rewrites them"}

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "clusters", "layers, heads", "source", (model.layers, model.heads))

    def config(self, config: Config) -> Config:
        """Return the config of the rewritten model."""
        for layer in range(config.layers):
            if (mixer := mixer_of(config, layer)) != ATTENTION or config.window(layer) is not None:
                raise ValueError(
                    f"heads of plain attention to all tokens attend for each other, and layer {layer} is "
                    f"{mixer!r} with the window {config.window(layer)}"
                )
        return dataclasses.replace(
            config, mixers=tuple(map(self._maps, range(config.layers), [config] * config.layers))
        )

    def params(self, params: Params, config: Config) -> Params:
        """Build the parameters of the rewritten model, without queries and keys that no head uses."""
        made, group = self.config(config), config.heads // config.kv_heads
        old = regroup(params, plan(config, stacked=False))["layers"]

        def layer(i: int, p: Any) -> Any:
            asks = np.unique(self._source(i))
            heads = {"q": asks, "k": np.unique(asks // group)}
            return {
                n: _columns(x, heads[n[0]], config.head_dim) if n in _BY_HEADS else x for n, x in p.items()
            }

        layers = tuple(layer(i, p) for i, p in enumerate(old))
        return regroup({**params, "layers": layers}, plan(made))

    def _maps(self, layer: int, config: Config) -> HeadMaps:
        source, group = self._source(layer), config.heads // config.kv_heads
        for head, other in enumerate(source):
            if not (0 <= other < config.heads and source[other] == other):
                raise ValueError(
                    f"head {head} of layer {layer} cannot attend as head {other} does, expected one that "
                    "stands for itself"
                )
        asks = np.unique(source)
        keys = np.unique(asks // group)
        return HeadMaps(
            tuple(int(i) for i in np.searchsorted(asks, source)),
            tuple(int(i) for i in np.searchsorted(keys, source // group)),
            tuple(i // group for i in range(config.heads)),
        )

    def _source(self, layer: int) -> np.ndarray:
        assert self.fitted is not None
        return np.asarray(self.fitted.arrays["source"][layer], np.int64)


_BY_HEADS = ("q", "k", "q_bias", "k_bias")


def _columns(x: Array, heads: np.ndarray, width: int) -> Array:
    """Take the columns of these heads in a matrix or a bias [.., heads * width]."""
    split = x.reshape(*x.shape[:-1], -1, width)
    return jnp.take(split, jnp.asarray(heads), axis=-2).reshape(*x.shape[:-1], -1)
