"""Equalises the variance of all channels and all tokens before encoding (KVarN)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.state.codes import Codec
from kvjax.store.wrap import WrappedCodec, Wrapper, joined, part_of

# Bounds of the deviations in one iteration, and of the logarithm of a scale, as in the authors' code.
_DEVIATION, _LOGARITHM = (1e-3, 1e3), (-0.3, 10.0)


@dataclasses.dataclass(frozen=True)
class Balanced(Wrapper):
    """`Balanced("token", 128) >> codec` divides every `tokens` tokens of a head by scales of their tokens.

    x / (a_t b_c) has one variance in all tokens and all channels: `turns` times, a is multiplied by the
    standard deviations of tokens and then b by those of channels, starting at 1, and the pair with the
    smallest ratio of largest to smallest deviation, summed over both, is kept; none is below e^-0.3, as in
    the authors' code (KVarN, arXiv:2606.03458, section 4). of: which of the two is divided by and stored; the
    other one is absorbed by the scales of the inner codec: "token", a, before codes per channel, and
    "channel", b, before codes per token. Stored are "scales" float16, [*b, S] or [*b, S / tokens, H]. Raises
    ValueError for other axes, one token or no turns.

    >>> from kvjax.store.affine import Affine
    >>> codec = Balanced("token", 2) >> Affine(8, axis="channel", group=2)
    >>> codec.decode(codec.encode(jnp.array([[1.0, -2.0], [3.0, 5.0]])), 2, jnp.float32).round(1).tolist()
    [[1.0, -2.0], [3.0, 5.0]]
    """

    of: Literal["token", "channel"]
    tokens: int
    turns: int = 16

    def __post_init__(self):
        if self.of not in ("token", "channel"):
            raise ValueError(f"scales are of each 'token' or of each 'channel', got {self.of!r}")
        if self.tokens < 2:
            raise ValueError(f"a variance is of 2 tokens and more, got {self.tokens!r}")
        if self.turns < 1:
            raise ValueError(f"scales are found in at least 1 turn, got {self.turns!r}")

    def around(self, codec: Codec) -> BalancedCodec:
        return BalancedCodec(self, codec)

    def scales(
        self, x: Float[Array, "*b G T H"]
    ) -> tuple[Float[Array, "*b G T 1"], Float[Array, "*b G 1 H"]]:
        """Compute a and b of groups of tokens."""

        def deviation(rows: Array, axis: int) -> Array:
            return jnp.std(rows, axis, keepdims=True, ddof=1)

        def apart(rows: Array) -> Array:
            one, other = (deviation(rows, axis) for axis in (-1, -2))
            spread = lambda s: s.max((-2, -1)) / jnp.maximum(s.min((-2, -1)), 1e-8)  # noqa: E731
            return spread(one) + spread(other)

        def turn(state: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], None]:
            a, b, *best = state
            a = jnp.clip(a + jnp.log(jnp.clip(deviation(x / jnp.exp(a + b), -1), *_DEVIATION)), *_LOGARITHM)
            b = jnp.clip(b + jnp.log(jnp.clip(deviation(x / jnp.exp(a + b), -2), *_DEVIATION)), *_LOGARITHM)
            found = apart(x / jnp.exp(a + b))
            less = (found <= best[2])[..., None, None]
            kept = (jnp.where(less, a, best[0]), jnp.where(less, b, best[1]), jnp.minimum(found, best[2]))
            return (a, b, *kept), None

        x = jax.lax.stop_gradient(x.astype(jnp.float32))
        a, b = jnp.zeros_like(x[..., :1]), jnp.zeros_like(x[..., :1, :])
        (_, _, a, b, _), _ = jax.lax.scan(turn, (a, b, a, b, apart(x)), None, length=self.turns)
        return jnp.exp(a), jnp.exp(b)


@dataclasses.dataclass(frozen=True)
class BalancedCodec(WrappedCodec):
    """Encodes rows, divided by the scales of their tokens or channels, by `codec`."""

    balanced: Balanced
    codec: Codec

    @property
    def granule(self) -> int:
        return math.lcm(self.balanced.tokens, self.codec.granule)

    @property
    def steady(self) -> bool:
        # Decoded rows have other deviations, so encoding them again gives other codes.
        return False

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        rows = self._granules(x)
        a, b = self.balanced.scales(rows)
        if self.balanced.of == "token":
            scales = a.astype(jnp.float16).reshape(x.shape[:-1])
        else:
            scales = b.astype(jnp.float16)[..., 0, :]
        rest = self.codec.encode(x.astype(jnp.float32) / self._spread(scales, x.shape))
        return joined(balance={"scales": scales}, rest=rest)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        rows = self.codec.decode(part_of(data, "rest"), width, jnp.float32)
        return (rows * self._spread(part_of(data, "balance")["scales"], rows.shape)).astype(dtype)

    def _granules(self, x: Float[Array, "*b S H"]) -> Float[Array, "*b G T H"]:
        tokens = self.balanced.tokens
        if x.shape[-2] % tokens:
            raise ValueError(f"{x.shape[-2]} tokens cannot be encoded {tokens} at a time")
        return x.reshape(*x.shape[:-2], -1, tokens, x.shape[-1])

    def _spread(self, scales: Array, shape: tuple[int, ...]) -> Array:
        """Broadcast scales to rows of a shape."""
        scales = scales.astype(jnp.float32)
        if self.balanced.of == "token":
            return scales[..., None]
        return jnp.repeat(scales, self.balanced.tokens, -2, total_repeat_length=shape[-2])
