"""Feed-forwards: the gated MLP, and mixtures of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.ranges import Whole
from kvjax.mesh.on_mesh import OnMesh
from kvjax.mesh.per_device import each_device
from kvjax.models.config import Config
from kvjax.models.fingerprint import ADDED
from kvjax.models.layer_part import LayerPart
from kvjax.models.layers import ACTIVATIONS, Params, Shapes, last_axis, linear, rms_norm
from kvjax.ops.base.dtypes import wide


class FeedForward(LayerPart):
    """The interface of feed-forwards, which are frozen dataclasses.

    normalises: it gets the hidden state itself, and applies the norm before it ("mlp_norm") on its own.
    """

    normalises: ClassVar[bool] = False

    def check(self, config: Config) -> None:
        """Raise ValueError if it does not fit the model."""

    def shapes(self, config: Config) -> Shapes:
        """Return the name and shape of every parameter."""
        raise NotImplementedError

    def __call__(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T D"]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class GatedMLP(FeedForward):
    """down(act(x gate) * (x up)) (GLU variants, arXiv:2002.05202), of width `width` or the config's d_ff."""

    width: int | None = None

    axes = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}

    def shapes(self, config: Config) -> Shapes:
        d, f = config.d_model, self.width or config.d_ff
        shapes: Shapes = {"gate": (d, f), "up": (d, f), "down": (f, d)}
        if config.mlp_bias:
            shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
        return shapes

    def __call__(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T D"]:
        act = ACTIVATIONS[config.activation]
        return linear(p, "down", act(self.gated(linear(p, "gate", x))) * linear(p, "up", x))

    def gated(self, gate: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        """Return what the activation is given of the gate's projection: here all of it."""
        return gate


@dataclasses.dataclass(frozen=True)
class MLP(FeedForward):
    """down(act(x up)), without a gate."""

    axes = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}

    def shapes(self, config: Config) -> Shapes:
        d, f = config.d_model, config.d_ff
        shapes: Shapes = {"up": (d, f), "down": (f, d)}
        return shapes | ({"up_bias": (f,), "down_bias": (d,)} if config.mlp_bias else {})

    def __call__(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T D"]:
        return linear(p, "down", ACTIVATIONS[config.activation](linear(p, "up", x)))


@dataclasses.dataclass(frozen=True)
class NoMLP(FeedForward):
    """No feed-forward, for layers with a mixer alone, such as Mamba's."""

    absent = True

    def shapes(self, config: Config) -> Shapes:
        return {}


@dataclasses.dataclass(frozen=True)
class MoE(FeedForward):
    """Mixture of experts: `top` of `experts` gated MLPs of width `width` per token, and a `shared` one.

    scores: "softmax" over all experts (Mixtral, arXiv:2401.04088; Qwen3-MoE; DeepSeek-V2, arXiv:2405.04434)
    or "sigmoid" with a learned bias that affects only the choice (DeepSeek-V3, arXiv:2412.19437, eq. 12-16).
    normalise: chosen weights sum to one. scale: they are then multiplied by this. groups, top_groups: experts
    are in equal groups, and only those of the best `top_groups` can be chosen (by the best expert of a group,
    or for "sigmoid" by the sum of its best two). shared: width of the expert that all tokens use, 0 for none;
    shared_gate: its output is multiplied by sigmoid(x w) (Qwen3-Next). biased: whether there is such a bias;
    None: with "sigmoid" alone. weigh_inputs: weights multiply what experts get, not what they give (Llama 4).

    No token is dropped: tokens are sorted by expert and each expert's rows are one ragged matrix product.
    """

    experts: int
    top: int
    width: int
    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared: Whole = 0
    shared_gate: bool = False
    biased: bool | None = dataclasses.field(default=None, metadata=ADDED)
    weigh_inputs: bool = dataclasses.field(default=False, metadata=ADDED)

    @property
    def has_bias(self) -> bool:
        """Whether a learned bias is part of the choice."""
        return self.scores == "sigmoid" if self.biased is None else self.biased

    def check(self, config: Config) -> None:
        if not 1 <= self.top <= self.experts:
            raise ValueError(f"top={self.top} experts of {self.experts} cannot be chosen")
        if self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"{self.experts} experts in {self.groups} groups, of which {self.top_groups}: expected equal "
                "groups and no more of them than there are"
            )
        if self.top > self.experts // self.groups * self.top_groups:
            raise ValueError(
                f"{self.top_groups} groups of {self.experts // self.groups} hold fewer than {self.top}"
            )
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores must be softmax or sigmoid, got {self.scores!r}")

    axes = {
        "router": ("embed", None),
        "shared_switch": ("embed", None),
        "router_bias": (None,),
        "experts_gate": ("experts", "embed", "mlp"),
        "experts_up": ("experts", "embed", "mlp"),
        "experts_down": ("experts", "mlp", "embed"),
        "shared_gate": ("embed", "mlp"),
        "shared_up": ("embed", "mlp"),
        "shared_down": ("mlp", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, e, f = config.d_model, self.experts, self.width
        shapes: Shapes = {"router": (d, e), "experts_gate": (e, d, f), "experts_up": (e, d, f)}
        shapes["experts_down"] = (e, f, d)
        if self.has_bias:
            shapes["router_bias"] = (e,)
        if self.shared:
            s = self.shared
            shapes |= {"shared_gate": (d, s), "shared_up": (d, s), "shared_down": (s, d)}
        if self.shared_gate:
            shapes["shared_switch"] = (d, 1)
        return shapes

    def __call__(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T D"]:
        act, flat = ACTIVATIONS[config.activation], x.reshape(-1, x.shape[-1])
        chosen, weight = self.route(p, flat)
        out = self._experts(p, flat, chosen, weight, config)
        if self.shared:
            y = (act(flat @ p["shared_gate"]) * (flat @ p["shared_up"])) @ p["shared_down"]
            out = out + (y * jax.nn.sigmoid(flat @ p["shared_switch"]) if self.shared_gate else y)
        return out.reshape(x.shape)

    def route(self, p: Params, x: Float[Array, "R D"]) -> tuple[Int[Array, "R top"], Float[Array, "R top"]]:
        """Choose the experts of every token and their weights, in float32."""
        dtype, score, soft = wide(x), self.score(p, x), self.scores == "softmax"
        choice = score + p["router_bias"].astype(dtype)[None] if self.has_bias else score
        if self.groups > 1:
            per = choice.reshape(-1, self.groups, self.experts // self.groups)
            rank = per.max(-1) if soft else jax.lax.top_k(per, 2)[0].sum(-1)
            _, best = jax.lax.top_k(rank, self.top_groups)
            open_groups = jax.nn.one_hot(best, self.groups, dtype=dtype).sum(1) > 0
            # The published routers fill with zero, which is below every score but not below a biased one.
            choice = jnp.where(
                jnp.repeat(open_groups, self.experts // self.groups, 1), choice, jnp.zeros((), dtype)
            )
        _, chosen = jax.lax.top_k(choice, self.top)
        weight = jnp.take_along_axis(score, chosen, axis=1)
        if self.normalise:
            weight = weight / (weight.sum(-1, keepdims=True) + (0.0 if soft else 1e-20))
        return chosen.astype(jnp.int32), weight * jnp.asarray(self.scale, dtype)

    def score(self, p: Params, x: Float[Array, "R D"]) -> Float[Array, "R E"]:
        """Compute the router's score of every expert for every token, in promote(float32, x)."""
        dtype = wide(x)
        logits = x.astype(dtype) @ p["router"].astype(dtype)
        if "router_shift" in p:
            logits = logits + p["router_shift"].astype(dtype)[None]
        return jax.nn.softmax(logits) if self.scores == "softmax" else jax.nn.sigmoid(logits)

    def balance(self, p: Params, x: Float[Array, "B T D"]) -> Float[Array, ""]:
        """Compute the load balancing loss E / top * sum_e f_e P_e, 1 if all experts are used equally.

        f_e is the share of tokens that choose expert e, P_e its mean share of the scores (Switch
        Transformers, arXiv:2101.03961, eq. 4-6, over the top chosen as in DeepSeek-V2, arXiv:2405.04434,
        eq. 23-25).
        """
        flat = x.reshape(-1, x.shape[-1])
        score = self.score(p, flat)
        share = (score / score.sum(-1, keepdims=True)).mean(0)
        chosen = self.route(p, flat)[0].reshape(-1)
        used = jnp.bincount(chosen, length=self.experts).astype(share.dtype) / flat.shape[0]
        return self.experts / self.top * jnp.sum(used * share)

    def _experts(
        self, p: Params, x: Array, chosen: Array, weight: Array, config: Config
    ) -> Float[Array, "R D"]:
        """sum_e weight_e expert_e(x): rows sorted by expert, one ragged product per matrix."""
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=self.experts).astype(jnp.int32)

        def product(name: str, rows: Array) -> Array:
            y, bias = jax.lax.ragged_dot(rows, p[name], sizes), p.get(name + "_bias")
            return y if bias is None else y + bias[expert[order]]

        rows, by = x[order // self.top], weight.reshape(-1)[order][:, None].astype(x.dtype)
        rows = rows * by if self.weigh_inputs else rows
        out = product("experts_down", self.inner(product, rows, config))
        out = out if self.weigh_inputs else out * by
        return jnp.zeros_like(x).at[order // self.top].add(out)

    def inner(self, product: Callable[[str, Array], Array], rows: Array, config: Config) -> Array:
        """Compute the hidden vectors of experts, of rows that are sorted by expert."""
        return self.gated(product("experts_gate", rows), product("experts_up", rows), config)

    def gated(self, gate: Float[Array, "R F"], up: Float[Array, "R F"], config: Config) -> Array:
        """Compute the hidden vector of an expert: its activated gate times its up projection."""
        return ACTIVATIONS[config.activation](gate) * up


@dataclasses.dataclass(frozen=True)
class ClampedMoE(MoE):
    """Experts of gpt-oss (arXiv:2508.10925), with biases everywhere and SwiGLU between limits.

    h = (clip(u, -limit, limit) + 1) * c sigmoid(alpha c) with c = min(g, limit), for an expert's gate g and
    up projection u. The router's bias is part of its scores, for both the choice and the weights.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def check(self, config: Config) -> None:
        super().check(config)
        if not self.limit > 0:
            raise ValueError(f"limit={self.limit} clamps an expert to nothing: expected a number above 0")

    axes = MoE.axes | {
        "router_shift": (None,),
        "experts_gate_bias": ("experts", "mlp"),
        "experts_up_bias": ("experts", "mlp"),
        "experts_down_bias": ("experts", None),
    }

    def shapes(self, config: Config) -> Shapes:
        e, f = self.experts, self.width
        more: Shapes = {"router_shift": (e,), "experts_gate_bias": (e, f), "experts_up_bias": (e, f)}
        return super().shapes(config) | more | {"experts_down_bias": (e, config.d_model)}

    def inner(self, product: Callable[[str, Array], Array], rows: Array, config: Config) -> Array:
        """Compute the hidden vectors of experts, of rows that are sorted by expert."""
        return self.gated(product("experts_gate", rows), product("experts_up", rows), config)

    def gated(self, gate: Float[Array, "R F"], up: Float[Array, "R F"], config: Config) -> Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclasses.dataclass(frozen=True)
class LatentMoE(MoE):
    """Experts down(act(up x)) without gates, in a latent of width `latent` (None: of x) (Nemotron 3).

    y = (sum_e w_e expert_e(x W_1)) W_2 + down(act(up x)), the shared expert, which sees x itself.
    """

    latent: int | None = None

    axes = MoE.axes | {"latent_down": ("embed", None), "latent_up": (None, "embed")}

    def check(self, config: Config) -> None:
        super().check(config)
        if self.shared_gate or self.weigh_inputs or config.mlp_bias:
            raise ValueError("LatentMoE has no gate of its shared expert, weighed inputs or biases")

    def shapes(self, config: Config) -> Shapes:
        d, e, f, width = config.d_model, self.experts, self.width, self.latent or config.d_model
        shapes = {n: s for n, s in super().shapes(config).items() if n not in ("experts_gate", "shared_gate")}
        shapes |= {"experts_up": (e, width, f), "experts_down": (e, f, width)}
        return shapes | ({"latent_down": (d, width), "latent_up": (width, d)} if self.latent else {})

    def __call__(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T D"]:
        act, flat = ACTIVATIONS[config.activation], x.reshape(-1, x.shape[-1])
        chosen, weight = self.route(p, flat)
        narrow = flat @ p["latent_down"] if self.latent else flat
        out = self._experts(p, narrow, chosen, weight, config)
        out = out @ p["latent_up"] if self.latent else out
        if self.shared:
            out = out + act(flat @ p["shared_up"]) @ p["shared_down"]
        return out.reshape(x.shape)

    def inner(self, product: Callable[[str, Array], Array], rows: Array, config: Config) -> Array:
        return ACTIVATIONS[config.activation](product("experts_up", rows))


@dataclasses.dataclass(frozen=True)
class ExpertsBesideMLP(MoE):
    """A gated MLP of width d_ff and experts beside it, each with norms of its own (Gemma 4).

        y = norm_1(MLP(norm(x))) + norm_2(sum_e w_e expert_e(norm_3(x)))

    The router sees rms(x) * r / sqrt(D), r learned; w_e, which sum to one, multiply by a learned number of
    their expert.
    """

    normalises = True

    axes = MoE.axes | GatedMLP.axes | {"router_scale": (None,), "expert_scale": (None,)}

    def check(self, config: Config) -> None:
        super().check(config)
        if self.shared or self.scores != "softmax" or not config.d_ff:
            raise ValueError("ExpertsBesideMLP has its MLP of width d_ff in place of shared experts")

    def shapes(self, config: Config) -> Shapes:
        d = config.d_model
        own: Shapes = {"router_scale": (d,), "expert_scale": (self.experts,)}
        own |= {name: (d,) for name in ("dense_post_norm", "experts_norm", "experts_post_norm")}
        return GatedMLP().shapes(config) | super().shapes(config) | own

    def __call__(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T D"]:
        def norm(name: str, y: Array) -> Array:
            return rms_norm(y, p[name], config.norm_eps, config.norm_offset)

        dense = norm("dense_post_norm", GatedMLP()(p, norm("mlp_norm", x), config))
        flat = x.reshape(-1, x.shape[-1])
        chosen, weight = self.route(p, self._routed(p, flat, config))
        # A plain gather: indexing refuses parameters of the whole mesh where every device has its own tokens.
        weight = weight * jnp.take(p["expert_scale"].astype(weight.dtype), chosen, axis=0, mode="clip")
        out = self._experts(p, norm("experts_norm", flat), chosen, weight, config)
        return dense + norm("experts_post_norm", out).reshape(x.shape)

    def _routed(self, p: Params, x: Float[Array, "R D"], config: Config) -> Float[Array, "R D"]:
        y = rms_norm(x, None, config.norm_eps)
        return y * last_axis(p["router_scale"], y) * config.d_model**-0.5


def fed(
    mlp: FeedForward, p: Params, x: Float[Array, "B T D"], config: Config, on: OnMesh
) -> Float[Array, "B T D"]:
    """mlp(p, x, config) on a mesh; if rules split tokens, every device sorts its own tokens by expert."""
    names = on.token_axes(x.shape[1])
    if not names or not isinstance(mlp, MoE):
        return mlp(p, x, config)
    apart = on.spec((None, "tokens"), x.shape[:2])
    return each_device(on, lambda x: mlp(p, x, config), [apart], apart, names)(x)


GATED_MLP = GatedMLP()


def mlp_of(config: Config, layer: int) -> FeedForward:
    """Return the feed-forward of a layer."""
    return config.mlps[layer] if config.mlps else GATED_MLP
