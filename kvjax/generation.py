"""The public verbs on a model: prefill, step, generate.

Everything here runs on the host: it checks what was given, picks static sizes (buckets, capacities) and
calls the pure functions of `kvjax.steps`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.cache import Cache, check_alive
from kvjax.errors import InputError
from kvjax.fit import check_budget, check_fit
from kvjax.grammar import Method
from kvjax.methods import method as build_method
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.not_numbers import check_scores, refuse_prompt, refuse_step
from kvjax.sampling import Sampler, draw
from kvjax.segments import free_slots, reserve
from kvjax.steps import Run
from kvjax.verbs import Lengths, OneToken, TokenIds, has_verbs, refuse


def bucket(tokens: int) -> int:
    """Smallest static length that holds `tokens`: exact to 16 below 64, to an eighth of the size above.

    >>> [bucket(n) for n in (5, 100, 512, 513, 4096)]
    [16, 104, 512, 576, 4096]
    """
    if tokens <= 64:
        return max(16, -(-tokens // 16) * 16)
    unit = 2 ** ((tokens - 1).bit_length() - 4)
    return -(-tokens // unit) * unit


_free_slots = jax.jit(free_slots, static_argnums=0)


class Batch(NamedTuple):
    """Right-padded tokens on the host, with their lengths."""

    tokens: np.ndarray
    lengths: np.ndarray


def padded(model: Model, tokens: TokenIds, lengths: Lengths | None, least: int = 1) -> Batch:
    """Checks and pads a prompt; InputError for what the model cannot take, or rows of fewer than `least`."""
    if isinstance(tokens, list | tuple) and len(tokens) and isinstance(tokens[0], list | tuple):
        if lengths is not None:
            raise InputError(
                "lengths= goes with a padded array of tokens; a list of lists has its own lengths"
            )
        rows = [np.asarray(row, np.int64) for row in tokens]
        length = np.array([len(r) for r in rows])
        array = np.zeros((len(rows), max(length, default=0)), np.int64)
        for i, row in enumerate(rows):
            array[i, : len(row)] = row
    else:
        array = np.asarray(tokens)
        if array.ndim != 2:
            raise InputError(
                f"tokens must be [B, T] or a list of lists of token ids, got shape {array.shape}: "
                "wrap a single prompt as [[...]]"
            )
        length = np.full(array.shape[0], array.shape[1]) if lengths is None else np.asarray(lengths)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"tokens must be integers (token ids), got {array.dtype}")
    if not len(array) or (length < least).any():
        raise InputError("every row needs at least one token; a prompt here is empty")
    if length.shape != array.shape[:1] or (length > array.shape[1]).any():
        raise InputError(f"lengths must be [B] and at most T = {array.shape[1]}, got {length.tolist()}")
    used = array[np.arange(array.shape[1]) < length[:, None]]
    outside = used[(used < 0) | (used >= model.config.vocab)]
    if outside.size:
        raise InputError(
            f"token id {outside[0]} is outside the vocabulary [0, {model.config.vocab}): "
            "were the tokens made with this model's tokenizer?"
        )
    size = bucket(array.shape[1])
    ids = np.zeros((array.shape[0], size), np.int32)
    ids[:, : array.shape[1]] = np.where(np.arange(array.shape[1]) < length[:, None], array, 0)
    return Batch(ids, length.astype(np.int32))


def bind(method: Method, model: Model) -> Method:
    """The method with what only the model can say: the token ids of a probe's instruction.

    Raises InputError where the method does not fit what this model's layers keep.
    """
    check_fit(method, model.config)
    keep = method.keep
    if keep is None or keep.probe is None or keep.probe.prefix is not None:
        return method
    ids: tuple[int, ...] = ()
    if model.tokenizer is not None:
        text = model.special_tokens.get("repeat_prompt", keep.probe.text)
        ids = tuple(model.tokenizer.encode(text, add_special_tokens=False).ids)
    probe = dataclasses.replace(keep.probe, prefix=ids)
    score = dataclasses.replace(keep.score, probe=probe)  # type: ignore[type-var]
    return dataclasses.replace(method, keep=dataclasses.replace(keep, probe=probe, score=score))


def check_cache(model: Model, cache: Cache) -> None:
    """InputError for a cache that another model filled, or that a step consumed."""
    check_alive(cache)
    if cache.model and cache.model != model.fingerprint:
        raise InputError(
            f"this cache was filled by another model (fingerprint {cache.model}, this model's is "
            f"{model.fingerprint}): load the model it was made with, or prefill again"
        )


def bare_cache(cache: Cache) -> Cache:
    """The cache without its labels, so that programs are shared by everything of the same layout."""
    return dataclasses.replace(cache, method=None, model="")


def labelled(cache: Cache, method: Method, model: Model) -> Cache:
    return dataclasses.replace(cache, method=method, model=model.fingerprint)


def prefill(
    model: Model,
    tokens: TokenIds,
    *,
    method: Method | str | None = None,
    cache: Cache | None = None,
    lengths: Lengths | None = None,
    room: int = 128,
    chunk: int | None = None,
    compress: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Reads a prompt: logits [B, V] at each row's last token, and the (compressed) cache.

    tokens: [B, T] with right padding and `lengths` [B], or a list of lists. With cache=, the tokens
    continue it and its method applies. room: how many further tokens the cache must hold. chunk: read that
    many tokens at a time, compressing after each. compress=False stores the new tokens and evicts nothing.
    implementation: of attention and recurrences, "reference", "tpu" or "gpu"; None takes kernels where they
    can run.

    InputError for token ids outside the vocabulary, empty or too long prompts, a foreign cache, or scores
    that are not numbers; NotImplementedError where a forced kernel cannot run.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> logits, cache = kvjax.prefill(model, [[1, 2, 3]], room=8)
    >>> logits.shape, len(kvjax.kept_positions(cache))
    ((1, 220), 4)
    """
    if has_verbs(model):
        options = {"cache=": cache is not None, "chunk=": chunk is not None, "compress=False": not compress}
        refuse(model, options | {"implementation=": implementation is not None})
        return model.prefill(tokens, method=method, lengths=lengths, room=room)
    batch = padded(model, tokens, lengths)
    chosen = method_of(model, method, cache)
    before = np.zeros(1, np.int32) if cache is None else np.asarray(cache.next)
    seen, last = int(before.max()), int(before.max() + batch.lengths.max())
    check_reach(model, last)
    if compress:
        first = batch.lengths if chunk is None else np.minimum(batch.lengths, chunk)
        check_budget(chosen, [*(before + first), *(before + batch.lengths)])
    run = Run(model.config, bind(chosen, model), implementation)
    pieces = _chunks(batch, chunk)
    logits, lost = None, []
    for piece in pieces:
        width = piece.tokens.shape[1]
        spare = room if piece is pieces[-1] else width
        if cache is not None:
            cache = _with_room(run, model, cache, width + spare)
        here, cache, unranked = steps.prefill(
            run, model.params, jnp.asarray(piece.tokens), jnp.asarray(piece.lengths),
            None if cache is None else bare_cache(cache),
            tokens_bound=bucket(seen + width) if seen else width, room=spare, compress=compress,
            watched=True,
        )  # fmt: skip
        lost.append(unranked)
        # A row that ended in an earlier chunk keeps the logits of its own last token.
        logits = here if logits is None else jnp.where((piece.lengths > 0)[:, None], here, logits)
        seen += width
    assert logits is not None and cache is not None
    check_scores(chosen.id, np.any(jax.device_get(lost), 0))
    return logits, labelled(cache, chosen, model)


