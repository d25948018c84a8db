"""Two layers as one: for every token a direction that both share, and the length of each layer's vector."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from kvjax.grammar import Budget
from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.model_kinds import Stacking
from kvjax.ops.base.dtypes import wide
from kvjax.state.codes import Codec, Codes
from kvjax.store.wrap import joined, part_of


@dataclasses.dataclass(frozen=True)
class LengthAndDirection(Codec):
    """x = size * direction: a row's length, and the unit vector along it, which `codec` may encode.

    "size" [*b, S] is in the dtype of the rows, and so is "direction" [*b, S, H] without a codec. borrows: the
    directions are stored in the codes of the layer below, and are joined with "size" before decoding
    (`kvjax.state.code_forms.completed`).

    >>> data = LengthAndDirection().encode(jnp.array([[3.0, 4.0]]))
    >>> data["size"].tolist(), data["direction"].round(1).tolist()
    ([5.0], [[0.6000000238418579, 0.800000011920929]])
    """

    codec: Codec | None = None
    borrows: bool = False

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        direction, size = parted(x)
        return self.held(direction.astype(x.dtype), size)

    def held(self, direction: Float[Array, "*b S H"], size: Float[Array, "*b S"]) -> dict[str, Array]:
        """Return the arrays to store for rows given as direction and size."""
        sizes = {"size": size.astype(direction.dtype)}
        if self.borrows:
            return sizes
        if self.codec is None:
            return {"direction": direction} | sizes
        return joined(direction=self.codec.encode(direction)) | sizes

    def factors(self, codes: Codes) -> tuple[Array | Codes, Float[Array, "*b S"]]:
        """Return the directions as they are stored, and the lengths that multiply them."""
        data = codes.data
        if self.codec is None:
            return data["direction"], data["size"]
        return dataclasses.replace(codes, data=part_of(data, "direction"), codec=self.codec), data["size"]

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        size = data["size"].astype(wide(data["size"]))
        if self.codec is None:
            direction = data["direction"].astype(size.dtype)
        else:
            direction = self.codec.decode(part_of(data, "direction"), width, size.dtype)
        return (direction * size[..., None]).astype(dtype)


@dataclasses.dataclass(frozen=True)
class MergedLayers(Stacking):
    """Merges the prompts of adjacent layers in pairs, from layer `start` up, at the end of a prefill.

    Per token and KV head, keys and values alike: with unit vectors u and w of the lower and the upper layer
    and W the angle between them, both layers have the direction
        e = sin((1 - t) W) / sin W * u + sin(t W) / sin W * w
    (spherical interpolation, arXiv:2405.14366), and each keeps the length of its own vector. start: a layer's
    number, or a share of the layers. Tokens stay unmerged, in both layers, if the angle of their keys or of
    their values is in the highest part `gamma` of the range of angles in their KV head; at most the share or
    number `most` of them, the largest angles first.

    Raises ValueError if t or gamma are outside [0, 1], or `most` is not a Budget.

    >>> MergedLayers().first(32), MergedLayers(start=3).first(32)
    (16, 3)
    """

    start: int | float = 0.5
    t: float = 0.6
    gamma: float = 0.05
    most: Budget = Budget(0.05)

    @property
    def requires(self) -> Reasons:
        merges = "merges the tokens of two layers one by one"
        whole = (Fact.ALL_TOKENS, Fact.ALL_ATTENDED, Fact.ONE_BY_ONE)
        return dict.fromkeys((*whole, Fact.ROTATED_KEYS, Fact.ONE_CODE, Fact.FIRST_TOKENS), merges)

    @property
    def breaks(self) -> Reasons:
        return {Fact.OWN_SLOTS: "stores two layers as one"}

    def __post_init__(self):
        for name in ("t", "gamma"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} of MergedLayers must lie in [0, 1], got {getattr(self, name)!r}")
        if not isinstance(self.most, Budget):
            raise ValueError(f"most of MergedLayers must be a Budget, got {self.most!r}: write Budget(0.05)")

    def first(self, layers: int) -> int:
        """Return the lowest layer that may be merged, of so many."""
        return int(self.start * layers) if isinstance(self.start, float) else self.start

    def codecs(self, codec: Codec | None) -> tuple[LengthAndDirection, LengthAndDirection]:
        """Return the codecs of merged slots of the lower and upper layer; `codec` encodes the directions."""
        return LengthAndDirection(codec), LengthAndDirection(codec, borrows=True)

    def apart(
        self,
        k: tuple[Float[Array, "*b S H"], Float[Array, "*b S H"]],
        v: tuple[Float[Array, "*b S V"], Float[Array, "*b S V"]],
        live: Bool[Array, "*b S"],
    ) -> Float[Array, "*b S"]:
        """Compute the distance of a token's slots in two layers; -inf for tokens to merge, and empty slots.

        Each angle is scaled linearly from the smallest (0) to the largest (1) of its KV head.
        """
        far = jnp.maximum(*(_standing(angle(parted(a)[0], parted(b)[0]), live) for a, b in (k, v)))
        return jnp.where(live & (far > 1 - self.gamma), far, -jnp.inf)

    def merge(
        self, low: Float[Array, "*b S H"], high: Float[Array, "*b S H"], codec: Codec | None
    ) -> tuple[Codes, Codes]:
        """Merge the same rows of two layers into codes of the lower and the upper one."""
        (u, below), (w, above) = parted(low), parted(high)
        direction = between(u, w, self.t).astype(low.dtype)
        kinds = zip(self.codecs(codec), (below, above), strict=True)
        lower, upper = (Codes(c.held(direction, size), c, low.shape[-1], low.dtype.name) for c, size in kinds)
        return lower, upper


def parted(x: Float[Array, "*b H"]) -> tuple[Float[Array, "*b H"], Float[Array, "*b"]]:
    """(x / |x|, |x|) in promote(float32, x); zeros for a row of zeros, with finite gradients."""
    x = x.astype(wide(x))
    square = (x * x).sum(-1, keepdims=True)
    there = square > 1e-30
    size = jnp.sqrt(jnp.where(there, square, 1.0))
    return jnp.where(there, x / size, 0.0), jnp.where(there, size, 0.0)[..., 0]


def angle(u: Float[Array, "*b H"], w: Float[Array, "*b H"]) -> Float[Array, "*b"]:
    """Compute the angle between unit vectors; exact for small ones too, where the cosine is not."""
    return 2 * jnp.arctan2(parted(u - w)[1], parted(u + w)[1])


def between(u: Float[Array, "*b H"], w: Float[Array, "*b H"], t: float) -> Float[Array, "*b H"]:
    """Compute the unit vector on the arc from u (t = 0) to w (t = 1).

    If the sine of the angle is nearly 0, weights are 1 - t and t. Opposite vectors have no arc, and give one
    of the two, or zeros for t = 1/2; if one vector is zero, the result is the other one.
    """
    full = angle(u, w)
    arc = jnp.sin(full) > 1e-4
    sine = jnp.where(arc, jnp.sin(full), 1.0)
    start, end = (jnp.where(arc, jnp.sin(share * full) / sine, share) for share in (1 - t, t))
    return parted(start[..., None] * u + end[..., None] * w)[0]


def _standing(angles: Float[Array, "*b S"], live: Bool[Array, "*b S"]) -> Float[Array, "*b S"]:
    """Scales angles linearly from the smallest (0) to the largest (1) of each KV head."""
    least = jnp.where(live, angles, jnp.inf).min(-1, keepdims=True)
    span = jnp.where(live, angles, -jnp.inf).max(-1, keepdims=True) - least
    found = jnp.where(span > 0, (angles - least) / jnp.where(span > 0, span, 1.0), 0.0)
    # Makes the largest angles of keys and of values equal, whatever a program's rounding.
    return jnp.where(found > 1 - 1e-6, 1.0, found)
