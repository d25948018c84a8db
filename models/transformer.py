"""One functional decoder for MHA, GQA and MQA: config, parameters, forward.

The file knows nothing of caches or methods: every layer hands its rotated queries, keys and values to an
`attention` function that the caller supplies, together with a state that only that function understands.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention import Keys, causal_attention
from kvjax.ops.rope import Rope, angles, rotate

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and constants of a decoder; names follow the alphabet of `kvjax`.

    windows: per layer, the number of newest tokens a query sees, or None for all. rope_local: the rotation
    of the windowed layers where it differs. norm_offset: RMSNorm multiplies by (offset + weight).
    norms: "pre" (before attention and MLP), "post" (after, OLMo 2) or "both" (Gemma). qk_norm: "" or
    "head" (RMSNorm over H) or "full" (over all heads together). query_scale: logits multiply by this.
    """

    vocab: int
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    rope: Rope = Rope()
    rope_local: Rope | None = None
    windows: tuple[int | None, ...] = ()
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norms: str = "pre"
    qk_norm: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tied: bool = False
    max_positions: int = 8192
    family: str = "llama"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows names {len(self.windows)} layers, the model has {self.layers}")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
        if self.norms not in ("pre", "post", "both") or self.qk_norm not in ("", "head", "full"):
            raise ValueError(f"unknown norms={self.norms!r} or qk_norm={self.qk_norm!r}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {self.activation!r}")

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> Rope:
        return self.rope if self.window(layer) is None or self.rope_local is None else self.rope_local


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


class Group(NamedTuple):
    """A run of equal layers, stacked: layers `first` .. `first + size - 1`."""

    first: int
    size: int


def plan(config: Config, stacked: bool | None = None) -> tuple[Group, ...]:
    """How the layers are stacked: one by one on CPU, in maximal runs of equal layers elsewhere.

    XLA on CPU copies a layer's slice of stacked weights and caches at every step; on TPU one scan over the
    stack compiles fast and copies nothing. The first two layers always stand apart, because several methods
    leave them alone.
    """
    if stacked is None:
        stacked = jax.default_backend() != "cpu"
    if not stacked:
        return tuple(Group(i, 1) for i in range(config.layers))
    cuts = [0]
    for i in range(1, config.layers):
        if i == 2 or config.window(i) != config.window(i - 1):
            cuts.append(i)
    return tuple(Group(a, b - a) for a, b in zip(cuts, [*cuts[1:], config.layers], strict=True))


