"""Checks that fitted arrays have the shapes that a method's words read, by tracing a prompt."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvjax import steps
from kvjax.api.prepare import made
from kvjax.base.atomic_files import in_short
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.fitted import fitted_words, is_fitted, with_fitted
from kvjax.models.model import Model
from kvjax.pure import bind
from kvjax.steps import Run

_TOKENS = 64
_TRACED: set[tuple[str, Method]] = set()


def check_fits(model: Model, method: Method) -> None:
    """Raise InputError if arrays of a user's file are not what a method's words read; each is traced once."""
    words = [(word.by, word.fitted) for word in fitted_words(method)]
    foreign = [(by, fitted) for by, fitted in words if fitted is not None and fitted.file]
    if not foreign or not is_fitted(method) or (model.signature, method) in _TRACED:
        return
    asked = f"run `kvjax fit {foreign[0][0]}` on this model"
    layers = model.config.layers
    for _, fitted in foreign:
        for name, x in fitted.arrays.items():
            if x.ndim == 0 or x.shape[0] not in (1, layers):
                raise InputError(
                    f"{method.id}: {fitted.file} has the array {name} {x.shape}, expected 1 or "
                    f"{layers} layers first: {asked}"
                )
    try:
        _trace(model, method)
    except InputError:
        pass  # the traced prompt is to blame, or the method's own bind raises it again
    except Exception as error:  # whatever jax and numpy raise for shapes that do not fit
        raise InputError(
            f"{method.id}: the arrays of {foreign[0][1].file} are not those that its words read "
            f"({type(error).__name__}: {in_short(error)}): {asked}"
        ) from error
    _TRACED.add((model.signature, method))


def _trace(model: Model, method: Method) -> None:
    base = made(model, method)
    run, params = Run(base.config, bind(method, base)), with_fitted(base.params, method)
    rows, one = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, _TOKENS), (1,)))
    read = partial(steps.prefill, run, cache=None, tokens_bound=_TOKENS, room=1, compress=True)
    jax.eval_shape(read, params, rows, one)
