"""LoCoCo's merge: a convolution decides how slots of little attention are mixed into a few."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Merge, Observed, Trace, View
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.geometry import unrotated
from kvjax.keep.select import ranks
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class ConvMerge(Merge, FittedWord):
    """The slots of a head with the least attention become mixtures of themselves and of evicted slots.

    The M kept slots with the least accumulated attention, not among the `newest` tokens, and all evicted
    slots are rows x_s = [k_s, v_s] in token order, with k before rotation. With weights w_i =
    softmax_s(relu(conv(x)_i)) from a convolution of W neighbours and M channels, the i-th of the M slots
    becomes (1 - a) x_i + a sum_s w_is x_s (LoCoCo, arXiv:2406.05317, section 3, as in the authors' code), at
    its old position. A head without evictions is not changed. fitted: "conv" [L, W, 2 H, M], "conv_bias" [L,
    M], "share" [L], which is a.
    """

    newest: int = 0
    fitted: Fitted | None = None
    by = "lococo"
    writes = ("k", "v")

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        assert self.fitted is not None
        neighbours = self.fitted.arrays["conv"].shape[1]
        sizes = (model.layers, neighbours, 2 * model.head_dim)
        check_sizes(self, "convolutions", "layers, neighbours, channels", "conv", sizes)

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("sum"))})

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Mix the view's slots `leaving` into `kept` ones; index S means no slot."""
        assert self.fitted is not None
        put = jax.vmap(jax.vmap(lambda x, at: x.at[at].set(True, mode="drop")))
        gone = put(jnp.zeros(view.pos.shape, bool), leaving)
        old = kept & (view.pos < (seen.length - self.newest)[:, None, None])
        arrays = {n: x.astype(jnp.float32) for n, x in seen.fitted[self.fitted.digest].items()}
        raw, v, takes = mixed(
            arrays, unrotated(view, seen), view.v.astype(jnp.float32), view.pos, old, gone,
            view.of(AccumulatedMass(Mass("sum"))),
        )  # fmt: skip
        rope = seen.attention.rope
        cos, sin = angles(rope, jnp.maximum(view.pos, 0), raw.shape[-1], seen.length[:, None, None])
        k = rotate(raw, cos, sin, rope.start)
        return view._replace(
            k=jnp.where(takes[..., None], k.astype(view.k.dtype), view.k),
            v=jnp.where(takes[..., None], v.astype(view.v.dtype), view.v),
        )


def mixed(
    arrays: dict[str, Array],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    pos: Int[Array, "B K S"],
    old: Bool[Array, "B K S"],
    gone: Bool[Array, "B K S"],
    mass: Float[Array, "B K S"],
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"], Bool[Array, "B K S"]]:
    """Unrotated keys and values with the mixtures written in, and a mask of the slots that are mixtures."""
    many = arrays["conv_bias"].shape[-1]
    least = ranks(jnp.where(old, -mass, -jnp.inf)) < many
    takes = least & old & gone.any(-1, keepdims=True)
    rows = takes | gone
    # Rows in token order, then all slots that are not rows.
    order = jnp.argsort(jnp.where(rows, pos, jnp.iinfo(jnp.int32).max), -1, stable=True)
    there = lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 3)), 2)  # noqa: E731
    row, take, x = there(rows), there(takes), there(jnp.concatenate([k, v], -1))
    x = jnp.where(row[..., None], x, 0.0)
    logit = jnp.where(row[..., None], jax.nn.relu(_convolved(arrays, x)), -1e30)
    weight = jax.nn.softmax(logit, 2)
    mixtures = jnp.einsum("bksm,bksc->bkmc", weight, x)
    number = jnp.clip(jnp.cumsum(take, -1, dtype=jnp.int32) - 1, 0)
    mine = jnp.take_along_axis(mixtures, number[..., None], 2)
    new = jnp.where(take[..., None], x + arrays["share"] * (mine - x), x)
    back = jnp.argsort(order, -1)
    new = jnp.take_along_axis(new, back[..., None], 2)
    width = k.shape[-1]
    return (
        jnp.where(takes[..., None], new[..., :width], k),
        jnp.where(takes[..., None], new[..., width:], v),
        takes,
    )


def _convolved(arrays: dict[str, Array], x: Float[Array, "B K S C"]) -> Float[Array, "B K S M"]:
    """Convolve over slots, zero-padded at the ends."""
    b, heads, slots, channels = x.shape
    out = jax.lax.conv_general_dilated(
        x.reshape(b * heads, slots, channels), arrays["conv"], (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"), precision="highest",
    )  # fmt: skip
    return out.reshape(b, heads, slots, -1) + arrays["conv_bias"][None, None, None]
