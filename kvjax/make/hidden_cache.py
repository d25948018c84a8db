"""Neurocache: windows in all layers, and in upper ones attention to compressed states of older tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.model_kinds import Make
from kvjax.models.config import Config
from kvjax.models.feed_forward import GatedMLP, NoMLP, mlp_of
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import ATTENTION, mixer_of
from kvjax.models.mixers.hidden_cache import CacheAttention, HiddenCache
from kvjax.models.params import plan, regroup

# Weights with a LoRA: those of cache attention, initialised from the layer's own, and its feed-forward's.
CHANGED = {"q": "cache_q", "o": "cache_o", "gate": "gate", "up": "up", "down": "down"}


@dataclasses.dataclass(frozen=True)
class HiddenStateCache(Make, FittedWord):
    """Layers attend to `window` tokens; from `layer` on also to compressed states of older ones (Neurocache).

    fitted: as `kvjax fit neurocache` writes it, "compress" [1, D, C], "norm" and "norm_bias" [1, C] of the
    states; for the U upper layers the "k" and "v" [U, C, K H] of cache attention; and a LoRA
    (arXiv:2106.09685) of its queries and outputs, which are the layer's own, and of the layer's feed-forward:
    "q_down" [U, D, R], "q_up" [U, R, N H], and so on for "o", "gate", "up" and "down".

    The rewritten model has one more layer, a `HiddenCache` below layer `layer` (a share of all layers, or a
    number), and `CacheAttention` in the layers from there on. top, neighbours, context: how many states a
    token retrieves (`kvjax.ops.attention.nearest_states`). factor: a state has D / factor channels. Raises
    ValueError for a model whose layers are not all plain attention without windows, with a gated MLP.
    """

    window: int
    top: int = 32
    neighbours: int = 2
    context: int = 2
    factor: int = 8
    layer: float | int = 0.75
    fitted: Fitted | None = None
    by = "neurocache"

    @property
    def breaks(self) -> Reasons:
        return {Fact.GIVEN_WEIGHTS: "rewrites them"}

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        assert self.fitted is not None
        width, upper = self.width(model.width), model.layers - self.first(model.layers)
        check_sizes(self, "projection", "one, width, channels", "compress", (1, model.width, width))
        for name in "kv":
            sizes = (upper, width, model.kv_heads * model.head_dim)
            check_sizes(self, "cache attention", "upper layers, channels, heads", name, sizes)
        arrays, heads = self.fitted.arrays, model.heads * model.head_dim
        check_sizes(self, "LoRA", "upper layers, width", "q_down", (upper, model.width))
        sizes = (upper, arrays["q_down"].shape[-1], heads)
        check_sizes(self, "LoRA", "upper layers, rank, heads", "q_up", sizes)

    def first(self, layers: int) -> int:
        """Return the lowest layer with cache attention, of `layers` layers."""
        return int(self.layer * layers) if isinstance(self.layer, float) else self.layer

    def width(self, d_model: int) -> int:
        """Count the channels of a state."""
        return d_model // self.factor

    def config(self, config: Config) -> Config:
        """Return the config of the rewritten model."""
        for i in range(config.layers):
            if (mixer := mixer_of(config, i)) != ATTENTION or config.window(i) is not None:
                raise ValueError(
                    f"windows and cache attention are given to plain attention to all tokens, and layer {i} "
                    f"is {mixer!r} with the window {config.window(i)}"
                )
            if not isinstance(mlp_of(config, i), GatedMLP):
                raise ValueError(
                    f"layer {i} has {mlp_of(config, i)!r}, expected a gated MLP, whose weights are fitted"
                )
        first, width = self.first(config.layers), self.width(config.d_model)
        if first >= config.layers or not width:
            raise ValueError(
                f"layer={self.layer} and factor={self.factor} leave no upper layer of {config.layers} or no "
                f"channel of {config.d_model}: give lower ones"
            )
        inner = mlp_of(config, first).shapes(config)["gate"][1]
        if self.fitted is not None and self.fitted.arrays["gate_up"].shape[-1] != inner:
            raise ValueError(
                f"it was fitted to feed-forwards of {self.fitted.arrays['gate_up'].shape[-1]} channels, and "
                f"this model's have {inner}: run `kvjax fit neurocache` on this model"
            )
        upper = config.layers - first
        keeps = HiddenCache(width, self.window, self.top, self.neighbours, self.context)
        mlps = [mlp_of(config, i) for i in range(config.layers)]
        return dataclasses.replace(
            config,
            layers=config.layers + 1,
            mixers=(*(ATTENTION,) * first, keeps, *(CacheAttention(cache=first, width=width),) * upper),
            mlps=(*mlps[:first], NoMLP(), *mlps[first:]),
            windows=(*(self.window,) * first, None, *(self.window,) * upper),
            rope_local=None,
        )

    def params(self, params: Params, config: Config) -> Params:
        """Build the parameters of the rewritten model."""
        assert self.fitted is not None
        return self.with_arrays({n: jnp.asarray(x) for n, x in self.fitted.arrays.items()}, params, config)

    def with_arrays(self, arrays: dict[str, Array], params: Params, config: Config) -> Params:
        """`params` with these arrays, through which a fit computes gradients."""
        old = regroup(params, plan(config, stacked=False))["layers"]
        first, dtype = self.first(config.layers), params["norm"].dtype
        of_state = {"compress": "compress", "compress_norm": "norm", "compress_norm_bias": "norm_bias"}
        keeps = {name: arrays[given].astype(dtype) for name, given in of_state.items()}
        keeps |= {name: x for name, x in old[first].items() if name in ("attn_norm", "attn_post_norm")}

        def upper(i: int, p: Any) -> Any:
            mine = {name: x[i : i + 1] for name, x in arrays.items() if len(x) == len(old) - first}
            changed = {
                made: (p[own].astype(jnp.float32) + mine[f"{own}_down"] @ mine[f"{own}_up"]).astype(dtype)
                for own, made in CHANGED.items()
            }
            return p | changed | {f"cache_{name}": mine[name].astype(dtype) for name in "kv"}

        layers = (*old[:first], keeps, *(upper(i, p) for i, p in enumerate(old[first:])))
        return regroup({**params, "layers": layers}, plan(self.config(config)))

    def start(self, params: Params, config: Config, rank: int, seed: int) -> dict[str, Array]:
        """Draw the initial arrays: a random projection, the layers' own weights, and zero changes."""
        old = regroup(params, plan(config, stacked=False))["layers"][self.first(config.layers) :]
        width, keys = self.width(config.d_model), jax.random.split(jax.random.key(seed), 1 + len(CHANGED))
        d = config.d_model
        found = {
            "compress": jax.random.truncated_normal(keys[0], -2, 2, (1, d, width)) * d**-0.5,
            "norm": jnp.ones((1, width)),
            "norm_bias": jnp.zeros((1, width)),
        }
        found |= {name: jnp.concatenate([p[name][:, :width] for p in old]) for name in "kv"}
        for key, name in zip(keys[1:], CHANGED, strict=True):
            _, rows, columns = old[0][name].shape
            down = jax.random.uniform(key, (len(old), rows, rank), minval=-1, maxval=1)
            found |= {f"{name}_down": down * rows**-0.5, f"{name}_up": jnp.zeros((len(old), rank, columns))}
        return {name: x.astype(jnp.float32) for name, x in found.items()}
