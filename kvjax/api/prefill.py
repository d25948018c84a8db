"""Reading a prompt: `prefill`, and its checks, padding and chunks."""

from __future__ import annotations

import dataclasses
import os

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.chunks import bucket, plan
from kvjax.api.fit_arrays import check_fits
from kvjax.api.memory import check_memory
from kvjax.api.nan_checks import check_scores, refuse_prompt
from kvjax.api.prepare import made
from kvjax.api.program_limit import bound_programs
from kvjax.api.read_chunks import (
    PaddedTokens,
    chunk_keep,
    question_tokens,
    read_chunks,
    read_with_two_caches,
)
from kvjax.api.rollback import Added, more_added
from kvjax.api.turns import padded_to, plan_turn, turn_width
from kvjax.api.types import Lengths, TokenIds, has_verbs, refuse
from kvjax.base.checks import (
    check_in_vocabulary,
    id_array,
    is_rows,
    ragged_rows,
    whole_number,
)
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.compat.max_length import check_chunks, check_switch, last_position
from kvjax.compat.model_fit import check_budget
from kvjax.compat.shipped_fits import ready
from kvjax.compress.capacity import as_used
from kvjax.grammar import Method
from kvjax.grammar.fitted import with_fitted
from kvjax.hosts.arrays import fetch
from kvjax.methods import as_method
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.place.common import apart, has_common, is_shared
from kvjax.place.trim import counted
from kvjax.pure import bind, decoding
from kvjax.state.axes import check_rows, placed
from kvjax.state.cache import Cache, check_alive, kept_positions
from kvjax.steps import Run

# How many tokens a cache can hold beyond its prompt by default.
ROOM = 128


