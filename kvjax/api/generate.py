"""Writing text: `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.beam_search import search
from kvjax.api.decode_loop import advancing, write
from kvjax.api.fork import fork
from kvjax.api.logit_processors import Processor, history
from kvjax.api.memory import check_memory
from kvjax.api.nan_checks import refuse_prompt, refuse_step
from kvjax.api.prefill import ROOM, bare_cache, check_reach, labelled, method_of, padded, read_prompt
from kvjax.api.prepare import made
from kvjax.api.rollback import of_rows
from kvjax.api.sampling import Sampler
from kvjax.api.step import positions_left, stepping
from kvjax.api.stop_strings import StopStrings
from kvjax.api.types import Lengths, TokenIds, has_verbs
from kvjax.base.checks import (
    callables,
    prng_key,
    stop_ids,
    whole_number,
)
from kvjax.base.errors import InputError
from kvjax.compat.max_length import check_switch, last_position
from kvjax.grammar import Method
from kvjax.hosts.arrays import fetch
from kvjax.models.model import Model
from kvjax.state.cache import Cache


class Generated(NamedTuple):
    """tokens [R, max_new_tokens], their logprobs, the cache after them, and the rows as text.

    R = B, or B * samples, or B * beams: rows[r] is the prompt of row r, scores[r] its summed logprobs. Rows
    of one prompt are neighbours, beams the best first. Row r wrote tokens[r, :lengths[r]], a stop token
    included; after it come padding (the model's pad token, else a stop token) and logprobs of 0. texts: the
    rows as text without stop tokens and special tokens; None if the model has no tokenizer.
    """

    tokens: Int[Array, "R M"]
    logprobs: Float[Array, "R M"]
    cache: Cache
    scores: Float[Array, "R"]
    rows: Int[np.ndarray, "R"]
    lengths: Int[np.ndarray, "R"]
    texts: list[str] | None


def generate(
    model: Model,
    tokens: TokenIds,
    *,
    method: Method | str | None = None,
    cache: Cache | None = None,
    lengths: Lengths | None = None,
    max_new_tokens: int = 64,
    sampler: Sampler | None = None,
    processors: Sequence[Processor] = (),
    stop: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    samples: int = 1,
    beams: int = 1,
    key: Array | None = None,
    chunk: int | None = None,
    on_token: Callable[[int, np.ndarray], None] | None = None,
    implementation: str | None = None,
) -> Generated:
    """Read a prompt and generate up to `max_new_tokens` tokens per row.

    Every generated token, a stop token included, is in the returned cache, so a conversation continues with
    generate(model, more_tokens, cache=out.cache).

    Args:
        model: a model.
        tokens: token ids [B, T], padded on the right, or a list of lists.
        method: a method, its text, or None for the full cache.
        cache: a cache whose text the tokens continue; its method applies.
        lengths: tokens of each row [B], where rows are padded.
        max_new_tokens: the most tokens that a row generates.
        sampler: how tokens are drawn; None takes the likeliest.
        processors: functions (logits [B, V], tokens so far [B, T], -1 as padding) -> logits, applied in
            order; the tokens are those of this prompt and the generated ones.
        stop: token ids that end a row; None takes the checkpoint's.
        stop_strings: texts that end a row once it contains one.
        samples: how many texts to draw for each prompt, which is read once.
        beams: how many texts beam search looks for, by summed log-probability.
        key: one PRNG key; every row draws from its own fold of it.
        chunk: as in `prefill`.
        on_token: called with (index, tokens [R]) for each token, -1 for rows that have ended.
        implementation: as in `prefill`.

    Returns:
        A `Generated`: tokens [R, max_new_tokens], their log-probabilities, texts, and the cache; R = B, or
        B * samples, or B * beams.

    Raises:
        InputError: for what `prefill` refuses, wrong kinds of `max_new_tokens`, `stop` or `key`, more tokens
            than positions, options that exclude each other, and NaN in logits, naming the step, or the layer
            if they are in the prompt.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> out = kvjax.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=2, beams=3)
    >>> out.tokens.shape, out.rows.tolist(), bool(out.scores[0] >= out.scores[1])
    ((6, 2), [0, 0, 0, 1, 1, 1], True)
    """
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, "tokens")
    plain = not has_verbs(model)
    chosen = method_of(model, method, cache)
    model = made(model, chosen)
    last = last_position(chosen, model.config)
    asked = _Options(
        max_new_tokens, jax.random.key(0) if key is None else prng_key(key), sampler or Sampler(),
        callables("processors", processors), model.stop_ids if stop is None else stop, stop_strings,
        samples, beams, on_token, implementation,
    )  # fmt: skip
    stops = _checked(asked)
    if plain:
        chunk = None if chunk is None else whole_number("chunk", chunk, 1, "tokens read at a time")
        check_memory(model, tokens, chosen, max_new_tokens, chunk)
    _check_prompt(model, (tokens, lengths), chosen, cache, max_new_tokens, last)
    # `model` may be a rewritten model: only the method with its fitted arrays matches it.
    logits, cache = read_prompt(
        model, tokens, method=None if cache is not None else chosen, cache=cache, lengths=lengths,
        room=max_new_tokens, chunk=chunk, implementation=implementation, turn=cache is not None,
    )  # fmt: skip
    rows = fetch(cache.next)
    check_switch(model.config, rows, max_new_tokens)
    stands = int(rows.max())
    if last > model.config.max_positions:
        last = stands + positions_left(model, cache)
    _check_reach(max_new_tokens, stands + max_new_tokens, last, last)
    return _written(model, (tokens, lengths), logits, cache, asked, stops)


class _Options(NamedTuple):
    """The options of `generate` besides the prompt."""

    new: int
    key: Array
    sampler: Sampler
    processors: tuple[Processor, ...]
    stop: Sequence[int]
    stop_strings: Sequence[str]
    samples: int
    beams: int
    on_token: Callable[[int, np.ndarray], None] | None
    implementation: str | None


def _written(
    model: Model, prompt: tuple[TokenIds, Lengths | None], logits: Float[Array, "B V"], cache: Cache,
    asked: _Options, stops: Int[Array, "S"],
) -> Generated:  # fmt: skip
    """Generate the texts after a prompt that was read."""
    chosen, state, copies = cache.method, bare_cache(cache), max(asked.samples, asked.beams)
    rows = np.repeat(np.arange(logits.shape[0]), copies)
    if copies > 1:
        logits, state = logits[rows], fork(state, copies, room=asked.new)

    def refuse_nan(at: int) -> None:
        if at == 0:
            refuse_prompt(model, *padded(model, *prompt))
        refuse_step(at, chosen.id)

    loop: dict[str, Any] = dict(
        new=asked.new, stop=stops, refuse_nan=refuse_nan, processors=asked.processors,
        past=_past(model, *prompt, asked.new)[rows] if asked.processors else None,
    )  # fmt: skip
    one, params = stepping(model, chosen, asked.implementation)
    if asked.beams > 1:
        found, state = search(advancing(one, params, len(rows)), logits, state, beams=asked.beams, **loop)
        texts = fetch((found.tokens, found.logprobs, found.scores))
        written, logprobs, scores = (x.reshape(len(rows), *x.shape[2:]) for x in texts)
    else:
        ends = StopStrings(model, asked.stop_strings, len(rows)) if asked.stop_strings else None
        written, logprobs, state = write(
            one, params, logits, state, sampler=asked.sampler, key=asked.key, ends=ends,
            on_token=asked.on_token, **loop,
        )  # fmt: skip
        scores = logprobs.sum(-1)
    after = dataclasses.replace(labelled(state, chosen, model), added=of_rows(cache.added, rows))
    ids, ends = np.asarray(written), {i for i in np.asarray(stops).tolist() if i >= 0}
    lengths = (ids >= 0).sum(-1)
    shown = np.where(ids >= 0, ids, _pad_id(model, ends))
    return Generated(
        jnp.asarray(shown), jnp.asarray(logprobs), after, jnp.asarray(scores), rows, lengths,
        _texts(model, ids, ends),
    )  # fmt: skip


def _pad_id(model: Model, ends: set[int]) -> int:
    """Return the padding after a row's last token: the pad token, or a stop token, which tokenizers know."""
    pad = model.special_tokens.get("pad_token")
    known = None if model.tokenizer is None or pad is None else model.tokenizer.token_to_id(pad)
    return min(ends, default=0) if known is None else known


