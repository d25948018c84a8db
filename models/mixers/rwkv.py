"""RWKV-6 and RWKV-7: time mixes and channel mixes, which also use the previous token.

The channel mix is a mixer and not a feed-forward, because its token shift is a state: a block of RWKV is two
layers, (time mix, NoMLP) and (ChannelMix, NoMLP). The norms around them are the config's; the authors' models
have `centred` norms with `norm_bias`, and `embed_norm`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.mesh.on_mesh import Axes
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, group_norm, l2_norm, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState, Take
from kvjax.ops.recurrent import rwkv as ops
from kvjax.ops.recurrent.convolution import answered, token_shift

# The eps of the norm over a head, as in the authors' models.
EPS = 64e-5

# (the token before each token, past state or None, mask) -> (output, new matrix states)
Mix = Callable[
    [Float[Array, "B T D"], RecurrentState | None, Bool[Array, "B T"]], tuple[Array, RecurrentState]
]


@dataclasses.dataclass(frozen=True)
class Shifted(Mixer, abstract=True):
    """The base class of RWKV's mixers: each token is mixed with the one before it.

    The state holds the input of a row's last token, `shift`, and the layer's output there, `answer`. RWKV
    itself needs `shift` alone. `answer` is returned when the last token is read again: the states before it,
    from which its output was computed, have been overwritten by then.
    """

    in_segments = True

    state_axes = {"shift": (), "answer": ()}

    def state(self, config: Config) -> Shapes:
        return {"shift": (config.d_model,), "answer": (config.d_model,)}

    def run(
        self, mix: Mix, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        """Call `mix` with the previous token of each token of x, and update the state."""

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            shift, answer = (
                jnp.zeros_like(x[:, 0]) if past is None else past[n] for n in ("shift", "answer")
            )
            before, shift = token_shift(x, shift, mask, memory.segments)
            y, new = mix(before, past, mask)
            y, answer = answered(y, answer, mask)
            return y, new | {"shift": shift, "answer": answer}

        return memory.recur(layer, step, state)


def lerp(p: Params, name: str, x: Float[Array, "B T D"], before: Float[Array, "B T D"]) -> Array:
    """Compute x + (before - x) * mix, with one learned share per channel."""
    return x + (before - x) * p[f"mix_{name}"][None, None]


def shares(p: Params, names: str, x: Float[Array, "B T D"], before: Float[Array, "B T D"]) -> list[Array]:
    """Compute mix + tanh(lerp_x A) B for every letter of `names`: shares that depend on the token."""
    low = jnp.tanh(lerp(p, "x", x, before) @ p["mix_down"]).reshape(*x.shape[:2], len(names), -1)
    moved = jnp.einsum("btnr,nrd->nbtd", low, p["mix_up"])
    return [p[f"mix_{n}"][None, None] + m for n, m in zip(names, moved, strict=True)]


def ddlerp(p: Params, names: str, x: Float[Array, "B T D"], before: Float[Array, "B T D"]) -> list[Array]:
    """`lerp` with `shares`: data-dependent linear interpolation (Eagle and Finch, arXiv:2404.05892)."""
    return [x + (before - x) * share for share in shares(p, names, x, before)]


def share_shapes(names: str, width: int, rank: int) -> Shapes:
    mixes: Shapes = {f"mix_{n}": (width,) for n in "x" + names}
    return mixes | {"mix_down": (width, len(names) * rank), "mix_up": (len(names), rank, width)}


def share_axes(names: str) -> dict[str, Axes]:
    mixes: dict[str, Axes] = {f"mix_{n}": (None,) for n in "x" + names}
    return mixes | {"mix_down": ("embed", None), "mix_up": (None, None, None)}


def low_rank(
    p: Params, name: str, x: Float[Array, "B T D"], inner: Callable[[Array], Array] = jnp.tanh
) -> Array:
    """inner(x A) B + b, without b if there is none."""
    return linear(p, f"{name}_up", inner(x @ p[f"{name}_down"]))


def low_rank_shapes(name: str, width: int, rank: int, out: int, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}_down": (width, rank), f"{name}_up": (rank, out)}
    return shapes | ({f"{name}_up_bias": (out,)} if bias else {})


def low_rank_axes(*names: str) -> dict[str, Axes]:
    """Axes of the parameters of `low_rank_shapes`, for outputs that are heads."""
    downs: dict[str, Axes] = {f"{name}_down": ("embed", None) for name in names}
    return downs | {f"{name}_up": (None, "heads") for name in names}


@dataclasses.dataclass(frozen=True)
class TimeMix(Shifted, abstract=True):
    """Heads with a matrix state `S` [head_dim, head_dim], float32, after token shifts."""

    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    state_axes = {"S": ("heads",), "shift": (), "answer": ()}

    def state(self, config: Config) -> Shapes:
        return {"S": (self.heads, self.head_dim, self.head_dim)} | super().state(config)

    axes = {
        "r": ("embed", "heads"),
        "k": ("embed", "kv_heads"),
        "v": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d = config.d_model
        shapes: Shapes = {name: (d, self.width) for name in "rkv"}
        return shapes | {"o": (self.width, d), "out_norm": (self.width,), "out_norm_bias": (self.width,)}

    def split(self, *xs: Float[Array, "B T C"]) -> list[Array]:
        return [x.reshape(*x.shape[:2], self.heads, self.head_dim) for x in xs]


@dataclasses.dataclass(frozen=True)
class Rwkv6(TimeMix):
    """RWKV-6 "Finch" (Peng et al., 2024, arXiv:2404.05892): reads, then decays and writes.

        r, k, v, g, w = ddlerp(x_t, x_(t-1)) W;  S = Diag(e^-e^w) S + k v'
        y = (SiLU(g) * GroupNorm((S_(t-1) + Diag(u) k v')' r)) W_o

    w is a low-rank projection. mix_rank, decay_rank: the ranks of the interpolations and of w. The text of
    the paper was not at hand: norm and gate are placed as in the authors' code.
    """

    mix_rank: int = 32
    decay_rank: int = 64

    axes = (
        TimeMix.axes
        | share_axes("wkvrg")
        | low_rank_axes("decay")
        | {"out_gate": ("embed", "heads"), "bonus": ("heads", None)}
    )

    def shapes(self, config: Config) -> Shapes:
        d = config.d_model
        shapes = super().shapes(config) | share_shapes("wkvrg", d, self.mix_rank)
        shapes |= low_rank_shapes("decay", d, self.decay_rank, self.width)
        return shapes | {"out_gate": (d, self.width), "bonus": (self.heads, self.head_dim)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        def mix(before: Array, past: RecurrentState | None, mask: Array) -> tuple[Array, RecurrentState]:
            w, k, v, r, g = ddlerp(p, "wkvrg", x, before)
            decay = low_rank(p, "decay", w)
            r, k, v, decay = self.split(r @ p["r"], k @ p["k"], v @ p["v"], decay)
            start = None if past is None else past["S"]
            out, new = ops.rwkv6(
                r, k, v, decay, p["bonus"], mask=mask, initial_state=start, segments=memory.segments
            )
            y = group_norm(p, "out_norm", out.reshape(*x.shape[:2], -1), self.heads, EPS).astype(x.dtype)
            return linear(p, "o", y * jax.nn.silu(g @ p["out_gate"])), {"S": new}

        return self.run(mix, x, layer, memory, state)


@dataclasses.dataclass(frozen=True)
class Rwkv7(TimeMix):
    """RWKV-7 "Goose" (Peng et al., 2025, arXiv:2503.14456): a delta rule with an erase key of its own.

        r, k, v, w, a, g from lerp(x_t, x_(t-1));  v = v + (v_0 - v) sigmoid(low rank of v's lerp)
        kk = (k * k_k) / |k * k_k|;  k = k (1 + (a - 1) k_a)
        S = (Diag(e^w) - (a * kk) kk') S + k v',  y = (g * (GroupNorm(S' r) + (r' Diag(r_k) k) v)) W_o

    w, a and g are low-rank projections (a through a sigmoid; w as in `kvjax.ops.recurrent.rwkv`). v_rank: the
    rank of the share of v_0, the values of layer 0; None in layer 0 itself, and without such a share. The
    text of the paper was not at hand: these are the equations of the authors' code, without its starting
    values.
    """

    decay_rank: int = 64
    rate_rank: int = 64
    gate_rank: int = 128
    v_rank: int | None = None

    @property
    def takes(self) -> dict[str, Take]:
        return {} if self.v_rank is None else {"first values": Take("values", 0)}

    def offers(self, config: Config) -> frozenset[str]:
        return frozenset({"values"})

    def check(self, config: Config) -> None:
        if self.v_rank is None:
            return
        first = config.mixers[0]
        if not isinstance(first, Rwkv7) or first.v_rank is not None or first.width != self.width:
            raise ValueError(
                f"v_rank={self.v_rank} adds the values of layer 0, expected a Rwkv7 there with "
                f"{self.width} channels and v_rank=None, got {first}"
            )

    axes = (
        TimeMix.axes
        | {f"mix_{n}": (None,) for n in "rwkvag"}
        | low_rank_axes("decay", "rate", "out_gate", "first")
        | {"key_rate": (None,), "bonus": ("heads", None)}
    )

    def shapes(self, config: Config) -> Shapes:
        d, c = config.d_model, self.width
        shapes = super().shapes(config) | {f"mix_{n}": (d,) for n in "rwkvag"}
        shapes |= low_rank_shapes("decay", d, self.decay_rank, c) | low_rank_shapes(
            "rate", d, self.rate_rank, c
        )
        shapes |= low_rank_shapes("out_gate", d, self.gate_rank, c, bias=False)
        if self.v_rank is not None:
            shapes |= low_rank_shapes("first", d, self.v_rank, c)
        return shapes | {"erase_norm": (c,), "key_rate": (c,), "bonus": (self.heads, self.head_dim)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        def mix(before: Array, past: RecurrentState | None, mask: Array) -> tuple[Array, RecurrentState]:
            r, w, k, v, a, g = (lerp(p, n, x, before) for n in "rwkvag")
            value = v @ p["v"]
            if self.v_rank is not None:
                share = jax.nn.sigmoid(low_rank(p, "first", v, lambda low: low))
                value = value + (layer.taken["first values"] - value) * share
            decay, key = low_rank(p, "decay", w), k @ p["k"]
            rate = jax.nn.sigmoid(low_rank(p, "rate", a, lambda low: low))
            gate = low_rank(p, "out_gate", g, jax.nn.sigmoid)
            kept = key * (1 + (rate - 1) * p["key_rate"][None, None])
            erased = key * p["erase_norm"][None, None]
            r, kept, value, decay, erased, rate = self.split(r @ p["r"], kept, value, decay, erased, rate)
            erased = l2_norm(erased, eps=1e-24)
            start = None if past is None else past["S"]
            out, new = ops.rwkv7(
                r, kept, value, decay, erased, rate, mask=mask, initial_state=start, segments=memory.segments
            )
            y = group_norm(p, "out_norm", out.reshape(*x.shape[:2], -1), self.heads, EPS).astype(x.dtype)
            bonus = (r * kept * p["bonus"][None, None]).sum(-1, keepdims=True) * value
            return linear(p, "o", (y + bonus.reshape(y.shape)) * gate), {"S": new}

        out, new_state, left = self.run(mix, x, layer, memory, state)
        if "values" in layer.publishes:
            left = left | {"values": self._values(p, x, layer, memory, state)}
        return out, new_state, left

    def _values(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> Float[Array, "B T C"]:
        """Compute the values that this layer publishes as layer 0 again, with the token before each token."""

        def step(past: RecurrentState | None, mask: Array) -> tuple[Array, RecurrentState]:
            shift = jnp.zeros_like(x[:, 0]) if past is None else past["shift"]
            return lerp(p, "v", x, token_shift(x, shift, mask, memory.segments)[0]) @ p["v"], past or {}

        return memory.recur(layer, step, state)[0]


@dataclasses.dataclass(frozen=True)
class ChannelMix(Shifted):
    """RWKV's feed-forward, relu(lerp_k(x) W_k)^2 W_v, of width `width` or the config's d_ff.

    gate: whether it is multiplied by sigmoid(lerp_r(x) W_r), as in RWKV-6 (arXiv:2404.05892) and before;
    RWKV-7 (arXiv:2503.14456) has none.
    """

    width: int | None = None
    gate: bool = False

    axes = {
        "mix_k": (None,),
        "mix_r": (None,),
        "k": ("embed", "mlp"),
        "v": ("mlp", "embed"),
        "r": ("embed", None),
    }

    def shapes(self, config: Config) -> Shapes:
        d, f = config.d_model, self.width or config.d_ff
        shapes: Shapes = {"mix_k": (d,), "k": (d, f), "v": (f, d)}
        return shapes | ({"mix_r": (d,), "r": (d, d)} if self.gate else {})

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        def mix(before: Array, past: RecurrentState | None, mask: Array) -> tuple[Array, RecurrentState]:
            y = jnp.square(jax.nn.relu(lerp(p, "k", x, before) @ p["k"])) @ p["v"]
            return y * jax.nn.sigmoid(lerp(p, "r", x, before) @ p["r"]) if self.gate else y, {}

        return self.run(mix, x, layer, memory, state)