def padded(model: Model, tokens: TokenIds, lengths: Lengths | None, least: int = 1) -> PaddedTokens:
    """Check and pad a prompt; InputError for invalid input, or rows of fewer than `least` tokens."""
    if is_rows(tokens):
        if lengths is not None:
            raise InputError(
                "lengths= goes with a padded array of tokens; a list of lists has its own lengths"
            )
        rows = ragged_rows(tokens)
        length = np.array([len(r) for r in rows])
        array = np.zeros((len(rows), max(length, default=0)), np.int64)
        for i, row in enumerate(rows):
            array[i, : len(row)] = row
    else:
        array = id_array("tokens", tokens)
        if array.ndim != 2:
            raise InputError(
                f"tokens must be [B, T] or a list of lists of token ids, got shape {array.shape}: "
                "wrap a single prompt as [[...]]"
            )
        length = np.full(array.shape[0], array.shape[1]) if lengths is None else id_array("lengths", lengths)
    if length.shape != array.shape[:1] or (length > array.shape[1]).any():
        raise InputError(f"lengths must be [B] and at most T = {array.shape[1]}, got {length.tolist()}")
    if not len(array) or (length < least).any():
        raise InputError("every row needs at least one token; a prompt here is empty")
    check_in_vocabulary(array[np.arange(array.shape[1]) < length[:, None]], model.config.vocab)
    parts = 1 if model.on_mesh is None else model.on_mesh.devices("tokens")
    size = -(-bucket(array.shape[1]) // parts) * parts
    ids = np.zeros((array.shape[0], size), np.int32)
    ids[:, : array.shape[1]] = np.where(np.arange(array.shape[1]) < length[:, None], array, 0)
    return PaddedTokens(ids, length.astype(np.int32))


def check_cache(model: Model, cache: Cache) -> None:
    """InputError for a value that is not a cache, a cache of another model, or one that a step consumed."""
    if not isinstance(cache, Cache):
        given = f"{cache!r}" if isinstance(cache, str | os.PathLike) else f"a {type(cache).__name__}"
        raise InputError(
            f"cache is {given}, expected a Cache: give the `.cache` of what generate returned, "
            "the second of what prefill and step return, or kvjax.load_cache(path)"
        )
    check_alive(cache)
    model = made(model, cache.method)
    if cache.model and cache.model != model.fingerprint:
        raise InputError(
            f"this cache was filled by another model (fingerprint {cache.model}, this model's is "
            f"{model.fingerprint}): load the model it was made with, or prefill again"
        )


def bare_cache(cache: Cache) -> Cache:
    """Return the cache without its labels, so that all caches of the same layout share programs."""
    return dataclasses.replace(cache, method=None, model="")


def labelled(cache: Cache, method: Method, model: Model) -> Cache:
    labels = dict(method=method, model=model.fingerprint, on_mesh=mesh_for(method, model.on_mesh))
    return dataclasses.replace(cache, **labels)  # type: ignore[arg-type]


def there(model: Model, cache: Cache) -> Cache:
    """Move the cache to the model's mesh, if it is from a file, or from the same model elsewhere."""
    if cache.on_mesh is None and model.on_mesh is None:
        return cache
    on = mesh_for(cache.method or Method(), model.on_mesh)
    return cache if cache.on_mesh == on else placed(cache, on)


def noted(model: Model, cache: Cache) -> Added:
    """Return the host's note of a cache's newest tokens; 0 tokens if it has none."""
    if cache.added is not None:
        return cache.added
    run = Run(model.config, bind(cache.method or Method(), model), on_mesh=cache.on_mesh)
    return Added(run.groups(model.params), np.zeros(cache.next.shape[0], np.int32))


def prefill(
    model: Model,
    tokens: TokenIds,
    *,
    method: Method | str | None = None,
    cache: Cache | None = None,
    lengths: Lengths | None = None,
    room: int = ROOM,
    chunk: int | None = None,
    compress: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Read a prompt and compress its cache.

    Args:
        model: a model.
        tokens: token ids [B, T], padded on the right, or a list of lists.
        method: a method, its text, or None for the full cache.
        cache: a cache whose text the tokens continue; its method applies.
        lengths: tokens of each row [B], if rows are padded.
        room: free slots to allocate for further tokens.
        chunk: how many tokens to read at a time, compressing after each chunk.
        compress: False stores the new tokens and evicts nothing.
        implementation: of attention and recurrences: "reference", "tpu" or "gpu"; None takes kernels if they
            can run.

    Returns:
        Logits [B, V] at each row's last token, and the cache.

    Raises:
        InputError: for token ids outside the vocabulary, empty or too long prompts, a cache of another model
            or number of rows, a `room` beyond the model's positions, NaN in logits or scores (over a cache,
            only if all rows have NaN, since a row with NaN does not affect others), or `chunk` for a text so
            long that a dynamic rotation (NTK) depends on its length.
        NotImplementedError: if a forced kernel cannot run.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> logits, cache = kvjax.prefill(model, [[1, 2, 3]], room=8)
    >>> logits.shape, len(kvjax.kept_positions(cache))
    ((1, 220), 4)
    """
    return read_prompt(
        model, tokens, method=method, cache=cache, lengths=lengths, room=room, chunk=chunk, compress=compress,
        implementation=implementation,
    )  # fmt: skip


def read_prompt(
    model: Model, tokens: TokenIds, *, method: Method | str | None, cache: Cache | None,
    lengths: Lengths | None = None, room: int, chunk: int | None = None, compress: bool = True,
    implementation: str | None = None, turn: bool = False, cut: bool = True,
) -> tuple[Float[Array, "B V"], Cache]:  # fmt: skip
    """`prefill`; with turn=True, with the doubling sizes of a conversation (`kvjax.api.turns`).

    cut: if only the data says how many slots a KV head keeps, cuts arrays to what is in use; otherwise shapes
    are the same for all prompts of one width.
    """
    if has_verbs(model):
        options = {"cache=": cache is not None, "chunk=": chunk is not None, "compress=False": not compress}
        refuse(model, options | {"implementation=": implementation is not None})
        return model.prefill(tokens, method=method, lengths=lengths, room=room)
    chosen = method_of(model, method, cache)
    model = made(model, chosen)
    room, note = check_room(model, room, chosen), None if cache is None else cache.added
    if chunk is not None:
        chunk = whole_number("chunk", chunk, 1, "tokens read at a time")
    check_memory(model, tokens, chosen, room, chunk)
    batch = padded(model, tokens, lengths)
    if chunk is not None:
        _check_pieces(chosen, batch.lengths, chunk)
    turn = turn and chunk is None and compress
    if turn:
        batch = in_turn_width(model, batch)
    if cache is not None and cache.next.shape != batch.lengths.shape:
        raise InputError(
            f"the tokens have {len(batch.lengths)} rows, the cache {cache.next.shape[0]}, expected the same "
            "number: give tokens for every row of the cache, or copy its rows with kvjax.fork"
        )
    before = np.zeros(1, np.int32) if cache is None else fetch(cache.next)
    longest = int(batch.lengths.max())
    width = batch.tokens.shape[1] if chunk is None else min(chunk, batch.tokens.shape[1])
    _check_lengths(model, chosen, cache, batch.lengths, before, width, compress)
    on = mesh_for(chosen, model.on_mesh)
    if on is not None:
        check_rows(len(batch.lengths), on)
        n = on.devices("tokens")
        on.check("tokens", width, "tokens of a chunk", f"read chunk={-(-width // n) * n} at a time")
    bound_programs()
    cache = None if cache is None else there(model, cache)
    run = Run(model.config, bind(chosen, model), implementation, on)
    params = with_fitted(model.params, chosen)
    # Lowers the method for decode steps now, so that unsupported ones are refused before the prompt is read.
    decoding(model, chosen, implementation).groups(params)
    if cache is not None and is_shared(cache):
        cache = _apart_to_choose(run, params, cache, compress, len(before))
    cache = None if cache is None else bare_cache(cache)
    last = question_tokens(run.method, before + batch.lengths) if compress else 0
    if turn:
        most = last_position(chosen, model.config)
        cache, size = plan_turn(run, params, cache, batch.tokens.shape, tokens=longest, room=room, most=most)
        logits, cache, lost = read_chunks(run, params, batch, cache, [size], width, compress, last)
    elif last and chunk is not None and (chunks := chunk_keep(run.method)) is not None:
        logits, cache, lost = read_with_two_caches(run, chunks, params, batch, cache, width, room, last)
    else:
        cache, sizes = plan(run, params, cache, batch.lengths, width=width, room=room, compress=compress)
        logits, cache, lost = read_chunks(run, params, batch, cache, sizes, width, compress, last)
    unranked, broken = fetch((lost, jnp.isnan(logits).any(-1)))
    check_scores(chosen.id, np.any(unranked, 0))
    # Over a cache, one row that overflowed before does not affect others.
    if broken.any() if not before.any() else broken.all():
        refuse_prompt(model, *batch)
    if counted(chosen) and compress and cut:
        cache = placed(as_used(run.groups(params), cache, bucket, room), on)
    cache = labelled(cache, chosen, model)
    note = noted(model, cache) if compress or note is None else note
    return logits, dataclasses.replace(cache, added=note if compress else more_added(note, batch.lengths))


def _check_pieces(method: Method, lengths: Int[np.ndarray, "B"], chunk: int) -> None:
    """InputError if a prompt would be read in pieces, and the method picks blocks of the whole prompt."""
    reads = any(one.read_prompt is not None for one in method.sentences)
    if reads and chunk < (longest := int(lengths.max())):
        raise InputError(
            f"{method.id} picks the blocks that a prompt's queries attend to among all of its tokens, and "
            f"chunk={chunk} would read {longest} tokens in pieces: leave chunk= out, or give chunk={longest}"
        )


def _check_lengths(
    model: Model, method: Method, cache: Cache | None, lengths: Int[np.ndarray, "B"],
    before: Int[np.ndarray, "b"], width: int, compress: bool,
) -> None:  # fmt: skip
    """InputError if rows of `lengths` tokens after `before` older ones are too long for model or method.

    width: how many tokens are read at a time.
    """
    longest = int(lengths.max())
    most = int(before.max()) + longest
    check_reach(model, most, method)
    if most > model.config.max_positions + method.shared_positions:
        pieces = min(width, longest) if compress else longest
        _check_phases(model, method, 0 if cache is None else live(cache), most, pieces)
    if width < longest:
        check_chunks(model.config, most)
    check_switch(model.config, before, lengths)
    if compress:
        new = [np.minimum(lengths, at) for at in range(width, width + longest, width)]
        if method.reread is not None:
            new = [np.array([method.reread.most(int(n)) for n in rows]) for rows in new]
        check_budget(method, {int(n) for rows in new for n in before + rows})


def in_turn_width(model: Model, batch: PaddedTokens) -> PaddedTokens:
    """Pad the batch to the width of a turn."""
    parts = 1 if model.on_mesh is None else model.on_mesh.devices("tokens")
    width = -(-turn_width(int(batch.lengths.max())) // parts) * parts
    return batch._replace(tokens=padded_to(batch.tokens, width))


def _apart_to_choose(run: Run, params: Params, cache: Cache, compress: bool, rows: int) -> Cache:
    """Separate a cache's shared slots if slots are evicted: a method selects per row."""
    pairs = zip(run.groups(params), cache.groups, strict=True)
    chooses = any(run.acts(gm, compress) and has_common(group, rows) for gm, group in pairs)
    # These store the tokens that a layer selected, and rows select different ones.
    chooses = chooses or (compress and run.method.reread is not None)
    return apart(cache) if chooses else cache


def check_room(model: Model, room: int, method: Method | None = None) -> int:
    """`room` as an int; InputError unless the model's positions allow so many tokens."""
    return whole_number("room", room, 0, "further tokens", max(ROOM, last_position(method, model.config)))


def check_reach(model: Model, last: int, method: Method | None = None) -> None:
    """Raise InputError for a prompt that exceeds the positions that the model has under a method."""
    if last > (most := last_position(method, model.config)):
        raise InputError(
            f"the prompt reaches position {last}, this model's last is {most}: "
            "shorten the prompt, or use a model with a longer context"
        )


def _check_phases(model: Model, method: Method, held: int, last: int, new: int) -> None:
    """Raise InputError if reading `new` tokens at a time needs rotations beyond the model's positions."""
    assert method.keep is not None
    most, windows = model.config.max_positions, [w for w in model.config.windows if w is not None]
    phase = method.keep.phase
    held = phase.largest_rotation(max(held, method.keep.budget.capacity(last), *windows, 0))
    if held + new > most:
        raise InputError(
            f"{new} tokens at once after up to {held} {phase.counts} reach beyond the model's last "
            f"position, {most}: "
            + (f"read at most {most - held} at a time with chunk=" if held < most else "lower the budget")
        )


def live(cache: Cache) -> int:
    """Return the largest number of slots that any KV head of a cache holds."""
    return max((int((pos >= 0).sum(-1).max(initial=0)) for pos in kept_positions(cache)), default=0)


def method_of(model: Model, method: Method | str | None, cache: Cache | None) -> Method:
    """Return the method of a prefill: the given one, or that of the cache that it continues."""
    given = None if method is None else as_method(method)
    if given is not None:
        given = ready(model, given)
        check_fits(model, given)
    if cache is None:
        return given or Method()
    check_cache(model, cache)
    if given is not None and given != cache.method:
        raise InputError(
            f"method {given.id!r} and a cache filled by {cache.method.id!r} were both given: "
            "a cache continues with its own method; leave method= out"
        )
    return cache.method or Method()
