"""Reading by channels: logits from a few channels of every key select slots; a mean replaces the rest."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.read_kinds import Counted, EstimatingRest
from kvjax.ops.base.dispatch import platform
from kvjax.ops.base.dtypes import wide
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


@dataclasses.dataclass(frozen=True)
class LargestChannels(EstimatingRest):
    """SparQ (arXiv:2312.04985, section 4): attends to the slots with the largest approximate logits.

    An approximate logit uses the channels in which the query is largest, summed over the heads of a group,
    and is divided by the root of their share of the query's L1 norm. The heads of a group read the same
    slots, those with the largest sums of their approximate logits. The other slots count as the mean of all
    values, with the weight that the approximate logits give them. The budget is a share of the slots before
    the `newest` tokens, which are always read.

    >>> word = LargestChannels(Budget(2), channels=1, newest=1)
    >>> q, k = jnp.asarray([[[[3.0, 1.0]]]]), jnp.asarray([[[[1.0, 9.0], [2.0, 0.0]]]])
    >>> [round(x, 3) for x in word.guess(q, k).ravel().tolist()]
    [3.464, 6.928]
    """

    budget: Budget
    channels: int = 32
    newest: int = 32
    skip_layers: int = 0
    granule = 1
    by_list = True

    @property
    def breaks(self) -> Reasons:
        return {**super().breaks, Fact.SUMMARIES: "looks at some channels of all keys"}

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Nothing: the approximate logits use the keys themselves."""
        return {}

    def total(self, held: Counted) -> dict[str, Array]:
        """Compute the sum of the values, in promote(float32, v)."""
        return {"values": held.v.astype(wide(held.v)).sum(-2)}

    def looks_at(self, width: int) -> int:
        """How many of `width` channels of every key the approximate logits use."""
        return min(self.channels, width)

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of slots of a body of `slots` that a query visits (static)."""
        return min(slots, self.budget.capacity(slots))

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the slots with the largest approximate logits, and say how many of them count."""
        live = body.pos[layer] >= 0
        guess = self.guess(q, _keys(body, layer)).sum((2, 3))
        _, slots = jax.lax.top_k(jnp.where(live, guess, -jnp.inf), self.pages_visited(body.capacity))
        full = live.sum(-1, dtype=jnp.int32)
        return slots, jnp.minimum(full, self.budget.count(full))

    def guess(self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K G T S"]:
        """Approximate logits from the largest channels of the queries, before the layer's scale."""
        (b, n, t, h), heads = q.shape, k.shape[1]
        q = q.reshape(b, heads, n // heads, t, h).astype(wide(q))
        size = jnp.abs(q)
        _, index = jax.lax.top_k(size.sum(2), self.looks_at(h))
        few = jnp.take_along_axis(q, index[:, :, None], axis=-1)
        all_of_it = size.sum(-1, keepdims=True)
        share = jnp.abs(few).sum(-1, keepdims=True) / jnp.where(all_of_it == 0, 1, all_of_it)
        scale = jnp.sqrt(jnp.where(share == 0, 1, share))
        if platform() == "tpu":
            # One-hot over whole keys, because to gather channels XLA would re-lay out all keys.
            chosen = jax.nn.one_hot(index, h, dtype=bool).any(-2)[:, :, None]
            return jnp.einsum("bkgth,bksh->bkgts", jnp.where(chosen, q, 0) / scale, k.astype(q.dtype))
        few = few / scale
        of_keys = jnp.take_along_axis(k[:, :, None], index[..., None, :], axis=-1)
        return jnp.einsum("bkgtr,bktsr->bkgts", few, of_keys.astype(few.dtype))

    def rest(
        self, q: Float[Array, "B N T H"], body: Slots, tail: Slots, layer: int | Array,
        chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], lse: Float[Array, "B N T"],
        attention: AttentionSpec,
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
        """Estimate the attention to slots that are not read, as (out, lse); out is the mean of all values.

        lse is that of the read slots + log((1 - alpha) / alpha), where alpha is the probability that a
        softmax over the approximate logits of all slots gives to those that are read.
        """
        held, newest = body.pos[layer] >= 0, tail.layer(layer).keys()
        assert newest.pos is not None
        new, read = newest.pos >= 0, held & visited_slots(chosen, body.capacity)

        def logits(k: Array, there: Bool[Array, "B K S"]) -> Float[Array, "B K G T S"]:
            s, cap = self.guess(q, k) * attention.scale, attention.softcap
            s = s if cap is None else cap * jnp.tanh(s / cap)
            return jnp.where(there[:, :, None, None], s, -jnp.inf)

        of_body = logits(_keys(body, layer), held)
        hidden = ~read[:, :, None, None]
        met = jnp.concatenate([jnp.where(hidden, -jnp.inf, of_body), logits(newest.k, new)], -1)
        odds = _log_of_odds(jnp.where(hidden, of_body, -jnp.inf), met).reshape(lse.shape)
        mean = mean_of_values(body, tail, layer, q.shape[1])
        return jnp.broadcast_to(mean, (*lse.shape, mean.shape[-1])).astype(q.dtype), lse + odds


def mean_of_values(body: Slots, tail: Slots, layer: int | Array, heads: int) -> Float[Array, "B N 1 V"]:
    """Compute a layer's mean value, whose sum over the body is held, for each of `heads` query heads."""
    newest = tail.layer(layer).keys()
    assert newest.pos is not None
    total, new = body.sums["values"][layer], newest.pos >= 0
    own = jnp.where(new[..., None], newest.v, jnp.zeros((), newest.v.dtype)).astype(total.dtype).sum(2)
    count = jnp.maximum((body.pos[layer] >= 0).sum(-1) + new.sum(-1), 1)[..., None].astype(total.dtype)
    mean = (total + own) / count
    return jnp.repeat(mean, heads // mean.shape[1], axis=1)[:, :, None]


def visited_slots(chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], slots: int) -> Bool[Array, "B K S"]:
    """Which of `slots` slots were chosen.

    >>> visited_slots((jnp.asarray([[[2, 0, 1]]]), jnp.asarray([[2]])), 4).tolist()
    [[[True, False, True, False]]]
    """
    index, counts = chosen
    used = jnp.arange(index.shape[2], dtype=jnp.int32)[None, None] < counts[..., None]
    mark = jax.vmap(jax.vmap(lambda at: jnp.zeros(slots, bool).at[at].set(True, mode="drop")))
    return mark(jnp.where(used, index, slots))


def unread_slots(
    s: Float[Array, "B K G S"], body: Slots, layer: int | Array,
    chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], attention: AttentionSpec,
) -> tuple[Float[Array, "B K G S"], Bool[Array, "B K G S"]]:  # fmt: skip
    """Scaled logits with the layer's softcap and the slots' bias, and which of the slots are not read."""
    if attention.softcap is not None:
        s = attention.softcap * jnp.tanh(s / attention.softcap)
    if body.bias is not None:
        s = s + body.bias[layer][:, :, None].astype(s.dtype)
    left = (body.pos[layer] >= 0) & ~visited_slots(chosen, body.capacity)
    return s, jnp.broadcast_to(left[:, :, None], s.shape)


def _log_of_odds(left: Float[Array, "*b S"], met: Float[Array, "*b M"]) -> Float[Array, "*b"]:
    """log(sum exp(left) / sum exp(met)); -inf if nothing is left."""
    top = jax.lax.stop_gradient(jnp.maximum(left.max(-1), met.max(-1)))
    top = jnp.where(jnp.isneginf(top), 0.0, top)[..., None]
    a, b = jnp.exp(left - top).sum(-1), jnp.exp(met - top).sum(-1)
    a, b = (jnp.maximum(x, jnp.finfo(x.dtype).tiny) for x in (a, b))
    return jnp.where(jnp.isneginf(left).all(-1), -jnp.inf, jnp.log(a) - jnp.log(b))


def _keys(body: Slots, layer: int | Array) -> Float[Array, "B K S H"]:
    return dense(jax.tree.map(lambda x: x[layer], body.k))
