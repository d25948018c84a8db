"""How the next token is drawn from logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.inputs import finite_number, whole_number


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn: greedy at temperature 0, else softmax(logits / temperature).

    top_k keeps the k likeliest tokens, top_p the smallest set with probability >= p (1904.09751), min_p those
    at least min_p times as likely as the likeliest (2407.01082); all that are given must agree on a token.

    Raises InputError for values that mean nothing.

    >>> logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]]))
    >>> Sampler(1.0, min_p=0.25)._filtered(logits).argmin(), Sampler()(logits, jax.random.key(0)[None])[0]
    (Array(2, dtype=int32), Array([0], dtype=int32))
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        finite_number("temperature", self.temperature, 0.0)
        if self.top_k is not None:
            whole_number("top_k", self.top_k, 1, "tokens to draw from")
        if self.top_p is not None:
            finite_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.min_p is not None:
            finite_number("min_p", self.min_p, 0.0, 1.0)

    def __call__(
        self, logits: Float[Array, "B V"], keys: Array, changed: Float[Array, "B V"] | None = None
    ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
        """(token, log-probability under the model) per row; one key per row.

        changed: what to draw from instead of the model's logits.
        """
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
        source = logits if changed is None else changed
        if self.temperature == 0:
            token = jnp.argmax(source, axis=-1).astype(jnp.int32)
        else:
            token = jax.vmap(jax.random.categorical)(keys, self._filtered(source)).astype(jnp.int32)
        return token, jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]

    def _filtered(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        scaled = logits.astype(jnp.float32) / self.temperature
        order = jnp.argsort(-scaled, axis=-1, stable=True)
        ranked = jnp.take_along_axis(scaled, order, axis=-1)
        keep = jnp.ones(ranked.shape, bool)
        if self.top_k is not None:
            keep &= jnp.arange(ranked.shape[-1])[None] < self.top_k
        if self.top_p is not None:
            p = jax.nn.softmax(ranked)
            keep &= jnp.cumsum(p, -1) - p < self.top_p
        if self.min_p is not None:
            p = jax.nn.softmax(ranked)
            keep &= p >= self.min_p * p[..., :1]
        ranked = jnp.where(keep, ranked, -jnp.inf)
        return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)


def drawn(
    sampler: Sampler,
    logits: Float[Array, "B V"],
    keys: Array,
    count: Int[Array, "B"],
    done: Bool[Array, "B"],
    stop: Int[Array, "S"],
    changed: Float[Array, "B V"] | None = None,
) -> tuple[Int[Array, "B"], Int[Array, "B"], Float[Array, "B"], Bool[Array, "B"]]:
    """Token `count` of every row: (token, the same or -1 where the row is done, its logprob, rows now done).

    keys: one PRNG key per row. changed: as in `Sampler`.
    """
    token, logprob = sampler(logits, jax.vmap(jax.random.fold_in)(keys, count), changed)
    ends = (token[:, None] == stop[None]).any(-1)
    shown = jnp.where(done, -1, token)
    return token, shown, jnp.where(done, 0.0, logprob), done | ends


draw = jax.jit(drawn, static_argnames=("sampler",))