def _texts(model: Model, ids: Int[np.ndarray, "R M"], ends: set[int]) -> list[str] | None:
    if model.tokenizer is None:
        return None
    rows = [[i for i in row if i >= 0 and i not in ends] for row in ids.tolist()]
    return [model.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def _check_prompt(
    model: Model, prompt: tuple[TokenIds, Lengths | None], method: Method, cache: Cache | None, new: int,
    last: int,
) -> None:  # fmt: skip
    """InputError, before the prompt is read, if it and the new tokens exceed the positions.

    If a method reads fewer tokens than it is given, or texts may outgrow the positions, this is checked
    later.
    """
    if has_verbs(model) or method.reread is not None or last > model.config.max_positions:
        return _check_reach(new, new, max(ROOM, last), last)
    seen = np.zeros(1, np.int32) if cache is None else fetch(cache.next)
    rows = padded(model, *prompt).lengths
    stands = int(seen.max()) + int(rows.max())
    check_reach(model, stands, method)
    if len(seen) in (1, len(rows)):
        check_switch(model.config, seen + rows, new)
    _check_reach(new, stands + new, last, last)


def _check_reach(new: int, longest: int, most: int, last: int) -> None:
    left = last - longest + new
    if longest > most:
        raise InputError(
            f"{new} new tokens would reach position {longest}, this model's last is {last}: "
            + (f"lower max_new_tokens to {left}" if left > 0 else "shorten the prompt")
        )


def _past(model: Model, tokens: TokenIds, lengths: Lengths | None, new: int) -> Int[Array, "B S"]:
    """Return the tokens so far, as processors see them."""
    batch = padded(model, tokens, lengths)
    return history(jnp.asarray(batch.tokens), jnp.asarray(batch.lengths), new)


def _checked(asked: _Options) -> Int[Array, "S"]:
    """Check options and return the stop tokens, -1 for none.

    InputError for invalid numbers of texts, and for options that exclude each other.
    """
    stops, sampler = stop_ids(asked.stop) or [-1], asked.sampler
    if not callable(sampler):
        raise InputError(f"sampler is {sampler!r}, expected a kvjax.Sampler, such as kvjax.Sampler(1.0)")
    samples = whole_number("samples", asked.samples, 1, "texts of each prompt")
    beams = whole_number("beams", asked.beams, 1, "texts to search for")
    if samples > 1 and sampler.temperature == 0:
        raise InputError(
            f"samples={samples} was given at temperature 0, expected a draw: add sampler=kvjax.Sampler(1.0)"
        )
    others = {
        "samples=": samples > 1,
        "a sampler": sampler != Sampler(),
        "stop_strings=": bool(asked.stop_strings),
        "on_token=": asked.on_token is not None,
    }
    if beams > 1 and (given := [name for name, there in others.items() if there]):
        raise InputError(
            f"beams={beams} was given with {' and '.join(given)}: beams are searched, not drawn, and known "
            "at the end; leave one of them out"
        )
    return jnp.asarray(stops, jnp.int32)
