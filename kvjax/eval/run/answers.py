"""How questions are answered: the right answer is fed, or the model writes its own, in one program."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax import steps
from kvjax.eval.tasks.rows import Rows
from kvjax.eval.tasks.sample import Sample, new_tokens
from kvjax.models.layers import Params
from kvjax.state.cache import Cache
from kvjax.steps import Run

# What `generate_answers` writes in the place of a token whose logits are no numbers.
NOT_A_NUMBER = -2


def row_new_tokens(rows: Rows) -> Int[np.ndarray, "B"]:
    """Per row of a batch, how many tokens its last sample writes; 0 for the rows that only fill it up."""
    out = np.zeros(rows.prompt.shape[0], np.int32)
    for i, turns in enumerate(rows.turns):
        out[i] = new_tokens(turns[-1][1])
    return out


def predicted(sample: Sample, said: Int[np.ndarray, "S"], start: int) -> list[int]:
    """A sample's answer in a row of `generate_answers`, `start` being the step that predicts its first token.

    >>> from kvjax.eval.tasks.sample import ForcedSample
    >>> sample = ForcedSample("one", "get", context=(5,), question=(3,), answer=(7, 8), spans=())
    >>> predicted(sample, np.array([3, 7, 9, 5], np.int32), 1)
    [7, 9]
    """
    count = new_tokens(sample) or len(sample.answer)
    return [int(i) for i in said[start : start + count] if i >= 0]


@partial(jax.jit, static_argnames=("run", "width"))
def generate_answers(
    run: Run,
    params: Params,
    cache: Cache,
    forced: Int[Array, "B F"],
    count: Int[Array, "B"],
    again: Bool[Array, "B"],
    new: Int[Array, "B"],
    stop: Int[Array, "N"],
    *,
    width: int,
) -> Int[Array, "B S"]:
    """Greedy predictions of S = F + width steps: behind every forced token, then behind the model's own.

    Row b is fed forced[b, :count[b]] one by one and then its own predictions until new[b] tokens are written
    or one of `stop` is said. Steps that a row did not make, and a stop that ended it, are -1, tokens
    whose logits are no numbers -2. again: the
    first forced token is the prompt's last one, asked again. width (static): at least new.max().
    """
    fed = jnp.pad(forced, ((0, 0), (0, width)))
    limit = count + jnp.maximum(new - 1, 0)

    def unfinished(carry: tuple[Array, Cache, Array, Array]) -> Array:
        i, _, _, done = carry
        return ((i < limit) & ~done).any()

    def body(carry: tuple[Array, Cache, Array, Array]) -> tuple[Array, Cache, Array, Array]:
        i, cache, said, done = carry
        own = said[:, jnp.maximum(i - 1, 0)]
        token = jnp.where(i < count, fed[:, i], jnp.maximum(own, 0))
        live = (i < limit) & ~done
        logits, cache = steps.step_fn(run, params, cache, token, live & ~(again & (i == 0)))
        best = jnp.argmax(logits, -1).astype(jnp.int32)
        # The largest is the first NaN where there is one.
        top = jnp.take_along_axis(logits, best[:, None], axis=1)[:, 0]
        best = jnp.where(jnp.isnan(top), NOT_A_NUMBER, best)
        ends = (new > 0) & (i >= count - 1) & (best[:, None] == stop[None]).any(-1)
        said = said.at[:, i].set(jnp.where(live & ~ends, best, -1))
        return i + 1, cache, said, done | ends

    start = jnp.zeros((), jnp.int32), cache, jnp.full_like(fed, -1), jnp.zeros(count.shape, bool)
    return jax.lax.while_loop(unfinished, body, start)[2]
