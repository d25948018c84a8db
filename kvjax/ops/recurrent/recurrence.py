"""One recurrence for most linear attentions: a state [K, V] per head that decays, erases and writes.

    S~ = Diag(exp g) S
    S  = S~ + k (w v)' - r (S~' p)'
    o  = scale S' q

g is the log decay (one per head, or one per key channel), w the write factor and p the erase vector. What p
reads is subtracted along r, which is k except in RWKV-7. Linear attention, RetNet, GLA, HGRN2, Mamba-2,
DeltaNet, Gated DeltaNet, KDA, GDN-2, Comba (`kvjax.ops.recurrent.linear_attention`), RWKV-6 and RWKV-7
(`kvjax.ops.recurrent.rwkv`) are calls of it. `step` is one token, `scan` a sequence token by token, `chunked`
the same in chunks of matrix products (DeltaNet, arXiv:2406.06484; Kimi Linear, arXiv:2510.26692, eq. 6-9).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_numbers, segment_starts
from kvjax.ops.base.solve import unit_lower_solve

# Tokens per chunk, for decays per channel and for decays per head.
CHUNK_VECTOR, CHUNK_SCALAR = 16, 32
# If log decays sum to no more than this, exp(G) and exp(-G) are both well within the range of float32.
MOST_DECAY = 40.0
# A log decay whose exponential is 0 even in float64; smaller ones, -inf included, count as this one.
FORGETS = -800.0


class RecurrenceInputs(NamedTuple):
    """The inputs of the recurrence for a sequence; the time axis is the second one, H are the value heads.

    log_decay: [B, T, H, K] or [B, T, H, 1], at most 0. erase is None if nothing is erased; removal is the
    key along which erase acts, None if that is k.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H _"]
    erase: Float[Array, "B T H K"] | None
    removal: Float[Array, "B T H K"] | None = None


def tokens_of(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H *c"] | None = None,
    *,
    erase: Float[Array, "B T _ K"] | None = None,
    removal: Float[Array, "B T _ K"] | None = None,
    write: Float[Array, "B T H *d"] | None = None,
    scale: float | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> RecurrenceInputs:
    """Arrange a layer's arguments as inputs of the recurrence, in promote(float32, input).

    Query and key heads are repeated for their groups of value heads. scale: K^-0.5 unless given. Tokens that
    `mask` leaves out change no state. A log decay may be -inf, which forgets everything.
    """
    dtype = wide(v)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    heads = v.shape[2]

    def grouped(x: Array) -> Array:
        return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)

    q = grouped(q) * jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype)
    k = grouped(k)
    g = jnp.zeros((*v.shape[:3], 1), dtype) if log_decay is None else log_decay.astype(dtype)
    g = jnp.maximum(g[..., None] if g.ndim == 3 else g, jnp.asarray(FORGETS, dtype))
    p, r = (None if x is None else grouped(x.astype(dtype)) for x in (erase, removal))
    if write is not None:
        w = write.astype(dtype)
        v = v * (w[..., None] if w.ndim == 3 else w)
    if mask is not None:
        real = mask[:, :, None, None]
        k, v, g = (jnp.where(real, x, jnp.zeros((), dtype)) for x in (k, v, g))
        p, r = (None if x is None else jnp.where(real, x, jnp.zeros((), dtype)) for x in (p, r))
    return RecurrenceInputs(q, k, v, g, p, r)


