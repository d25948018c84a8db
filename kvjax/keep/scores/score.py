"""Scores: how much a slot matters. Each class is one equation; `kvjax.keep.algebra` combines them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import Observation, Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.observations.trace import AccumulatedDecayedMass, AccumulatedMass, Surprisal
from kvjax.ops.attention.union import Keys, logits

# How many keys are compared with all others at a time.
STRIP = 256
# As many for redundancy, whose cosines are the largest array of an eviction on a TPU.
FEW_KEYS = 192


@dataclasses.dataclass(frozen=True)
class WindowAttention(Word):
    """Attention that slots receive from the last `last` queries.

    score[j] = reduce_i softmax_j(q_i k_j / sqrt(H)) over i in the window, where the softmax runs over all
    visible slots; the window's own slots score 0 (protect them). A decode step computes the attention of its
    one query anyway, so last=1 costs nothing there.

    Args:
        last: the number of queries in the window.
        reduce: "sum" or "mean" over the window, or "squares", the sum of p^2.
        heads: "mean" over the group of a KV head, "layer" for one score shared by the layer's heads, or
            "logits" for the largest logit in a group before the softmax.
        hide_window: the window's own slots score 0.
        among_older: the softmax leaves the window out.

    >>> len(WindowAttention(32).needs)
    1
    """

    last: int
    reduce: str = "sum"
    heads: str = "mean"
    hide_window: bool = True
    among_older: bool = False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    @property
    def looks_after_a_token(self) -> bool:
        return self.last > 1

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        if self.last == 1 and seen.mass is not None:
            score = seen.mass
        else:
            score = self.window_mass(view, seen)
        if self.heads == "layer":
            score = jnp.broadcast_to(score.mean(1, keepdims=True), score.shape)
        return score

    def window_mass(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        _, q_pos = seen.of(Queries(self.last))
        s = window_logits(view, seen, self.last)
        in_window = view.pos >= (seen.length - self.last)[:, None, None]
        if self.heads == "logits":
            s = s.max(2, keepdims=True)
        if self.among_older:
            s = jnp.where(in_window[:, :, None, None], -jnp.inf, s)
        p = probabilities(s)
        score = (p * p if self.reduce == "squares" else p).sum(3).mean(2)
        if self.reduce == "mean":
            score = score / jnp.maximum((q_pos >= 0).sum(-1), 1).astype(jnp.float32)[:, None, None]
        return jnp.where(in_window, 0.0, score) if self.hide_window else score


def window_logits(view: View, seen: Observed, last: int) -> Float[Array, "B K G W S"]:
    """Compute the logits of a row's last W queries, -inf where a slot is hidden or a query is missing."""
    q, q_pos = seen.of(Queries(last))
    keys = Keys(view.k, view.v, view.pos, view.bias)
    return logits(q, keys, q_pos, scale=seen.attention.scale, softcap=seen.attention.softcap)


def probabilities(s: Float[Array, "*b S"]) -> Float[Array, "*b S"]:
    """Softmax of logits; 0 for a query that sees no slot."""
    top = s.max(-1, keepdims=True)
    w = jnp.exp(s - jnp.where(top == -jnp.inf, 0.0, top))
    return w / jnp.maximum(w.sum(-1, keepdims=True), 1e-30)


def attention_to_older(view: View, seen: Observed, last: int) -> Float[Array, "B K G W S"]:
    """Attention of the last W queries to the tokens before them; the softmax runs over all visible slots."""
    older = view.pos < (seen.length - last)[:, None, None]
    return jnp.where(older[:, :, None, None], probabilities(window_logits(view, seen, last)), 0.0)


def over_queries(
    p: Float[Array, "B K G W S"], q_pos: Int[Array, "B W"]
) -> tuple[Float[Array, "B K G S"], Float[Array, "B K G S"]]:
    """Compute mean and unbiased variance, over a row's queries, of the attention that each slot receives."""
    real = (q_pos >= 0)[:, None, None, :, None]
    count = jnp.maximum(real.sum(3), 1).astype(p.dtype)
    mean = p.sum(3) / count
    apart = jnp.where(real, p - mean[:, :, :, None], 0.0)
    return mean, (apart * apart).sum(3) / jnp.maximum(count - 1, 1)


