"""The generation loop: slices of many tokens on the device, or of one token if the host must act on each."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.logit_processors import Processor, processed
from kvjax.api.nan_checks import refuse_processed
from kvjax.api.sampling import GIVEN, Sampler, Settings, chosen, logprob_of
from kvjax.api.stop_strings import StopStrings
from kvjax.api.types import Step
from kvjax.hosts.arrays import fetch
from kvjax.models.layers import Params
from kvjax.state.cache import Cache

# The most tokens that the device generates before the host looks at them.
SLICE = 32


class Slice(NamedTuple):
    """The result of one call of `write_slice`: `count` tokens per row; the others are -1, with log p 0.

    logits: after the last new token. done: rows that have generated a stop token, in this slice or before.
    """

    count: Int[Array, ""]
    logits: Float[Array, "R V"]
    cache: Cache
    done: Bool[Array, "R"]
    tokens: Int[Array, "R slice"]
    logprobs: Float[Array, "R slice"]


class Draws(NamedTuple):
    """How tokens are drawn: token `at` of row r with keys[r] folded with `at`; `stop` tokens end a row.

    given: the first token of a slice if the settings say that it is given, not drawn.
    """

    settings: Settings
    keys: Array
    stop: Int[Array, "S"]
    given: Int[Array, "R"]


@partial(jax.jit, static_argnames=("step",), donate_argnames=("cache",))
def write_slice(
    step: Step,
    params: Params,
    cache: Cache,
    logits: Float[Array, "R V"],
    done: Bool[Array, "R"],
    draws: Draws,
    at: Int[Array, ""] | np.int32,
    n: Int[Array, ""] | np.int32,
) -> Slice:
    """Draw and then append the tokens `at`, ..., `at` + n - 1 of every row, one by one; 1 <= n <= SLICE.

    Rows that are done append nothing. The slice ends early after the token with which all rows are done, and
    after one whose log-probability is NaN.
    """
    first, most = jnp.asarray(at), jnp.asarray(n)

    def unfinished(carry: tuple[Slice, Array]) -> Array:
        now, broken = carry
        return (now.count < most) & ((now.count == 0) | ~(now.done.all() | broken))

    def one(carry: tuple[Slice, Array]) -> tuple[Slice, Array]:
        i, logits, cache, done, tokens, logprobs = carry[0]
        folded = jax.vmap(partial(jax.random.fold_in, data=first + i))(draws.keys)
        token = chosen(draws.settings, logits, folded, draws.given)
        logprob = jnp.where(done, 0.0, logprob_of(logits, token))
        shown = jnp.where(done, -1, token)
        ends = done | (token[:, None] == draws.stop[None]).any(-1)
        after, cache = step(params, cache, token, ~done)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, shown, i, 1)
        logprobs = jax.lax.dynamic_update_index_in_dim(logprobs, logprob, i, 1)
        return Slice(i + 1, after, cache, ends, tokens, logprobs), jnp.isnan(logprob).any()

    # These arrays are computed from the logits, so that they are on the same mesh as the arrays that the loop
    # returns: the type of a loop's carry must not change.
    none = jnp.isnan(logits) & False
    blank = jnp.broadcast_to(none[:, :1], (*done.shape, SLICE))
    start = Slice(
        jnp.int32(0),
        logits,
        cache,
        done | none[:, 0],
        jnp.where(blank, 0, -1).astype(jnp.int32),
        blank.astype(jnp.float32),
    )
    return jax.lax.while_loop(unfinished, one, (start, none.any()))[0]


def advancing(step: Step, params: Params, rows: int) -> Callable[[Cache, Array, Array, Array], Slice]:
    """Make a function for slices of one given token: (cache, logits, token [R], append [R]) to a `Slice`."""
    keys, stop = jnp.broadcast_to(jax.random.key(0), (rows,)), padded_stop(jnp.asarray([-1], jnp.int32))
    draws = Draws(_given(), keys, stop, jnp.zeros((rows,), jnp.int32))

    def advance(cache: Cache, logits: Array, token: Array, append: Array) -> Slice:
        now = draws._replace(given=token)
        return write_slice(step, params, cache, logits, ~append, now, np.int32(0), np.int32(1))

    return advance


def _given() -> Settings:
    return jax.tree.map(jnp.asarray, Sampler().settings._replace(kind=np.int32(GIVEN)))


def padded_stop(stop: Int[Array, "S"]) -> Int[Array, "_"]:
    """Pad stop tokens to a multiple of eight, so that programs seldom depend on their number."""
    return jnp.pad(stop, (0, -stop.shape[0] % 8), constant_values=-1)


class Written(NamedTuple):
    """Tokens `at`, at + 1, ... of every row, -1 after a row has ended, and the cache that holds them."""

    at: int
    tokens: Int[np.ndarray, "R n"]
    logprobs: Float[np.ndarray, "R n"]
    cache: Cache


def writing(
    step: Step,
    params: Params,
    logits: Float[Array, "R V"],
    cache: Cache,
    *,
    new: int,
    sampler: Sampler,
    key: Array,
    stop: Int[Array, "S"],
    refuse_nan: Callable[[int], None],
    ends: StopStrings | None = None,
    processors: tuple[Processor, ...] = (),
    past: Int[Array, "R T"] | None = None,
    one_by_one: bool = False,
) -> Generator[Written, None, None]:
    """Generate up to `new` tokens per row in slices; each slice consumes the cache of the one before.

    past: the tokens so far, if there are processors. refuse_nan: called with the step whose logits are NaN.
    one_by_one: slices have one token. All else is as in `kvjax.generate`.
    """
    rows, at = logits.shape[0], 0
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows))
    if past is None and type(sampler) is not Sampler:
        past = jnp.zeros((rows, 0), jnp.int32)
    # With processors, which are arbitrary code, the host draws.
    settings = jax.tree.map(jnp.asarray, sampler.settings) if past is None else _given()
    draws = Draws(settings, keys, padded_stop(stop), jnp.zeros((rows,), jnp.int32))
    most = SLICE if ends is None and past is None and not one_by_one else 1
    # A host array, because a device array would fix a sharding before the first slice gives one.
    done, lost = np.zeros((rows,), bool), np.zeros((0,), bool)
    while at < new and not done.all():
        if past is not None:
            given, past, lost = processed(sampler, processors, logits, past, keys, np.int32(at), done)
            draws = draws._replace(given=given)
        n = min(most, new - at)
        out = write_slice(step, params, cache, logits, done, draws, np.int32(at), np.int32(n))
        logits, cache = out.logits, out.cache
        count, done, shown, heard, unheard = fetch((out.count, out.done, *out[4:], lost))
        if (broken := np.isnan(heard).any(0)).any():
            refuse_nan(at + int(broken.argmax()))
        if unheard.any():
            refuse_processed(at)
        if ends is not None:
            done = done | ends(shown[:, 0])
        yield Written(at, shown[:, :count], heard[:, :count], cache)
        at += int(count)


def write(
    step: Step,
    params: Params,
    logits: Float[Array, "R V"],
    cache: Cache,
    *,
    new: int,
    on_token: Callable[[int, np.ndarray], None] | None = None,
    **how: Any,
) -> tuple[Int[Array, "R M"], Float[Array, "R M"], Cache]:
    """Collect what `writing` yields: all tokens, their log-probabilities, and the cache that holds them."""
    tokens = np.full((logits.shape[0], new), -1, np.int32)
    logprobs = np.zeros(tokens.shape, np.float32)
    for part in writing(step, params, logits, cache, new=new, one_by_one=on_token is not None, **how):
        here = slice(part.at, part.at + part.tokens.shape[1])
        tokens[:, here], logprobs[:, here], cache = part.tokens, part.logprobs, part.cache
        if on_token is not None:
            on_token(part.at, part.tokens[:, 0])
    return jnp.asarray(tokens), jnp.asarray(logprobs), cache
