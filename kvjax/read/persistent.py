"""Reading another layer's selection: a few layers rank all slots, and layers above read the best."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.calls import number_of
from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.read_kinds import Reusing
from kvjax.ops.base.dtypes import wide
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


@dataclasses.dataclass(frozen=True)
class PersistentSlots(Reusing):
    """TidalDecode (arXiv:2410.05076, section 3): layers above reuse the tokens with the largest logits.

    The first `skip_layers` layers attend to everything. So do the next one and layer `again` (its number, or
    the share of the layers up to it), which rank their slots by q k_j, summed over the heads of a group; the
    layers above read the best ones, until the next selection. The budget is a share of the slots before the
    `newest` tokens, which are always read. After a keep, a layer reads those selected tokens that it holds.

    >>> PersistentSlots(Budget(0.5), again=0.5).starts(8)
    (2, 3)
    """

    budget: Budget
    again: int | float = 0.44
    newest: int = 32
    skip_layers: int = 2
    granule = 1
    by_list = True

    @property
    def breaks(self) -> Reasons:
        return {**super().breaks, Fact.SUMMARIES: "has layers that read all of their slots"}

    def starts(self, layers: int) -> tuple[int, ...]:
        """Return the first layer after those that are skipped, and `again`."""
        return self.skip_layers, max(number_of(self.again, layers), self.skip_layers)

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Nothing: slots are ranked by their keys."""
        return {}

    def pages_visited(self, slots: int) -> int:
        """Return the most slots of a body of `slots` that a query visits in a reusing layer (static)."""
        return min(slots, self.budget.capacity(slots))

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the slots with the largest logits, summed over a group, and say how many of them count."""
        live, k = body.pos[layer] >= 0, dense(jax.tree.map(lambda x: x[layer], body.k))
        b, n, t, h = q.shape
        summed = q.reshape(b, k.shape[1], -1, t, h).astype(wide(q)).sum((2, 3))
        ranked = jnp.einsum("bkh,bksh->bks", summed, k.astype(summed.dtype))
        _, slots = jax.lax.top_k(jnp.where(live, ranked, -jnp.inf), self.pages_visited(body.capacity))
        full = live.sum(-1, dtype=jnp.int32)
        return slots, jnp.minimum(full, self.budget.count(full))