@dataclasses.dataclass(frozen=True)
class MeanAndVariance(Word):
    """mean_i p_ij + gamma var_i p_ij over the last `last` queries i, averaged over a group's heads.

    A token whose attention fluctuates may matter again (CAKE, arXiv:2503.12491). The variance is
    the unbiased one; the window's own slots score 0 (protect them).
    """

    last: int
    gamma: float = 200.0

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        _, q_pos = seen.of(Queries(self.last))
        mean, variance = over_queries(attention_to_older(view, seen, self.last), q_pos)
        return (mean + self.gamma * variance).mean(2)


@dataclasses.dataclass(frozen=True)
class LastLogits(Word):
    """score[j] = sum over a group's heads of q k_j / sqrt(H), of the newest query (arXiv:2409.17422).

    >>> len(LastLogits().needs)
    1
    """

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(1)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        q, q_pos = seen.of(Queries(1))
        keys = Keys(view.k, view.v, view.pos, view.bias)
        return logits(q, keys, q_pos, scale=seen.attention.scale, softcap=seen.attention.softcap)[
            :, :, :, 0
        ].sum(2)


@dataclasses.dataclass(frozen=True)
class AccumulatedAttention(Word):
    """All the attention a slot has received so far: F[j] = sum_i p_ij, over the prompt and every step.

    Args:
        per_query: divides by the number of queries that could see the slot.

    >>> len(AccumulatedAttention().traces)
    1
    """

    looks = False

    per_query: bool = False

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("sum"))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        mass = view.of(AccumulatedMass(Mass("sum")))
        if not self.per_query:
            return mass
        viewers = seen.length[:, None, None] - view.pos
        return mass / jnp.maximum(viewers, 1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Novelty(Word):
    """score[j] = -log p(x_j | x_<j): how unexpected the token was to the model (arXiv:2410.01518)."""

    looks = False

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({Surprisal()})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return view.of(Surprisal())


@dataclasses.dataclass(frozen=True)
class DecayedAttention(Word):
    """All the attention a slot has received, older queries counting less: F[j] = sum_i rate^(t - i) p_ij.

    Args:
        rate: the factor on a query's attention for each newer query.

    >>> len(DecayedAttention(0.9).traces)
    1
    """

    looks = False

    rate: float

    def __post_init__(self):
        AccumulatedDecayedMass(self.rate)

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedDecayedMass(self.rate)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return view.of(AccumulatedDecayedMass(self.rate))


@dataclasses.dataclass(frozen=True)
class Position(Word):
    """Newer is better: what a sliding window keeps.

    >>> Position().needs
    frozenset()
    """

    looks = False

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return view.pos.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class KeyNorm(Word):
    """score[j] = -||k_j||_2: keys with a small norm draw attention (arXiv:2406.11430).

    >>> KeyNorm().needs
    frozenset()
    """

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return -jnp.linalg.norm(view.k.astype(jnp.float32), axis=-1)


@dataclasses.dataclass(frozen=True)
class ValueNorm(Word):
    """score[j] = ||v_j||_order.

    Args:
        order: of the norm.

    >>> ValueNorm(2).needs
    frozenset()
    """

    order: int = 1

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return jnp.linalg.norm(view.v.astype(jnp.float32), self.order, axis=-1)


@dataclasses.dataclass(frozen=True)
class OutputNorm(Word):
    """score[j] = mean over a group's heads n of ||W_O[n]' v_j||_1 (arXiv:2502.03805).

    >>> OutputNorm().weights
    True
    """

    weights = True

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return output_norms(view, seen, order=1).mean(2)


def output_norms(view: View, seen: Observed, order: int) -> Float[Array, "B K G S"]:
    """||W_O[n]' v_j||_order of every slot for the heads n of its group, in strips of slots."""
    assert seen.weights is not None
    b, heads, slots, width = view.v.shape
    out = seen.weights["o"].astype(jnp.float32).reshape(heads, -1, width, seen.weights["o"].shape[-1])
    strip = min(STRIP, slots)
    values = jnp.pad(view.v.astype(jnp.float32), ((0, 0), (0, 0), (0, -slots % strip), (0, 0)))
    strips = jnp.moveaxis(values.reshape(b, heads, -1, strip, width), 2, 0)

    def norms(v: Float[Array, "B K T V"]) -> Float[Array, "B K G T"]:
        # One head of each group at a time: the outputs of all heads together are as large as the hidden
        # states.
        each = [
            jnp.linalg.norm(jnp.einsum("bktv,kvd->bktd", v, out[:, i]), order, axis=-1)
            for i in range(out.shape[1])
        ]
        return jnp.stack(each, 2)

    found = jnp.moveaxis(jax.lax.map(norms, strips), 0, 3)
    return found.reshape(b, heads, out.shape[1], -1)[..., :slots]


@dataclasses.dataclass(frozen=True)
class KeyRedundancy(Word):
    """How redundant a key is within its head: R[j] = softmax_j(mean_i c_ij) (arXiv:2505.24133, section 3).

    c_ij is the cosine of keys i and j, but 0 for i = j, and 0 where j is the newest key with which key i has
    a cosine above `threshold`: of similar keys, the newest one does not count as redundant.

    Args:
        threshold: the cosine above which keys count as similar.

    >>> KeyRedundancy().threshold
    0.5
    """

    threshold: float = 0.5

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        slots = view.pos.shape[-1]
        strip = min(FEW_KEYS, slots)
        # Whole strips: the last one is filled up with empty slots.
        more = (0, 0), (0, 0), (0, -slots % strip)
        k, pos = jnp.pad(view.k, (*more, (0, 0))), jnp.pad(view.pos, more, constant_values=-1)
        live = pos >= 0
        k = jnp.where(live[..., None], k.astype(jnp.float32), 0.0)
        unit = k * jax.lax.rsqrt(jnp.maximum((k * k).sum(-1, keepdims=True), 1e-24))
        column = jnp.arange(pos.shape[-1], dtype=jnp.int32)

        def add(i: int | Array, total: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
            """Add c_ij for one more strip of keys i; the map of all pairs is never formed."""
            mine = jax.lax.dynamic_slice_in_dim(unit, i * strip, strip, 2)
            cosine = jnp.einsum("bkih,bkjh->bkij", mine, unit)
            row = i * strip + jnp.arange(strip, dtype=jnp.int32)
            apart = (row[:, None] != column[None])[None, None]
            alike = (cosine > self.threshold) & apart & live[:, :, None]
            newest = jnp.where(alike, pos[:, :, None], -1).max(-1, keepdims=True)
            counts = apart & ~(alike & (pos[:, :, None] == newest))
            return total + jnp.where(counts, cosine, 0.0).sum(2)

        total = jax.lax.fori_loop(0, -(-slots // strip), add, jnp.zeros(pos.shape, jnp.float32))
        total, live = total[..., :slots], live[..., :slots]
        mean = total / jnp.maximum(live.sum(-1, keepdims=True), 1).astype(jnp.float32)
        # Not -inf: a row without tokens would have nothing else, and a NaN softmax.
        return jax.nn.softmax(jnp.where(live, mean, -1e30), -1)


@dataclasses.dataclass(frozen=True)
class RandomScore(Word):
    """The random baseline: a uniform draw that depends on (seed, layer, head, position) alone.

    A row therefore draws the same numbers alone and in a batch.
    """

    looks = False

    seed: int = 0

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        layer_key = jax.random.fold_in(jax.random.key(self.seed), seen.layer)

        def head(h: Array, pos: Array) -> Array:
            key = jax.random.fold_in(layer_key, h)
            return jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(key, p), dtype=jnp.float32))(pos)

        b, k, _ = view.pos.shape
        return jax.vmap(lambda row: jax.vmap(head)(jnp.arange(k), row))(view.pos)
