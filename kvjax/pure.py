"""Pure functions for a user's own `jit`, `scan` or `while_loop`: no checks of values, no host, no donation.

`kvjax.prefill`, `kvjax.step` and `kvjax.generate` run these; docs/how-to/your-own-loop.md shows a loop.

>>> import kvjax
>>> static = kvjax.pure.static(kvjax.load("recall-tiny"), "snapkv(budget=0.5)")
>>> static.method
snapkv(budget=0.5)
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.compat.model_fit import check_fit
from kvjax.compat.shipped_fits import ready
from kvjax.grammar import Method
from kvjax.grammar.calls import with_probe, with_token_ids
from kvjax.grammar.fitted import with_fitted
from kvjax.mesh.on_mesh import OnMesh
from kvjax.methods import as_method
from kvjax.models.clean_spaces import uncleaned
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model, check_single
from kvjax.state.cache import Cache
from kvjax.steps import Run
from kvjax.steps.decoding.step import step_fn


class Static(NamedTuple):
    """The static settings of a method's prefills and steps; hashable, and equal for models of one config."""

    method: Method
    reading: Run
    stepping: Run


def static(model: Model, method: Method | str | None = None, *, implementation: str | None = None) -> Static:
    """Collect the static arguments of `prefill` and `step`.

    Args:
        model: a model of one decoder.
        method: as in `kvjax.prefill`; for `step`, that of the cache.
        implementation: as in `kvjax.prefill`.

    Returns:
        A hashable `Static`, for `static_argnums` of your own `jit`.

    Raises:
        InputError: where the method does not fit the model, or the model is of two decoders.
    """
    check_single(model, "call its verbs, which kvjax.prefill and kvjax.step call, outside jit")
    chosen = ready(model, as_method(method))
    reading = Run(model.config, bind(chosen, model), implementation, mesh_for(chosen, model.on_mesh))
    return Static(chosen, reading, decoding(model, chosen, implementation))


def bind(method: Method, model: Model) -> Method:
    """Complete a method from the model: token ids of a probe's instruction, and of characters.

    Raises InputError where the method does not fit what this model's layers keep, or rewrites its weights
    and did not make this model.
    """
    if method.make is not None and method.make != model.made_by:
        raise InputError(
            f"{method.id} rewrites a model's weights, and this model has its own: give the model that "
            "kvjax.prepare(model, method) returns, with its params"
        )
    check_fit(method if method.make is None else dataclasses.replace(method, make=None), model.config)
    method = _with_ids(method, model.tokenizer)
    keep = method.keep
    if keep is None or keep.probe is None:
        return method
    if keep.probe.prefix is not None:
        outside = [i for i in keep.probe.prefix if not 0 <= i < model.config.vocab]
        if outside:
            raise InputError(
                f"{method.id}: prefix has token id {outside[0]}, outside the vocabulary "
                f"[0, {model.config.vocab}): was it encoded with this model's tokenizer?"
            )
        return method
    ids: tuple[int, ...] = ()
    if model.tokenizer is not None:
        text = model.special_tokens.get("repeat_prompt", keep.probe.text)
        ids = tuple(model.tokenizer.encode(text, add_special_tokens=False).ids)
    if keep.probe.asks and not ids:
        raise InputError(
            f"{method.id} asks an instruction, and this model has no tokenizer: give its token ids as prefix="
        )
    probe = dataclasses.replace(keep.probe, prefix=ids)
    return dataclasses.replace(method, keep=with_probe(keep, probe))


def decoding(model: Model, method: Method | None, implementation: str | None) -> Run:
    """Return the static settings of a method's steps; cached: building them takes as long as a step."""
    return _decoding(model.config, method, implementation, model.on_mesh, model.tokenizer)


@lru_cache(maxsize=1024)
def _decoding(
    config: Config,
    method: Method | None,
    implementation: str | None,
    on_mesh: OnMesh | None,
    tokenizer: Any,
) -> Run:
    whole = _with_ids(method or Method(), tokenizer)
    return Run(config, whole.decode_part(), implementation, mesh_for(whole, on_mesh))


