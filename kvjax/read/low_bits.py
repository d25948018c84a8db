"""A read of few slots as they are, and of all others by a copy in few bits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.read_kinds import Copying, Counted, EstimatingRest, Prefetching
from kvjax.ops.base.dtypes import wide
from kvjax.read.channels import unread_slots
from kvjax.read.ranked import RankedSlots, shares
from kvjax.read.recycled import SelectedBy
from kvjax.state.cache import Slots
from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class CopiesInFewBits(RankedSlots, Prefetching, Copying, EstimatingRest):
    """SpeCache (arXiv:2503.16163): slots are ranked by a copy in few bits, which answers for the others.

    Keys and values of slots before the `newest` tokens have a copy by the codec `copies`. A step ranks slots
    by softmax(q k_j / sqrt(H)) over the keys of the copy, summed over the heads of a group; the best are
    those that the next step reads as they are. It attends to all others by their copies. Raises ValueError
    for a codec that encodes several tokens together.

    >>> from kvjax.words import Affine, Budget
    >>> word = CopiesInFewBits(Budget(0.1), copies=Affine(2))
    >>> sorted(word.summarise(jnp.ones((4, 32)), jnp.ones((4, 32))))
    ['keys scale_zero', 'keys words', 'values scale_zero', 'values words']
    """

    copies: Codec = dataclasses.field(kw_only=True)
    by_list = True
    steps_ahead = 1

    def __post_init__(self):
        if self.copies.granule != 1:
            raise ValueError(f"copies are encoded token by token, and {self.copies!r} encodes several")

    @property
    def mark(self) -> SelectedBy:
        return SelectedBy()

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of slots of a body of `slots` that a step reads as they are (static)."""
        # One may have left the newest tokens since the step before.
        return min(slots, self.budget.capacity(slots) + 1)

    def summarise(self, k: Float[Array, "*b S H"], v: Float[Array, "*b S V"]) -> dict[str, Array]:
        """Encode keys and values."""
        each = {"keys": self.copies.encode(k), "values": self.copies.encode(v)}
        return {f"{part} {name}": x for part, data in each.items() for name, x in data.items()}

    def copied(self, body: Slots, layer: int | Array, part: str, width: int) -> Float[Array, "B K S _"]:
        """Decode the keys or values of a layer's copy, in float32."""
        own = {n.removeprefix(f"{part} "): x for n, x in body.summary.items() if n.startswith(f"{part} ")}
        return self.copies.decode({n: x[layer] for n, x in own.items()}, width, jnp.float32)

    def logits(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K G S"]:
        """Products of queries with the keys of the copy, before the layer's scale."""
        k = self.copied(body, layer, "keys", q.shape[-1])
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).astype(wide(q))
        return jnp.einsum("bkgh,bksh->bkgs", rows, k.astype(rows.dtype))

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        live = (body.pos[layer] >= 0)[:, :, None]
        s = self.logits(q, body, layer) / q.shape[-1] ** 0.5
        return shares(jnp.where(live, s, -jnp.inf)).sum(2)

    def total(self, held: Counted) -> dict[str, Array]:
        """Nothing is summed."""
        return {}

    def rest(
        self, q: Float[Array, "B N T H"], body: Slots, tail: Slots, layer: int | Array,
        chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], lse: Float[Array, "B N T"],
        attention: AttentionSpec,
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
        """Return (out, lse) of the copies of slots that are not read."""
        s = self.logits(q, body, layer) * attention.scale
        s, left = unread_slots(s, body, layer, chosen, attention)
        found = jax.nn.logsumexp(s, -1, where=left)
        v = self.copied(body, layer, "values", body.value_width)
        out = jnp.einsum("bkgs,bksv->bkgv", shares(jnp.where(left, s, -jnp.inf)), v.astype(s.dtype))
        return out.reshape(*q.shape[:-1], -1).astype(q.dtype), found.reshape(lse.shape).astype(lse.dtype)