def check_reach(model: Model, last: int) -> None:
    """InputError for a prompt that reaches beyond the model's positions."""
    if last > model.config.max_positions:
        raise InputError(
            f"the prompt reaches position {last}, this model's last is {model.config.max_positions}: "
            "shorten the prompt, or use a model with a longer context"
        )


def method_of(model: Model, method: Method | str | None, cache: Cache | None) -> Method:
    """The method of a prefill: the given one, or that of the cache it continues."""
    given = build_method(method) if isinstance(method, str) else method
    if cache is None:
        return given or Method()
    check_cache(model, cache)
    if given not in (None, cache.method):
        raise InputError(
            f"method {given.id!r} and a cache filled by {cache.method.id!r} were both given: "
            "a cache continues with its own method; leave method= out"
        )
    return cache.method or Method()


def _chunks(batch: Batch, chunk: int | None) -> list[Batch]:
    if chunk is None or chunk >= batch.tokens.shape[1]:
        return [batch]
    if chunk < 1:
        raise InputError(f"chunk must be a number of tokens >= 1, got {chunk}")
    out = []
    for start in range(0, int(batch.lengths.max()), chunk):
        part = batch.tokens[:, start : start + chunk]
        part = np.pad(part, ((0, 0), (0, chunk - part.shape[1])))
        out.append(Batch(part, np.clip(batch.lengths - start, 0, chunk).astype(np.int32)))
    return out


def _with_room(run: Run, model: Model, cache: Cache, tokens: int) -> Cache:
    """The cache with free slots for `tokens` more tokens in every row; grows by whole buckets."""
    gms = run.groups(model.params)
    short = tokens - int(np.asarray(_free_slots(gms, bare_cache(cache))).min())
    return cache if short <= 0 else reserve(gms, cache, bucket(short))


