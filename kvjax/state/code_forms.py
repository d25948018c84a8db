"""How attention can read codes: which kernel takes them in place, and in which basis.

Codecs answer for themselves; no code looks at the names of their arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.ops.base.dtypes import wide
from kvjax.state.cache import GroupState, Segment, Slots
from kvjax.state.codes import Codec, Codes, bind


class Form(NamedTuple):
    """The memory layout of codes that a kernel can read in place; a codec's `form(width)` returns it.

    "rows": uint8 "codes" and one "scale_zero" per token. "key groups" and "value groups": packed "words" of
    `bits` bits in which `group` tokens are encoded together, with a "scale_zero" for every channel of such
    tokens (keys), or for every `group` channels of each of them (values).
    """

    kind: Literal["rows", "key groups", "value groups"]
    bits: int = 8
    group: int = 1


ROWS = Form("rows")


def is_steady(codec: Codec | None) -> bool:
    """Whether decoded rows may be encoded again without drift; a codec that drifts says `steady = False`."""
    return codec is None or codec.steady


def completed(groups: tuple[GroupState, ...], at: int, state: GroupState) -> GroupState:
    """Complete the state of group `at` with those arrays of its codes that are stored with the group below.

    Codecs with `borrows` have such codes, slot by slot. Both are bodies, which no step writes to, so those
    of `groups` may be older than the state.
    """

    def whole(mine: Array | Codes | None, theirs: Array | Codes | None) -> Array | Codes | None:
        if not _borrows(mine):
            return mine
        assert isinstance(mine, Codes) and isinstance(theirs, Codes)
        return dataclasses.replace(mine, data=theirs.data | mine.data)

    def with_shared(i: int, segment: Segment) -> Segment:
        if not isinstance(segment, Slots) or not (_borrows(segment.k) or _borrows(segment.v)):
            return segment
        below = groups[at - 1].bodies[i]
        assert isinstance(below, Slots)
        k = whole(segment.k, below.k)
        assert k is not None
        return dataclasses.replace(segment, k=k, v=whole(segment.v, below.v))

    return dataclasses.replace(state, bodies=tuple(with_shared(i, s) for i, s in enumerate(state.bodies)))


def borrows(group: GroupState) -> bool:
    """Whether arrays of a group's codes are stored with the group below (`completed`)."""
    return any(isinstance(s, Slots) and (_borrows(s.k) or _borrows(s.v)) for s in group.bodies)


def _borrows(x: Array | Codes | None) -> bool:
    return isinstance(x, Codes) and x.codec.borrows


def form_of(x: Codes) -> Form | None:
    """Find the layout of these codes; None if no kernel reads them."""
    return x.codec.form(x.width)


def is_rows(x: Array | Codes | None) -> bool:
    """Whether a kernel reads rows: unencoded, or 8 bits with a scale and a zero per token."""
    return not isinstance(x, Codes) or form_of(x) == ROWS


def groups_of(k: Array | Codes, v: Array | Codes | None) -> Form | None:
    """Find the layout of keys and values in the same groups of tokens; None for all else."""
    if not isinstance(k, Codes) or not isinstance(v, Codes):
        return None
    keys = form_of(k)
    if keys is None or keys.kind != "key groups":
        return None
    return keys if form_of(v) == keys._replace(kind="value groups") else None


class Span(NamedTuple):
    """Rows x = z M, where `codec` decodes the arrays to z and M is a matrix, or one per KV head."""

    codec: Codec
    matrix: Float[np.ndarray, "Z H"] | Float[Array, "K Z H"]


def factors_of(x: Array | Codes) -> tuple[Array | Codes, Float[Array, "*b S"] | None]:
    """Rows z and their factors s with x = s z; x itself and None if it is not such a product."""
    found = x.codec.factors(x) if isinstance(x, Codes) else None
    return (x, None) if found is None else found


def span_of(codec: Codec, width: int) -> Span:
    """Return a codec's span; the codec itself and the identity matrix if it has no other basis.

    >>> from kvjax.store.affine import Affine
    >>> span_of(Affine(8), 2).matrix.tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return codec.span(width) or Span(codec, np.eye(width))


def times(
    x: Float[Array, "*b Z"], matrix: Float[np.ndarray, "Z H"] | Float[Array, "K Z H"]
) -> Float[Array, "*b H"]:
    """Compute x M in the dtype of x, summed in promote(float32, x).

    If M has a matrix per KV head, x is [B, N, T, Z] with the query heads of a group side by side.
    """
    kind = wide(x)
    if matrix.ndim == 3:
        b, n, t, z = x.shape
        rows = x.astype(kind).reshape(b, len(matrix), n // len(matrix) * t, z)
        found = jnp.matmul(rows, jnp.asarray(matrix, kind)[None], precision=jax.lax.Precision.HIGHEST)
        return found.reshape(b, n, t, -1).astype(x.dtype)
    product = jnp.dot(x.astype(kind), jnp.asarray(matrix, kind), precision=jax.lax.Precision.HIGHEST)
    return product.astype(x.dtype)


class BasisOperands(NamedTuple):
    """Queries, keys and values in the basis of the stored ones; `back` maps outputs to the original basis."""

    q: Array
    k: Array | Codes
    v: Array | Codes | None
    back: Callable[[Array], Array]
    turned: bool


def meet(
    q: Float[Array, "B N T H"], k: Array | Codes, v: Array | Codes | None, layer: int | Array = 0
) -> BasisOperands:
    """Map queries, keys and values into the codes' basis, so that keys and values need not be mapped back.

    Attention of `q` over `k` and `v` here, with its output mapped through `back`, equals that of the given
    ones. Values that are the first channels of the keys (v None) need keys in their own basis, so nothing
    changes then. layer: the layer of k and v that the queries belong to, for bases fitted per layer.
    """
    if v is None:
        return BasisOperands(q, k, v, lambda out: out, False)
    keys, values = _spanned(k, layer), _spanned(v, layer)
    return BasisOperands(
        q if keys is None else times(q, keys.matrix.swapaxes(-1, -2)),
        _bare(k, keys),
        _bare(v, values),
        lambda out: out if values is None else times(out, values.matrix),
        keys is not None or values is not None,
    )


def _spanned(x: Array | Codes, layer: int | Array) -> Span | None:
    """Return the span of codes with another basis, None for all others."""
    if not isinstance(x, Codes):
        return None
    span = span_of(x.codec, x.width)
    if span.codec is x.codec:
        return None
    if not x.codec_arrays:
        return span
    # The word names the codec, which must be in the program's tree, and its fitted arrays hold the matrix.
    mine = bind(x.codec, jax.tree.map(lambda a: a[layer], x.codec_arrays))
    return span._replace(matrix=span_of(mine, x.width).matrix)


def _bare(x: Array | Codes, span: Span | None) -> Array | Codes:
    """Treat the same arrays as codes of z."""
    if span is None:
        return x
    assert isinstance(x, Codes)
    return dataclasses.replace(x, codec=span.codec, width=span.matrix.shape[-2])