def check_groups(config: Config, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """`groups`, unless they miss or repeat a layer or stack layers of different windows: then ValueError."""
    if [i for g in groups for i in range(g.first, g.first + g.size)] != list(range(config.layers)):
        raise ValueError(
            f"groups must name layers 0 to {config.layers - 1} once each and in order, got {groups}"
        )
    for g in groups:
        if len({config.window(g.first + i) for i in range(g.size)}) > 1:
            raise ValueError(f"{g} stacks layers of different windows, which only plan() keeps apart")
    return groups


# --- parameters --------------------------------------------------------------------------------------


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of one layer; weights multiply from the right."""
    d, h, f = config.d_model, config.head_dim, config.d_ff
    n, k = config.heads * h, config.kv_heads * h
    shapes: dict[str, tuple[int, ...]] = {"q": (d, n), "k": (d, k), "v": (d, k), "o": (n, d)}
    shapes |= {"gate": (d, f), "up": (d, f), "down": (f, d)}
    if config.norms in ("pre", "both"):
        shapes |= {"attn_norm": (d,), "mlp_norm": (d,)}
    if config.norms in ("post", "both"):
        shapes |= {"attn_post_norm": (d,), "mlp_post_norm": (d,)}
    if config.qk_norm:
        head = config.qk_norm == "head"
        shapes |= {"q_norm": (h if head else n,), "k_norm": (h if head else k,)}
    if config.qkv_bias:
        shapes |= {"q_bias": (n,), "k_bias": (k,), "v_bias": (k,)}
    if config.o_bias:
        shapes |= {"o_bias": (d,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
    return shapes


def shapes(config: Config, groups: tuple[Group, ...] | None = None) -> Params:
    """The tree of parameter shapes; the layers as one dict per group, stacked on a leading axis."""
    tree: Params = {"embed": (config.vocab, config.d_model), "norm": (config.d_model,)}
    if not config.tied:
        tree["unembed"] = (config.d_model, config.vocab)
    layer = layer_shapes(config)
    tree["layers"] = tuple({n: (g.size, *s) for n, s in layer.items()} for g in groups or plan(config))
    return tree


def init(
    config: Config, key: Array, dtype: Any = jnp.float32, groups: tuple[Group, ...] | None = None
) -> Params:
    """Random parameters: matrices with variance 1 / fan-in, norms at one, biases at zero.

    The same key gives the same numbers whatever the `groups`.
    """
    tree = shapes(config, plan(config, stacked=False))
    layers = tree.pop("layers")
    out = _draw(jax.random.fold_in(key, 0), tuple(tree.items()), config, jnp.dtype(dtype).name)
    layer = tuple(layer_shapes(config).items())
    drawn = [
        _draw(jax.random.fold_in(key, 1 + i), layer, config, jnp.dtype(dtype).name)
        for i in range(len(layers))
    ]
    out["layers"] = tuple(jax.tree.map(lambda w: w[None], p) for p in drawn)
    return regroup(out, check_groups(config, groups or plan(config)))


# Random numbers cost a third of a second per shape to compile, so one flat draw serves all equal layers.
@functools.partial(jax.jit, static_argnames=("sizes", "config", "dtype"))
def _draw(key: Array, sizes: tuple[tuple[str, tuple[int, ...]], ...], config: Config, dtype: str) -> Params:
    count = sum(math.prod(shape) for _, shape in sizes if len(shape) == 2)
    noise, start = jax.random.normal(key, (count,), jnp.float32), 0
    out: Params = {}
    for name, shape in sizes:
        if name.endswith("norm"):
            out[name] = jnp.full(shape, 1.0 - config.norm_offset, dtype)
        elif name.endswith("bias"):
            out[name] = jnp.zeros(shape, dtype)
        else:
            stop = start + math.prod(shape)
            fan_in = shape[1] if name == "embed" else shape[0]
            out[name] = (noise[start:stop].reshape(shape) * fan_in**-0.5).astype(dtype)
            start = stop
    return out


def regroup(params: Params, groups: tuple[Group, ...]) -> Params:
    """The same parameters with their layers stacked as `groups` says."""
    sizes = [next(iter(group.values())).shape[0] for group in params["layers"]]
    if sizes == [g.size for g in groups]:
        return params
    layers = [
        {name: leaf[i] for name, leaf in group.items()}
        for group, size in zip(params["layers"], sizes, strict=True)
        for i in range(size)
    ]
    stacked = tuple(
        {name: jnp.stack([layers[g.first + i][name] for i in range(g.size)]) for name in layers[0]}
        for g in groups
    )
    return {**params, "layers": stacked}


# --- forward -----------------------------------------------------------------------------------------


class Context(NamedTuple):
    """Where the new tokens stand: pos [B, T] (-1 on padding), length [B] tokens so far, these included."""

    pos: Int[Array, "B T"]
    length: Int[Array, "B"]


class Layer(NamedTuple):
    """Which layer is speaking: its group, its index inside it (traced when stacked) and its constants."""

    group: int
    index: int | Array  # pyright: ignore[reportIncompatibleMethodOverride]
    number: int | Array
    window: int | None
    rope: Rope


class Projected(NamedTuple):
    """A layer's projections of its new tokens, before rotation, and the normalised input they came from."""

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T H"]
    hidden: Float[Array, "B T D"]


# (layer, projections, state of the layer's group) -> (out [B, N, T, H], new state, outputs to collect)
Attention = Callable[[Layer, Projected, Any], tuple[Array, Any, Any]]


def rms_norm(x: Array, weight: Array, config: Config) -> Array:
    """RMSNorm (arXiv:1910.07467) in float32: x / rms(x) * (offset + weight)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + config.norm_eps)
    gain = config.norm_offset + weight.astype(jnp.float32)
    return (y * gain.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def _linear(p: Params, name: str, x: Array) -> Array:
    y = x @ p[name]
    bias = p.get(name + "_bias")
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


def project(p: Params, x: Float[Array, "B T D"], config: Config) -> Projected:
    """Queries, keys and values of a layer, QK-normalised where the model does so, not yet rotated."""
    b, t, _ = x.shape

    def heads(name: str, count: int) -> Array:
        y = _linear(p, name, x)
        norm = p.get(name + "_norm")
        if norm is not None and config.qk_norm == "full":
            y = rms_norm(y, norm, config)
        y = y.reshape(b, t, count, config.head_dim)
        if norm is not None and config.qk_norm == "head":
            y = rms_norm(y, norm, config)
        return jnp.swapaxes(y, 1, 2)

    k = heads("k", config.kv_heads)
    return Projected(heads("q", config.heads), k, heads("v", config.kv_heads), x)


def block(
    p: Params, x: Float[Array, "B T D"], config: Config, layer: Layer, attention: Attention, state: Any
) -> tuple[Float[Array, "B T D"], Any, Any]:
    """One decoder layer: x + attention, then x + gated MLP, with the family's norms around them."""
    b, t, _ = x.shape

    def norm(name: str, y: Array) -> Array:
        return rms_norm(y, p[name], config) if name in p else y

    with jax.named_scope("attention"):
        projected = project(p, norm("attn_norm", x), config)
        out, state, collected = attention(layer, projected, state)
        out = jnp.swapaxes(out, 1, 2).reshape(b, t, config.heads * config.head_dim)
        x = x + norm("attn_post_norm", _linear(p, "o", out))
    with jax.named_scope("mlp"):
        y = norm("mlp_norm", x)
        y = ACTIVATIONS[config.activation](_linear(p, "gate", y)) * _linear(p, "up", y)
        x = x + norm("mlp_post_norm", _linear(p, "down", y))
    return x, state, collected


def stack(
    params: Params,
    tokens: Int[Array, "B T"],
    config: Config,
    attention: Attention,
    states: tuple[Any, ...],
) -> tuple[Float[Array, "B T D"], tuple[Any, ...], tuple[Any, ...]]:
    """All layers: returns (normalised hidden, new states, what attention collected), one per group.

    A group's state is carried whole through its layers (never as scan inputs and outputs, which would make a
    second cache); what is collected is stacked on a leading layer axis.
    """
    x = params["embed"][tokens] * jnp.asarray(config.embed_scale, params["embed"].dtype)
    new_states, collected, first = [], [], 0
    for g, (p, state) in enumerate(zip(params["layers"], states, strict=True)):
        size = next(iter(p.values())).shape[0]
        window, rope = config.window(first), config.layer_rope(first)

        def body(carry, inputs, g=g, first=first, window=window, rope=rope):
            x, state = carry
            p, index = inputs
            layer = Layer(g, index, first + index, window, rope)
            x, state, out = block(p, x, config, layer, attention, state)
            return (x, state), out

        if size == 1:
            (x, state), out = body((x, state), (jax.tree.map(lambda w: w[0], p), 0))
            out = jax.tree.map(lambda y: y[None], out)
        else:
            (x, state), out = jax.lax.scan(body, (x, state), (p, jnp.arange(size, dtype=jnp.int32)))
        new_states.append(state)
        collected.append(out)
        first += size
    return rms_norm(x, params["norm"], config), tuple(new_states), tuple(collected)


def unembed(params: Params, x: Float[Array, "*b D"], config: Config) -> Float[Array, "*b V"]:
    """Logits in float32."""
    w = params["embed"].T if config.tied else params["unembed"]
    y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    cap = config.logit_softcap
    return y if cap is None else cap * jnp.tanh(y / cap)


def rotary(layer: Layer, x: Float[Array, "B X S H"], pos: Array, length: Int[Array, "B"]) -> Array:
    """x turned by the layer's RoPE; pos [B, S] or [B, X, S]."""
    pos = pos[:, None] if pos.ndim == 2 else pos
    cos, sin = angles(layer.rope, pos, x.shape[-1], length[:, None, None])
    return rotate(x, cos, sin)


def positions(tokens: Int[Array, "B T"], lengths: Int[Array, "B"], start: Int[Array, "B"]) -> Context:
    """Context of right-padded tokens whose rows continue at `start`."""
    t = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    pos = jnp.where(t < lengths[:, None], start[:, None] + t, -1)
    return Context(pos, start + lengths)


def forward(
    params: Params, tokens: Int[Array, "B T"], config: Config, lengths: Int[Array, "B"] | None = None
) -> Float[Array, "B T V"]:
    """Logits of every token without a cache.

    >>> import jax
    >>> config = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> params = init(config, jax.random.key(0))
    >>> forward(params, jax.numpy.zeros((1, 5), "int32"), config).shape
    (1, 5, 32)
    """
    b, t = tokens.shape
    lengths = jnp.full((b,), t, jnp.int32) if lengths is None else lengths
    context = positions(tokens, lengths, jnp.zeros_like(lengths))

    def attention(layer: Layer, x: Projected, state: None):
        q = rotary(layer, x.q, context.pos, context.length)
        k = rotary(layer, x.k, context.pos, context.length)
        keys = Keys(k, x.v, context.pos[:, None])
        out, _ = causal_attention(
            q,
            keys,
            (),
            context.pos,
            scale=config.scale,
            window=layer.window,
            softcap=config.attention_softcap,
        )
        return out, None, None

    x, _, _ = stack(params, tokens, config, attention, (None,) * len(params["layers"]))
    return unembed(params, x, config)
