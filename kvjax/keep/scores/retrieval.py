"""Retrieval heads and streaming heads: which heads of a model need the whole past."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Observed, View
from kvjax.keep.algebra import Word


@dataclasses.dataclass(frozen=True)
class HeadGates(FittedWord):
    """How much every KV head needs the whole past, from 0 to 1 (DuoAttention, arXiv:2410.10819).

    fitted: "gates" [L, K], as `kvjax fit duoattention` writes it.
    """

    fitted: Fitted | None = None
    by = "duoattention"
    of_kv_heads = True

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "gates", "layers, KV heads", "gates", (model.layers, model.kv_heads))

    def retrieving(self, share: float, kv_heads: int) -> Bool[np.ndarray, "L K"]:
        """Choose the `share` of the model's KV heads with the largest gates; of equals the first."""
        assert self.fitted is not None
        gates = self.fitted.arrays["gates"]
        best = np.zeros(gates.size, bool)
        best[np.argsort(-gates, axis=None, kind="stable")[: round(share * gates.size)]] = True
        return best.reshape(gates.shape)


@dataclasses.dataclass(frozen=True)
class RepeatingHeads(FittedWord):
    """How much every query head attends to what came earlier in a repeated text (arXiv:2407.15891).

    The heads of RazorAttention. fitted: "echo" and "induction" [L, N], as `kvjax fit razorattention` writes
    them. echoes: the share of the model's query heads that count as retrieving because of their echo score.
    """

    fitted: Fitted | None = None
    echoes: float = 0.01
    by = "razorattention"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "heads", "layers, heads", "echo", (model.layers, model.heads))

    def retrieving(self, share: float, kv_heads: int) -> Bool[np.ndarray, "L K"]:
        """Choose the KV heads of the `share` of query heads with the best induction scores, or the best echo.

        Numbers of heads are rounded up; of equal scores the first heads count.
        """
        assert self.fitted is not None
        found = np.zeros(self.fitted.arrays["echo"].shape, bool)
        for name, part in (("induction", share), ("echo", self.echoes)):
            score = self.fitted.arrays[name]
            many = math.ceil(round(part * score.size, 6))
            found.flat[np.argsort(-score, axis=None, kind="stable")[:many]] = True
        return np.asarray(found.reshape(len(found), kv_heads, -1).any(-1))


@dataclasses.dataclass(frozen=True)
class RetrievalHeads(Word):
    """1 for every slot of the `share` of heads that retrieve, -1 for every slot of the other heads."""

    gates: HeadGates | RepeatingHeads
    share: float
    looks = False

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        # A constant mask per layer, known before the program runs.
        mine = jnp.asarray(self.gates.retrieving(self.share, view.pos.shape[1]))[seen.layer]
        return jnp.broadcast_to(jnp.where(mine, 1.0, -1.0)[None, :, None], view.pos.shape)