def substeps(*parts: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B S *rest"]:
    """Interleave [B, T, ...] of each sub-step of every token into one sequence of T * len(parts).

    >>> substeps(jnp.asarray([[1, 2]]), jnp.asarray([[10, 20]])).tolist()
    [[1, 10, 2, 20]]
    """
    b, t, *rest = parts[0].shape
    return jnp.stack(parts, 2).reshape(b, t * len(parts), *rest)


def with_one_key(tokens: RecurrenceInputs) -> RecurrenceInputs:
    """Split tokens with a removal key in two: the first decays and erases, the second writes."""
    q, k, v, g, p, r = tokens
    none = jnp.zeros_like(k)
    p, r = none if p is None else p, k if r is None else r
    return RecurrenceInputs(
        substeps(none, q), substeps(r, k), substeps(jnp.zeros_like(v), v), substeps(g, jnp.zeros_like(g)),
        substeps(p, none),
    )  # fmt: skip


class StackedState(NamedTuple):
    """The state of one layer in the stack of all, `[L, ...]`, which a step updates in place.

    A state sliced out of the stack for a kernel would be copied twice: out, and back after the kernel.
    """

    layers: Float[Array, "L *state"]
    layer: int | Int[Array, ""]

    def own(self) -> Float[Array, "*state"]:
        """Return the state of the one layer."""
        if self.layers.shape[0] == 1:
            return self.layers[0]
        return jax.lax.dynamic_index_in_dim(self.layers, self.layer, keepdims=False)

    def replaced(self, new: Float[Array, "*state"]) -> StackedState:
        """Write this layer's state into the stack."""
        new = new.astype(self.layers.dtype)
        if self.layers.shape[0] == 1:
            return StackedState(new[None], self.layer)
        return StackedState(jax.lax.dynamic_update_index_in_dim(self.layers, new, self.layer, 0), self.layer)

    def like(self, given: Float[Array, "*state"] | StackedState) -> Float[Array, "*state"] | StackedState:
        """Return the state of the one layer, or the stack of all if a stack was given."""
        return self if isinstance(given, StackedState) else self.own()


def stacked(state: Float[Array, "*state"] | StackedState) -> StackedState:
    """Stack a plain state as a stack of one layer."""
    return state if isinstance(state, StackedState) else StackedState(state[None], 0)


def zero_state(tokens: RecurrenceInputs) -> Float[Array, "B H K V"]:
    b, _, h, k = tokens.k.shape
    return jnp.zeros((b, h, k, tokens.v.shape[-1]), tokens.v.dtype)


def step(
    state: Float[Array, "B H K V"], token: RecurrenceInputs
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One token per row, its arrays without the time axis: (output, new state).

    With a = exp g and u = S' (a p): o = S' (a q) + (q'k) v - (q'r) u, S = Diag(a) S + k v' - r u'. Both
    products use the old state, so that no intermediate state is needed.
    """
    return advance(state, token, products(state, token))


def products(state: Float[Array, "B H K V"], token: RecurrenceInputs) -> Float[Array, "B H R V"]:
    """S' (a q) and, where the token erases, S' (a p)."""
    decay = jnp.exp(token.log_decay)
    rows = jnp.stack([decay * x for x in (token.q, token.erase) if x is not None], 2)
    return jnp.einsum("bhrk,bhkv->bhrv", rows, state)


def advance(
    state: Float[Array, "B H K V"], token: RecurrenceInputs, found: Float[Array, "B H R V"]
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """`step`, given its `products`."""
    q, k, v, g, p, r = token
    if p is not None and r is None:
        v = v - found[:, :, 1]
    out = found[:, :, 0] + (q * k).sum(-1, keepdims=True) * v
    new = jnp.exp(g)[..., None] * state + k[..., None] * v[..., None, :]
    if r is not None:
        out = out - (q * r).sum(-1, keepdims=True) * found[:, :, 1]
        new = new - r[..., None] * found[:, :, 1, None]
    return out, new


def scan(
    tokens: RecurrenceInputs,
    state: Float[Array, "B H K V"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Run the recurrence token by token, as defined; where `segments` changes, it starts from zero."""
    state = zero_state(tokens) if state is None else state.astype(tokens.v.dtype)
    fresh = segment_starts(segments, tokens.k.shape[:2])

    def body(s: Array, at: tuple[RecurrenceInputs, Array]) -> tuple[Array, Array]:
        token, new = at
        out, s = step(jnp.where(new[:, None, None, None], jnp.zeros((), s.dtype), s), token)
        return s, out

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, fresh))
    state, out = jax.lax.scan(body, state, by_time)
    return jnp.moveaxis(out, 0, 1), state


