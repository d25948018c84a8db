"""Eigen Attention: keys and values in the main directions of a few texts' keys and values."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.model_kinds import Make
from kvjax.make.latents import LatentFactors, Matrices, only_plain, with_latents
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.grouped_latent import GroupedLatent


@dataclasses.dataclass(frozen=True)
class EigenHeads(Make, FittedWord):
    """W ~ (W U_r) U_r' of every head, by the right singular vectors U of texts' keys and values.

    This is Eigen Attention (arXiv:2408.05646). The rows of all heads of a layer share one basis U of keys;
    every head has its own of values. The rank r is the smallest at which the first r singular values have the
    share `threshold` of the sum of all; of the heads' ranks of values, a layer takes the largest. The
    rewritten model has `GroupedLatent` layers, whose cache holds x W U_r for every head. fitted: "keys" and
    "values" [L, E, E] with the columns of all E = K H channels, the second moments of x W_k and x W_v over
    texts, as for Palu.

    Raises ValueError for a threshold outside (0, 1].
    """

    threshold: float
    fitted: Fitted | None = None

    by = "eigen-attention"

    @property
    def breaks(self) -> Reasons:
        return {
            Fact.GIVEN_WEIGHTS: "rewrites them",
            Fact.STORED_KEYS: "stores latents of keys and values",
        }

    def __post_init__(self):
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be a share in (0, 1], got {self.threshold!r}")

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        width = model.kv_heads * model.head_dim
        for name in ("keys", "values"):
            sizes = (model.layers, width, width)
            check_sizes(self, "moments", "layers, channels, channels", name, sizes)

    def config(self, config: Config) -> Config:
        """Return the config of the rewritten model. Raises ValueError for layers that cannot be rewritten."""
        only_plain(config)
        ranks = (self._ranks(layer, config.head_dim) for layer in range(config.layers))
        return dataclasses.replace(config, mixers=tuple(GroupedLatent(1, k, v) for k, v in ranks))

    def params(self, params: Params, config: Config) -> Params:
        """Build the parameters of the rewritten model; unchanged ones are the same arrays."""
        return with_latents(params, config, self.config(config), self._factors)

    def _factors(self, layer: int, mixer: GroupedLatent, w: Matrices, width: int) -> LatentFactors:
        shared, own = self._moments(layer, width)
        key = directions(shared)[0][:, : mixer.key_rank]
        keys = [key] * len(own)
        values = [directions(x)[0][:, : mixer.value_rank] for x in own]
        found = []
        for name, bases in (("k", keys), ("v", values)):
            heads = np.split(w[name], len(bases), 1)
            down = [head @ basis for head, basis in zip(heads, bases, strict=True)]
            found += [np.concatenate(down, 1), np.stack([basis.T for basis in bases])]
        return LatentFactors(*found)

    def _ranks(self, layer: int, width: int) -> tuple[int, int]:
        """How many directions of keys, and of values, a layer keeps."""
        shared, own = self._moments(layer, width)
        each = [rank(directions(x)[1], self.threshold) for x in own]
        return rank(directions(shared)[1], self.threshold), max(each)

    def _moments(
        self, layer: int, width: int
    ) -> tuple[Float[np.ndarray, "H H"], list[Float[np.ndarray, "H H"]]]:
        """Second moments of the keys of all heads together, and of each head's values."""
        if self.fitted is None:
            raise ValueError(
                f"{self.by} takes the main directions of texts: run `kvjax fit {self.by} --model MODEL --out "
                f"{self.by}.safetensors` and give fitted={self.by}.safetensors"
            )
        keys, values = (
            [
                np.asarray(self.fitted.arrays[name][layer], np.float64)[at : at + width, at : at + width]
                for at in range(0, self.fitted.arrays[name].shape[-1], width)
            ]
            for name in ("keys", "values")
        )
        return np.sum(keys, 0), values


def directions(moments: Float[np.ndarray, "H H"]) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvectors, as columns, and the roots of their eigenvalues, the largest first.

    The largest entry of every column is positive, so that equal moments give equal latents on any machine.
    """
    squares, vectors = np.linalg.eigh(moments)
    vectors = vectors[:, ::-1]
    signs = np.sign(vectors[np.abs(vectors).argmax(0), np.arange(len(vectors))])
    return vectors * signs, np.sqrt(np.maximum(squares[::-1], 0.0))


def rank(singular: Float[np.ndarray, "H"], threshold: float) -> int:
    """Find the smallest number of first singular values that have a share `threshold` of their sum.

    >>> rank(np.array([6.0, 3.0, 1.0]), 0.9), rank(np.array([6.0, 3.0, 1.0]), 0.91)
    (2, 3)
    """
    shares = np.cumsum(singular) / max(singular.sum(), 1e-300)
    return min(int((shares < threshold - 1e-12).sum()) + 1, len(singular))
