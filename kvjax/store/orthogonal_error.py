"""Moves keys before encoding, so that coding errors lie in directions where a prompt's queries are small."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Carried, Inputs
from kvjax.state.code_forms import Form
from kvjax.state.codes import LEARNT, Codec, CodecArrays, bind
from kvjax.store.wrap import WrappedCodec, Wrapper


@dataclasses.dataclass(frozen=True)
class QueryProducts(Carried):
    """The sum of q q' [B, K, H, H] over all rotated queries of a KV head's group, in float32."""

    def __call__(self, inputs: Inputs) -> Float[Array, "B K H H"]:
        return self.carry(self.start(inputs), inputs)

    def start(self, inputs: Inputs) -> Float[Array, "B K H H"]:
        b, _, _, h = inputs.q.shape
        return jnp.zeros((b, inputs.k_raw.shape[1], h, h), jnp.float32)

    def carry(self, carried: Float[Array, "B K H H"], inputs: Inputs) -> Float[Array, "B K H H"]:
        b, _, _, h = inputs.q.shape
        live = (inputs.pos >= 0)[:, None, :, None]
        q = jnp.where(live, inputs.q.astype(jnp.float32), 0.0).reshape(b, carried.shape[1], -1, h)
        return carried + jnp.einsum("bkth,bktj->bkhj", q, q, precision=jax.lax.Precision.HIGHEST)

    def read(self, carried: Float[Array, "B K H H"]) -> Float[Array, "B K H H"]:
        return carried


@dataclasses.dataclass(frozen=True)
class OrthogonalError(Wrapper):
    """`OrthogonalError() >> codec` encodes runs of channels in turn, each moved by errors of earlier runs.

    With A = 1 + weight Q' Q, where Q is the best approximation of rank `rank` to the queries of a KV head in
    the row's prompts, an error d of a run i moves the later channels r by -A_rr^-1 A_ri d: this minimises
    delta' A delta, for the error delta of the whole key (arXiv:2503.24358, section 3). run: channels of a
    run; the last one may be shorter.

    Raises ValueError for a rank or run below 1, a negative weight, and a codec that encodes
    channels together.

    >>> from kvjax.store.affine import Affine
    >>> codec = OrthogonalError(run=2) >> Affine(2, axis="channel", group=2)
    >>> sorted(codec.encode(jnp.ones((2, 4))))
    ['scale_zero', 'words']
    """

    run: int = 64
    rank: int = 20
    weight: float = 0.001

    learns = frozenset({QueryProducts()})

    def __post_init__(self):
        if not is_whole(self.run) or not is_whole(self.rank) or not self.weight >= 0:
            raise ValueError(f"run and rank are at least 1 and weight is at least 0, got {self!r}")

    def around(self, codec: Codec) -> OrthogonalErrorCodec:
        return OrthogonalErrorCodec(self, codec)

    def moves(self, products: Float[Array, "*b H H"]) -> list[Float[Array, "*b R r"]]:
        """Compute, for every run but the last, the matrix by which its error moves later channels."""
        width = products.shape[-1]
        squares, vectors = jnp.linalg.eigh(products)
        top = vectors[..., -self.rank :] * jnp.sqrt(jnp.maximum(squares[..., None, -self.rank :], 0.0))
        a = self.weight * jnp.einsum("...hr,...jr->...hj", top, top, precision="highest")
        a = a + jnp.broadcast_to(jnp.eye(width, dtype=a.dtype), a.shape)
        found = []
        for start in range(0, width - self.run, self.run):
            end = start + self.run
            solved = jnp.linalg.solve(a[..., end:, end:], a[..., end:, start:end])
            found.append(-jnp.swapaxes(solved, -1, -2))
        return found


@dataclasses.dataclass(frozen=True)
class OrthogonalErrorCodec(WrappedCodec):
    """Encodes moved rows by `codec`, without extra arrays. Without learned products, rows are not moved."""

    word: OrthogonalError
    codec: Codec
    products: Float[Array, "*l B K H H"] | None = None

    def __post_init__(self):
        if getattr(self.codec, "axis", "") != "channel":
            raise ValueError(
                f"an error moves later channels, and {self.codec!r} encodes channels together: use "
                'Affine(bits, axis="channel", group=tokens)'
            )

    def form(self, width: int) -> Form | None:
        return self.codec.form(width)  # type: ignore[attr-defined]

    def bind(self, arrays: CodecArrays) -> Codec:
        (asked,) = self.word.learns
        found = arrays.get(key_of(asked), {}).get(LEARNT)
        return dataclasses.replace(self, codec=bind(self.codec, arrays), products=found)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if self.products is None:
            return self.codec.encode(x)
        x, run = x.astype(jnp.float32), self.word.run
        for i, moves in enumerate(self.word.moves(self.products)):
            own = x[..., i * run : (i + 1) * run]
            error = self.codec.decode(self.codec.encode(own), run, jnp.float32) - own
            rest = x[..., (i + 1) * run :] + jnp.matmul(error, moves, precision="highest")
            x = jnp.concatenate([x[..., : (i + 1) * run], rest], -1)
        return self.codec.encode(x)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        return self.codec.decode(data, width, dtype)
