"""Several tokens in one pass, with the results of single steps: `verify`, for drafts and likelihoods."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax import steps
from kvjax.api.chunks import bucket, tokens_that_fit
from kvjax.api.prefill import PaddedTokens, bare_cache, check_cache, noted, padded, there
from kvjax.api.prepare import made
from kvjax.api.program_limit import bound_programs
from kvjax.api.rollback import more_added
from kvjax.api.step import positions_left
from kvjax.api.types import Lengths, TokenIds
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import with_fitted
from kvjax.hosts.arrays import fetch
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.model import Model, check_single
from kvjax.pure import decoding
from kvjax.state.cache import Cache
from kvjax.state.codes import Codes
from kvjax.steps import Run
from kvjax.steps.decoding.each_token import pass_refused


def verify(
    model: Model,
    cache: Cache,
    tokens: TokenIds,
    *,
    lengths: Lengths | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T V"], Cache]:
    """Read several tokens per row in one pass, with the logits of as many calls of `kvjax.step`.

    Under a read, every token attends to what its own query picks. If tokens are encoded, or enter a page,
    together, it takes several passes, each up to the token after which a step would encode. `kvjax.rollback`
    removes the newest tokens again.

    Args:
        model: the model that the cache is of.
        cache: a live cache; it is consumed (donated).
        tokens: token ids [B, T], padded on the right, or a list of lists; a row may have none.
        lengths: tokens of each row [B], if rows are padded.
        implementation: as in `prefill`.

    Returns:
        Logits [B, T, V] at each token (those after a row's last token are meaningless), and the cache.

    Raises:
        InputError: if a token changes what the next one attends to: slots are evicted, what is read depends
            on what was read before, a state is encoded, or the rotation grows with the text. Also if the
            cache has too few free slots, was consumed before or belongs to another model, for token ids
            outside the vocabulary, and beyond the model's last position.
        NotImplementedError: if a forced kernel cannot run.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3], [4, 5]], room=8)
    >>> logits, cache = kvjax.verify(model, cache, [[6, 7, 8], [9]])
    >>> logits.shape, cache.next.tolist()
    ((2, 3, 220), [6, 3])
    """
    check_single(model, "add its tokens with kvjax.step")
    check_cache(model, cache)
    batch = padded(model, tokens, lengths, least=0)
    if cache.next.shape != batch.lengths.shape or not batch.lengths.any():
        raise InputError(
            f"the tokens have {len(batch.lengths)} rows of {batch.lengths.tolist()} tokens, the cache "
            f"{cache.next.shape[0]} rows, expected the same number and at least one token: give one row of "
            "tokens for every row of the cache"
        )
    return over_slots(model, cache, batch, implementation, picking=True)


def over_slots(
    model: Model, cache: Cache, batch: PaddedTokens, implementation: str | None = None, *, picking: bool
) -> tuple[Float[Array, "B T V"], Cache]:
    """`verify` of tokens that were checked.

    picking: they attend to the slots that the method reads in steps; otherwise to all.
    """
    bound_programs()
    model = made(model, cache.method)
    cache = there(model, cache)
    run = decoding(model, cache.method, implementation)
    refused = one_pass_refused if picking else pass_over_all_refused
    if why := refused(model, run, cache, batch.lengths):
        _refuse(cache, batch, why)
    spare = _room_for(model, run, cache, batch.lengths)
    note = more_added(noted(model, cache), batch.lengths)
    width = int(batch.lengths.max())
    params, size = with_fitted(model.params, cache.method), _width(width)
    labels = dict(method=cache.method, model=model.fingerprint, spare=spare, added=note, on_mesh=run.on_mesh)
    logits, new = passes(run, params, bare_cache(cache), batch, size, picking)
    return logits[:, :width], dataclasses.replace(new, **labels)


def _refuse(cache: Cache, batch: PaddedTokens, why: str) -> None:
    name = "full" if cache.method is None else cache.method.id
    raise InputError(
        f"{name} cannot take {int(batch.lengths.max())} tokens in one pass: {why}; add them with "
        "kvjax.step, one by one"
    )


def _width(tokens: int) -> int:
    """Choose the static number of tokens of a pass: powers of two below 16, then buckets."""
    return 1 << (tokens - 1).bit_length() if tokens < 16 else bucket(tokens)


def passes(
    run: Run, params: dict, cache: Cache, batch: PaddedTokens, size: int, picking: bool = True
) -> tuple[Float[Array, "B T V"], Cache]:
    """Logits at all tokens and the cache after them; a pass ends where a step would flush a tail.

    A pass computes about as many tokens as it ends with: once a codec encodes a token with every new one,
    passes are of one token each.
    """
    gms = run.groups(params)
    picking = picking and any(gm.read is not None for gm in gms)
    rows, split = np.arange(len(batch.lengths))[:, None], any(gm.split for gm in gms)
    done, found, width = np.zeros_like(batch.lengths), [], size
    # Where each token's logits lie in those of all passes, one after the other.
    at, before = np.zeros((len(batch.lengths), size), np.int32), 0
    while not found or (done < batch.lengths).any():
        count = batch.lengths - done
        if split:
            count = np.minimum(count, fetch(steps.until_flush(gms, cache)))
            width = min(size, _width(int(count.max())))
        here = np.arange(width)
        source = np.minimum(done[:, None] + here, batch.tokens.shape[1] - 1)
        row, column = np.nonzero(here < count[:, None])
        at[row, done[row] + column] = before + column
        piece = jnp.asarray(batch.tokens[rows, source]), jnp.asarray(count)
        logits, cache = steps.verify(run, params, cache, *piece, picking)
        found.append(logits)
        done, before = done + count, before + width
    if len(found) == 1 and width == size:
        return found[0], cache
    return jnp.concatenate(found, 1)[rows, at], cache


def _room_for(model: Model, run: Run, cache: Cache, lengths: np.ndarray) -> int:
    """Return a lower bound of how many more tokens fit after these; InputError if these do not fit."""
    longest = int(lengths.max())
    if cache.spare >= longest:
        return cache.spare - longest
    fit = fetch(tokens_that_fit(run.groups(model.params), bare_cache(cache))).min(0)
    if (fit < lengths).any():
        raise InputError(
            f"{longest} tokens were given and the cache has room for {int(fit.min())} more: give "
            "prefill(..., room=) the number of tokens you will add, or verify fewer"
        )
    # How much the longest row grows: shorter rows may get more tokens.
    stands = fetch(cache.next)
    grown = int((stands + lengths).max() - stands.max())
    left = positions_left(model, cache) if grown else 0
    if left < grown:
        raise InputError(
            f"{longest} tokens were given and the model has {left} positions after this cache: verify "
            "fewer, or use a model with a longer context"
        )
    return min(int((fit - lengths).min()), left - grown)


def takes_fewer_passes(model: Model, run: Run, cache: Cache, lengths: np.ndarray) -> bool:
    """Whether `verify` gives the results of single steps, in fewer passes than there are tokens."""
    if any(gm.split and gm.granule == 1 for gm in run.groups(model.params)):
        return False
    return not one_pass_refused(model, run, cache, lengths)


def one_pass_refused(model: Model, run: Run, cache: Cache, lengths: np.ndarray) -> str:
    """Why one pass over several tokens would differ from single steps; "" if it would not."""
    why = pass_refused(run, run.groups(model.params))
    return why or pass_over_all_refused(model, run, cache, lengths)


def pass_over_all_refused(model: Model, run: Run, cache: Cache, lengths: np.ndarray) -> str:
    """Why one pass over several tokens would differ from single steps that read all slots, or ""."""
    why, config, gms = "", run.config, run.groups(model.params)
    if any(gm.evicting and config.window(gm.first) is None for gm in gms):
        why = "its slots leave while tokens are added, so a later token would see what has left"
    elif any(isinstance(x, Codes) for g in cache.groups if g.state for x in g.state.data.values()):
        why = "a step encodes the states of recurrent layers after every token, and a pass once"
    ropes = [mixer_of(config, i).rope(config, i) for i in range(config.layers)]
    short = min((r.original_max for r in ropes if r.kind == "dynamic"), default=None)
    if not why and short is not None and int(np.max(fetch(cache.next) + lengths)) > short:
        why = f"beyond {short} tokens this model's rotation grows with every token"
    return why