def chunked(
    tokens: RecurrenceInputs,
    state: Float[Array, "B H K V"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    chunk: int | None = None,
    least: float | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`scan` in chunks of matrix products, at any length. least: a lower bound of all log decays."""
    state = zero_state(tokens) if state is None else state.astype(tokens.v.dtype)
    b, t = tokens.k.shape[:2]
    size = chunk or (CHUNK_SCALAR if tokens.log_decay.shape[-1] == 1 else CHUNK_VECTOR)
    count = -(-t // size)
    number = segment_numbers(segments, (b, t))

    def cut(x: Array, mode: str = "constant") -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)

    # Padding belongs to the last segment; it decays, erases and writes nothing.
    numbers = cut(number, "edge")
    chunks = jax.tree.map(lambda x: jnp.swapaxes(cut(x), 2, 3), tokens)

    def body(
        carry: tuple[Array, Array], at: tuple[RecurrenceInputs, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        s, segment = carry
        one, number = at
        out, s = _one_chunk(one, s, number, segment, weak=least is not None and size * -least <= MOST_DECAY)
        return (s, number[:, -1]), out

    start = (state, jnp.zeros((b,), jnp.int32))
    (state, _), out = jax.lax.scan(body, start, (chunks, numbers))
    out = jnp.moveaxis(out, 0, 1).swapaxes(2, 3)  # [B, chunks, C, H, V]
    return out.reshape(b, count * size, *out.shape[3:])[:, :t], state


def _one_chunk(
    tokens: RecurrenceInputs, state: Float[Array, "B H K V"], segment: Int[Array, "B C"],
    before: Int[Array, "B"], weak: bool,
) -> tuple[Float[Array, "B H C V"], Float[Array, "B H K V"]]:  # fmt: skip
    """One chunk, [B, H, C, ...]. `before` is the segment that the entering state belongs to.

    weak: whether the log decays of a chunk add up to no less than -MOST_DECAY.
    """
    q, k, v, g, p, r = tokens
    # Decays are split into multiples of 1/16, whose sums are exact, and small remainders. So a strong decay
    # leaves no rounding error in the differences of later weak ones.
    coarse = jax.lax.stop_gradient(jnp.round(g * 16) / 16)
    whole, part = jnp.cumsum(coarse, axis=2), jnp.cumsum(g - coarse, axis=2)
    total = whole + part
    size = g.shape[2]
    lower = jnp.tril(jnp.ones((1, 1, size, size), bool))
    same = (segment[:, :, None] == segment[:, None, :])[:, None]
    entering = jnp.where((segment == before[:, None])[:, None, :, None], jnp.exp(total), 0.0).astype(v.dtype)

    def products(x: Array, key: Array) -> Array:
        """x_i' Diag(exp(G_i - G_j)) key_j for i >= j, in a form that cannot overflow."""
        seen = lower & same
        if weak:
            met = jnp.einsum("bhik,bhjk->bhij", x * jnp.exp(total), key * jnp.exp(-total))
            return jnp.where(seen, met, 0.0)
        if g.shape[-1] > 1:
            return jnp.where(seen, _by_channels(x, key, whole, part), 0.0)
        apart = (whole - jnp.swapaxes(whole, 2, 3)) + (part - jnp.swapaxes(part, 2, 3))
        decay = jnp.where(seen, jnp.exp(jnp.where(seen, apart, 0.0)), 0.0)
        return jnp.einsum("bhik,bhjk->bhij", x, key) * decay

    to_end = (whole[:, :, -1:] - whole) + (part[:, :, -1:] - part)
    ends = (segment == segment[:, -1:])[:, None, :, None]
    kept = jnp.where(ends, jnp.exp(jnp.where(ends, to_end, 0.0)), 0.0).astype(v.dtype)
    written = [(k, v)]  # what is written to the state: keys, and a vector along each
    if p is not None:
        found = jnp.einsum("bhik,bhkv->bhiv", p * entering, state)
        if r is None:
            written = [(k, unit_lower_solve(products(p, k), v - found))]
        else:
            found = found + jnp.einsum("bhij,bhjv->bhiv", jnp.tril(products(p, k), -1), v)
            written.append((r, -unit_lower_solve(products(p, r), found)))
    out = jnp.einsum("bhik,bhkv->bhiv", q * entering, state)
    new = entering[:, :, -1, :, None] * state
    for key, value in written:
        out = out + jnp.einsum("bhij,bhjv->bhiv", products(q, key), value)
        new = new + jnp.einsum("bhik,bhiv->bhkv", key * kept, value)
    return out, new


def _by_channels(
    x: Float[Array, "B H C K"], k: Float[Array, "B H C K"], *decay: Float[Array, "B H C K"]
) -> Float[Array, "B H C C"]:
    """x_i' Diag(exp(G_i - G_j)) k_j for i >= j, and 0 elsewhere, where G is the sum of `decay`.

    For two consecutive blocks of tokens, G_i - G_j = (G_i - M) + (M - G_j), with M the last G of the earlier
    block. Both terms are at most 0, so everything is matrix products over ever larger blocks, without an
    exponential per pair of tokens.
    """
    c = x.shape[2]
    most = 1 << max(c - 1, 0).bit_length()
    fill = ((0, 0), (0, 0), (0, most - c), (0, 0))
    x, k, decay = jnp.pad(x, fill), jnp.pad(k, fill), tuple(jnp.pad(y, fill, mode="edge") for y in decay)
    found = (x * k).sum(-1)[..., None, None]  # [B, H, blocks, size, size]
    for size in (1 << i for i in range(most.bit_length() - 1)):
        pairs = (*x.shape[:2], -1, 2, size, x.shape[-1])
        rows, columns, *parts = (y.reshape(pairs) for y in (x, k, *decay))
        since = sum(y[:, :, :, 1] - y[:, :, :, 0, -1:] for y in parts)
        until = sum(y[:, :, :, 0, -1:] - y[:, :, :, 0] for y in parts)
        rows, columns = rows[:, :, :, 1] * jnp.exp(since), columns[:, :, :, 0] * jnp.exp(until)
        met = jnp.einsum("bhnik,bhnjk->bhnij", rows, columns)
        top = jnp.concatenate([found[:, :, 0::2], jnp.zeros_like(met)], -1)
        found = jnp.concatenate([top, jnp.concatenate([met, found[:, :, 1::2]], -1)], -2)
    return found[:, :, 0, :c, :c]
