"""Traces a user's own methods before anything runs, so that mistakes show at once and not hours later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from kvjax import steps
from kvjax.api.prepare import made
from kvjax.base.errors import InputError
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.runner import bare_run
from kvjax.grammar.fitted import with_fitted
from kvjax.methods import METHODS
from kvjax.models.model import Model
from kvjax.steps import Run


def check_traced(model: Model, entries: Sequence[PlannedCell], tokens: int) -> None:
    """Trace a prompt and a step of every method that is not the library's own, without computing anything.

    tokens: of the prompt. One budget per method is traced; the others differ in numbers alone.

    Raises InputError, naming the method, if one of its words fails, or returns another shape or type than its
    protocol requires.
    """
    own = (e for e in entries if any(one.id not in METHODS for one in e.method.sentences))
    for entry in {e.label: e for e in own}.values():
        base = made(model, entry.method)
        run, params = bare_run(model, entry.method), with_fitted(base.params, entry.method)
        rows = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        step = Run(base.config, entry.method.decode_part(), on_mesh=run.on_mesh)
        try:
            read = partial(steps.prefill, run, cache=None, tokens_bound=tokens, room=1, compress=True)
            _, cache = jax.eval_shape(read, params, rows, one)
            asked = jax.ShapeDtypeStruct((1,), jnp.bool_)
            jax.eval_shape(partial(steps.step_fn, step), params, cache, one, asked)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{entry.label} cannot run: {error} ({type(error).__name__}): correct the method"
            ) from error