@lru_cache(maxsize=256)
def _with_ids(method: Method, tokenizer: Any) -> Method:
    """Return the method with this tokenizer's ids in words that name tokens by characters."""

    def ids_of(characters: str) -> tuple[int, ...]:
        if tokenizer is None:
            raise InputError(
                f"{method.id} chooses by what tokens are, and this model has no tokenizer: give their ids as "
                "separators="
            )
        each = [[i] for i in range(tokenizer.get_vocab_size())]
        texts = map(uncleaned(tokenizer), each)
        marks = [any(c in text for c in characters) and not any(map(str.isalnum, text)) for text in texts]
        return tuple(i for i, mark in enumerate(marks) if mark)

    return with_token_ids(method, ids_of)


def prefill(
    static: Static,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"] | None = None,
    *,
    room: int,
    fitted: PyTree = (),
) -> tuple[Float[Array, "B V"], Cache]:
    """Read a first prompt and compress its cache; perform no checks of values.

    Ids outside the vocabulary, empty rows and budgets smaller than a method's window give wrong numbers.

    Args:
        static: what `static` gave.
        params: the model's parameters.
        tokens: token ids, padded on the right.
        lengths: tokens of each row; None is T for all.
        room: free slots to allocate for further tokens.
        fitted: as in `step`.

    Returns:
        Logits [B, V] at each row's last token, and the cache.
    """
    params = _beside(params, fitted)
    whole = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32) if lengths is None else lengths
    logits, cache = steps.prefill(
        static.reading, params, tokens, whole, None, tokens_bound=tokens.shape[1], room=room, compress=True
    )
    return logits, dataclasses.replace(cache, method=static.method)


def step(
    static: Static,
    params: Params,
    cache: Cache,
    token: Int[Array, "B"],
    *,
    append: Bool[Array, "B"] | None = None,
    fitted: PyTree = (),
) -> tuple[Float[Array, "B V"], Cache]:
    """Read one token per row over a cache; the new cache has the same structure.

    A row without a free slot stores nothing, `cache.next` stays and its logits are NaN, because a traced step
    cannot raise: give `prefill` a `room` for all tokens of the loop.

    Args:
        static: what `static` gave for the cache's method.
        params: the model's parameters.
        cache: a cache; it is not consumed.
        token: one id per row.
        append: rows where it is false store nothing, and read their last token again; None stores all.
        fitted: the arrays that a method was fitted with (`fitted`); () as long as no method has any.

    Returns:
        Logits [B, V], and the cache that holds the token.

    Raises:
        InputError: for another method's cache, when the step is traced.

    >>> import jax, kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> logits, cache = kvjax.prefill(model, [[1, 2, 3]], room=4)
    >>> static = kvjax.pure.static(model, cache.method)
    >>> def write(carry, _):
    ...     logits, cache = carry
    ...     token = logits.argmax(-1).astype("int32")
    ...     return kvjax.pure.step(static, model.params, cache, token), token
    >>> (_, cache), tokens = jax.lax.scan(write, (logits, cache), length=4)
    >>> tokens.shape, cache.next.tolist()
    ((4, 1), [7])
    """
    params = _beside(params, fitted)
    if cache.method is not None and cache.method.decode_part() != static.stepping.method:
        raise InputError(
            f"this cache was filled by {cache.method.id!r}, the static part is of {static.method.id!r}: "
            "make it by kvjax.pure.static(model, cache.method)"
        )
    append = jnp.ones(token.shape, bool) if append is None else append
    return step_fn(static.stepping, params, cache, token, append)


def fitted(method: Method) -> PyTree:
    """Return the arrays that the words of a method were fitted with; () if there are none.

    >>> fitted(Method())
    ()
    """
    return with_fitted({}, method).get("fitted", ())


def _beside(params: Params, given: PyTree) -> Params:
    """Put fitted arrays beside the parameters; InputError if these are not a method's."""
    if given == ():
        return params
    strange = [name for name, arrays in given.items() if not isinstance(arrays, dict)]
    if strange:
        raise InputError(f"fitted has {', '.join(strange)}, expected kvjax.pure.fitted(method): give that")
    return params | {"fitted": given}
