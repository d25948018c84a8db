"""Dynamic context pruning: newer tokens drop older slots, which are hidden from all later queries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import NEVER, Hiding, Inputs, Observation, Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import BOTH
from kvjax.keep.observations.trace import ConstantTrace
from kvjax.keep.scores.score import STRIP


@dataclasses.dataclass(frozen=True)
class InteractionKey(Observation, FittedWord):
    """One channel of a token's interaction key, computed from the layer's input; all heads share it."""

    fitted: Fitted
    channel: int
    by = "dcp"
    phases = BOTH

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        FirstDroppingToken(self.fitted).check(model)

    def __call__(self, inputs: Inputs) -> Float[Array, "B K T"]:
        weights = inputs.fitted[self.fitted.digest]["key"][:, self.channel].astype(jnp.float32)
        one = inputs.hidden.astype(jnp.float32) @ weights
        return jnp.broadcast_to(one[:, None], (one.shape[0], inputs.k_raw.shape[1], one.shape[1]))


@dataclasses.dataclass(frozen=True)
class FirstDroppingToken(Hiding, FittedWord):
    """The first token n > j that drops slot j in a layer: the first with a_n' b_j / sqrt(R) + c < 0.

    a_n = W_a' x_n and b_j = W_b' x_j are R channels of the layer's inputs (Dynamic Context Pruning,
    arXiv:2305.15805, section 3.1). From token n on the slot is hidden from all heads of the layer. The slot's
    trace is b_j. fitted: "query" and "key" [L, D, R], "bias" [L, 1].
    """

    fitted: Fitted | None = None
    by = "dcp"
    phases = BOTH

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        for name in ("query", "key"):
            check_sizes(self, "interactions", "layers, width", name, (model.layers, model.width))

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces that slots carry: their interaction keys, one trace per channel."""
        if self.fitted is None:
            return ()
        channels = self.fitted.arrays["key"].shape[-1]
        return tuple(ConstantTrace(InteractionKey(self.fitted, r)) for r in range(channels))

    def since(
        self, inputs: Inputs, traces: dict[str, Float[Array, "B K S"]], pos: Int[Array, "B #K S"]
    ) -> Int[Array, "B K S"]:
        """Find the position of the first new token that drops each slot, computed in strips of tokens."""
        assert self.fitted is not None
        arrays = {name: x.astype(jnp.float32) for name, x in inputs.fitted[self.fitted.digest].items()}
        keys = jnp.stack([traces[key_of(t)] for t in self.traces], -1).astype(jnp.float32)
        pos, t = jnp.broadcast_to(pos, keys.shape[:3]), inputs.pos.shape[1]
        size = min(STRIP, t)
        asks = inputs.hidden.astype(jnp.float32) @ arrays["query"] * keys.shape[-1] ** -0.5
        asks = jnp.pad(asks, ((0, 0), (0, -t % size), (0, 0)))
        at = jnp.pad(inputs.pos, ((0, 0), (0, -t % size)), constant_values=-1)

        def sooner(i: int | Array, first: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
            mine, new = (jax.lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in (asks, at))
            s = jnp.einsum("btr,bksr->bkts", mine, keys) + arrays["bias"][0]
            new = new[:, None, :, None]
            drops = (pos[:, :, None] >= 0) & (new > pos[:, :, None]) & (s < 0)
            return jnp.minimum(first, jnp.where(drops, new, NEVER).min(2))

        return jax.lax.fori_loop(0, -(-t // size), sooner, jnp.full(pos.shape, NEVER, jnp.int32))


@dataclasses.dataclass(frozen=True)
class NotDropped(Word):
    """0 for a slot that no later token has dropped, -1 for a dropped one: see `FirstDroppingToken`."""

    looks = False

    dropping: FirstDroppingToken = FirstDroppingToken()

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.dropping})

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset(self.dropping.traces)

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return jnp.where(seen.of(self.dropping) < NEVER, -1.0, 0.0)
