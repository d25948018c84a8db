"""KVPruner: channels of keys and values whose weights are small are left out of the model."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.model_kinds import Make
from kvjax.make.grouped_low_rank import shared_out
from kvjax.make.latents import LatentFactors, Matrices, matrices, only_plain, with_latents
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.ops.base.rope import partners


@dataclasses.dataclass(frozen=True)
class PrunedChannels(Make, FittedWord):
    """Every head keeps the `keep` share of its channels whose weights are largest (arXiv:2409.11057).

    A channel c of keys has the importance |W_k c| |W_q c|, with the norm of the columns c of all query heads
    that read it, and the two channels that RoPE rotates together stay or leave together, by the mean of
    theirs. A channel of values has the importance |W_v c| |W_o c|. Ties keep the first channel. The rewritten
    model has `GroupedLatent` layers, whose cache holds the channels that stay; biases stay.

    fitted: "perplexity" [L], by how much the perplexity of texts grows if the channels of this layer alone
    leave. With it, layers keep channels in proportion, at least two and at most all, and `keep` is their
    mean; without it, all layers keep equally many.

    Raises ValueError for a share outside (0, 1].
    """

    keep: float
    fitted: Fitted | None = None

    by = "kvpruner"
    # Unfitted, it uses the weights alone.
    fit_first = False

    @property
    def breaks(self) -> Reasons:
        return {
            Fact.GIVEN_WEIGHTS: "rewrites them",
            Fact.STORED_KEYS: "stores some channels of keys and values",
        }

    def __post_init__(self):
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be a share of the channels in (0, 1], got {self.keep!r}")

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "sensitivities", "layers", "perplexity", (model.layers,))

    def config(self, config: Config) -> Config:
        """Return the config of the rewritten model. Raises ValueError for layers that cannot be rewritten."""
        only_plain(config)
        mixers = tuple(GroupedLatent(1, n, n) for n in self.channels(config))
        return dataclasses.replace(config, mixers=mixers)

    def channels(self, config: Config) -> list[int]:
        """How many channels of a head each layer keeps; even numbers, since RoPE rotates pairs."""
        most = config.head_dim // 2
        pairs = max(1, round(self.keep * most))
        if self.fitted is None:
            return [2 * pairs] * config.layers
        grows = np.asarray(self.fitted.arrays["perplexity"], np.float64)
        return [2 * int(n) for n in shared_out(config.layers * pairs, np.maximum(grows, 0.0), most)]

    def params(self, params: Params, config: Config) -> Params:
        """Build the parameters of the rewritten model; unchanged ones are the same arrays."""
        made = self.config(config)

        def factors(layer: int, mixer: GroupedLatent, w: Matrices, width: int) -> LatentFactors:
            found: list[np.ndarray] = []
            for name, stays in zip("kv", _kept(w, made, layer), strict=True):
                heads = w[name].reshape(len(w[name]), len(stays), width)
                down = [heads[:, j, some] for j, some in enumerate(stays)]
                found += [np.concatenate(down, 1), np.eye(width)[stays]]
            return LatentFactors(*found)

        return with_latents(params, config, made, factors)

    def stays(self, p: Params, made: Config, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose the channels [K, R] of keys and of values that stay, given a layer's parameters [1, ...]."""
        return _kept(matrices(p), made, layer)


def _kept(w: Matrices, made: Config, layer: int) -> tuple[Int[np.ndarray, "K R"], Int[np.ndarray, "K R"]]:
    """Choose the most important channels of each head, of keys and of values, in their order."""
    heads, width, mixer = made.kv_heads, made.head_dim, made.mixers[layer]
    assert isinstance(mixer, GroupedLatent)

    def sizes(columns: np.ndarray) -> Float[np.ndarray, "K H"]:
        """Norms of the columns of channels, over all query heads of a KV head."""
        by_head = columns.reshape(len(columns), heads, -1, width)
        return np.sqrt(np.square(by_head).sum((0, 2)))

    other, each = partners(width, made.layer_rope(layer)), np.arange(width)
    keys = [largest(x, other, mixer.key_rank) for x in sizes(w["k"]) * sizes(w["q"])]
    values = [largest(x, each, mixer.value_rank) for x in sizes(w["v"]) * sizes(w["o"].T)]
    return np.array(keys), np.array(values)


def largest(importance: Float[np.ndarray, "H"], other: Int[np.ndarray, "H"], many: int) -> list[int]:
    """Choose the `many` most important channels, each with its partner, in their order.

    >>> largest(np.array([3.0, 1.0, 2.0, 5.0]), np.array([2, 3, 0, 1]), 2)
    [1, 3]
    """
    units = sorted({tuple(sorted({c, int(other[c])})) for c in range(len(other))})
    units.sort(key=lambda unit: -sum(importance[c] for c in unit) / len(unit))
    stays: list[int] = []
    for unit in units:
        if len(stays) + len(unit) <= many:
            stays += unit
    return sorted(stays)
