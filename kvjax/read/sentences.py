"""Reading by sentences: a sentence is represented by the mean of its keys, and read as a whole."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observed, Trace
from kvjax.grammar.read_kinds import Tracing
from kvjax.ops.base.dtypes import wide
from kvjax.read.ranked import RankedSlots, summed
from kvjax.read.spans import each_list, in_order, numbered, span_of, summed_up
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class SentenceStart(Trace):
    """A trace: the position after the last separator before a token, of those that were read with it.

    It is 0 if there is none, as for a generated token, whose sentence began before.
    """

    separators: Trace
    by_ids = True

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        ends = self.separators.start(inputs, 1)[:, 0] > 0
        after = jnp.where(ends & (inputs.pos >= 0), inputs.pos + 1, 0)
        begins = jax.lax.cummax(jnp.pad(after, [(0, 0), (1, 0)])[:, :-1], axis=1).astype(jnp.float32)
        return jnp.broadcast_to(begins[:, None], (begins.shape[0], heads, begins.shape[1]))

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old


@dataclasses.dataclass(frozen=True)
class SentenceMeans(RankedSlots, Tracing):
    """SentenceKV (arXiv:2504.00970, section 3): reads the sentences whose mean keys match the queries best.

    A sentence ends with a separator. The means are those of a head's keys at the end of the last prefill, and
    slots are read in the order of <q, mean>, summed over the heads of a group, sentence by sentence; of one
    that fits only in part, the older slots are read. The first `sinks` tokens are always read. Neighbouring
    sentences are joined where a head has more than `most` of them, and later tokens belong to the last one.
    separators: a trace that is positive for separators (`kvjax.keep.scores.tokens.IsTokenType`).
    """

    separators: Trace = dataclasses.field(kw_only=True)
    sinks: int = 32
    most: int = 512
    by_list = True

    @property
    def requires(self) -> Reasons:
        return {**super().requires, Fact.PLAIN_READING: "knows sentences by the tokens of a prompt"}

    @property
    def marks(self) -> frozenset[Trace]:
        return frozenset({self._begins, self.separators})

    @property
    def _begins(self) -> SentenceStart:
        return SentenceStart(self.separators)

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Nothing: sentences are known by positions."""
        return {}

    def learn(
        self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"], traces: dict[str, Float[Array, "*b S"]]
    ) -> dict[str, Array]:
        """Where sentences begin [*b, C], and their mean keys [*b, C, H] in promote(float32, k)."""

        def one(k: Array, pos: Array, begins: Array, ends: Array) -> tuple[Array, Array]:
            pos, k, begins, ends = in_order(pos, k, begins, ends)
            live = pos < 2**30
            # Between two slots that stay, tokens may have left, and a separator with them.
            before = jnp.pad(pos, (1, 0), constant_values=-1)[:-1]
            new = (begins.astype(jnp.int32) > before) | (jnp.pad(ends, (1, 0))[:-1] > 0)
            return summed_up(numbered(new, live, self.most), pos, k, live, self.most)

        x = jax.lax.stop_gradient(k.astype(wide(k)))
        named = [traces[key_of(t)] for t in (self._begins, self.separators)]
        starts, keys = each_list(one, k.ndim - 2, x, pos, *named)
        return {"starts": starts, "keys": keys}

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        starts, keys, pos = body.sums["starts"][layer], body.sums["keys"][layer], body.pos[layer]
        met = jnp.einsum("bkh,bkch->bkc", summed(q, keys.shape[1]), keys, precision="highest")
        score = jnp.take_along_axis(met, span_of(starts, pos), -1)
        return jnp.where((pos >= 0) & (pos < self.sinks), jnp.inf, score)