def step(
    model: Model,
    cache: Cache,
    token: OneToken,
    *,
    append: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """One token per row: logits [B, V] and the cache that holds it. The given cache is consumed (donated).

    append=False asks the last token again at its own position over the cache as it is, which stays usable.
    implementation: as in `prefill`. InputError when the cache has no room left, was consumed before, or
    belongs to another model.
    """
    if has_verbs(model):
        refuse(model, {"append=False": not append, "implementation=": implementation is not None})
        return model.step(cache, token)
    check_cache(model, cache)
    run = _decoding(model.config, cache.method, implementation)
    token = token if isinstance(token, jax.Array) else np.asarray(token, np.int32)
    if token.shape != cache.next.shape:
        raise InputError(
            f"token must be [B] = [{cache.next.shape[0]}], one id per row, got {list(token.shape)}"
        )
    spare = cache.spare
    if append and spare < 1:
        spare = int(np.asarray(_free_slots(run.groups(model.params), bare_cache(cache))).min())
        if spare < 1:
            raise InputError(
                "the cache is full: give prefill(..., room=) the number of tokens you will add, "
                "or call prefill(model, tokens, cache=cache, room=...), which makes room"
            )
    call = steps.step if append else steps.step_keeping
    logits, new = call(run, model.params, bare_cache(cache), token, np.full(token.shape, append))
    return logits, dataclasses.replace(
        new, method=cache.method, model=model.fingerprint, spare=spare - append
    )


@lru_cache(maxsize=1024)
def _decoding(config: Config, method: Method | None, implementation: str | None) -> Run:
    """What the steps of a method share; remembered, because building it costs as much as calling them."""
    return Run(config, (method or Method()).decode_part(), implementation)


def _stepping(
    model: Model, method: Method | None, implementation: str | None
) -> Callable[[Cache, Array, Array], tuple[Array, Cache]]:
    """`Verbs.stepping` of any model."""
    if has_verbs(model):
        return model.stepping(method)
    return partial(steps.step, _decoding(model.config, method, implementation), model.params)


# --- generation --------------------------------------------------------------------------------------


class Generated(NamedTuple):
    """tokens [B, max_new_tokens] (-1 after a row's stop token), their logprobs, and the cache behind them."""

    tokens: Int[Array, "B M"]
    logprobs: Float[Array, "B M"]
    cache: Cache


def generate(
    model: Model,
    tokens: TokenIds,
    *,
    method: Method | str | None = None,
    cache: Cache | None = None,
    lengths: Lengths | None = None,
    max_new_tokens: int = 64,
    sampler: Sampler | None = None,
    stop: Sequence[int] | None = None,
    key: Array | None = None,
    chunk: int | None = None,
    on_token: Callable[[int, np.ndarray], None] | None = None,
    implementation: str | None = None,
) -> Generated:
    """Reads a prompt and writes up to `max_new_tokens` tokens per row.

    Every written token, a stop token included, is in the returned cache, so a conversation goes on with
    generate(model, more_tokens, cache=out.cache). stop defaults to the checkpoint's stop ids. on_token is
    called with (index, tokens [B]) as they come. key: one PRNG key; rows draw from their own fold of it.
    implementation: as in `prefill`. InputError as there, and where logits are not numbers (NaN), naming the
    step, or the layer for those of the prompt.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    sampler = sampler or Sampler()
    logits, cache = prefill(
        model, tokens, method=method, cache=cache, lengths=lengths, room=max_new_tokens, chunk=chunk,
        implementation=implementation,
    )  # fmt: skip
    longest = int(np.asarray(cache.next).max()) + max_new_tokens
    if longest > model.config.max_positions:
        raise InputError(
            f"{max_new_tokens} new tokens would reach position {longest}, this model's last is "
            f"{model.config.max_positions}: lower max_new_tokens"
        )
    rows = logits.shape[0]
    root = jax.random.key(0) if key is None else key
    keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.arange(rows))
    stops = jnp.asarray(list(model.stop_ids if stop is None else stop) or [-1], jnp.int32)
    chosen = cache.method
    advance = _stepping(model, chosen, implementation)
    state, done, written, logprobs = bare_cache(cache), jnp.zeros((rows,), bool), [], []
    for i in range(max_new_tokens):
        active = ~done
        token, shown, logprob, done = draw(sampler, logits, keys, jnp.full((rows,), i), done, stops)
        logits, state = advance(state, token, active)
        written.append(shown)
        logprobs.append(logprob)
        finished, heard = jax.device_get((done.all(), logprob))
        if np.isnan(heard).any():
            if i == 0:
                refuse_prompt(model, *padded(model, tokens, lengths))
            refuse_step(i, chosen.id)
        if on_token is not None:
            on_token(i, np.asarray(shown))
        if finished:
            break
    blank = max_new_tokens - len(written)
    out = jnp.pad(jnp.stack(written, 1), ((0, 0), (0, blank)), constant_values=-1)
    return Generated(
        out, jnp.pad(jnp.stack(logprobs, 1), ((0, 0), (0, blank))), labelled(state, chosen, model)
    )
