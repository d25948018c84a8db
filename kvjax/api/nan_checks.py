"""Error messages for NaN in a model's outputs or a method's scores."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax import steps
from kvjax.api.types import has_verbs
from kvjax.base.errors import InputError
from kvjax.compress.select import ComputedTokens
from kvjax.grammar import Method
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation
from kvjax.hosts.arrays import fetch
from kvjax.models.model import Model
from kvjax.steps import Run

_observe = jax.jit(steps.observe, static_argnames=("run", "needs"))


@dataclasses.dataclass(frozen=True)
class _Broken(Observation):
    """Whether any token's input to a layer is NaN."""

    def __call__(self, inputs: Inputs) -> Bool[Array, ""]:
        return (jnp.isnan(inputs.hidden).any(-1) & (inputs.pos >= 0)).any()


def check_scores(name: str, lost: np.ndarray) -> None:
    """InputError naming the first layer with a NaN score, given `lost` [layers, B]."""
    if lost.any():
        layer, row = np.argwhere(lost)[0]
        raise InputError(
            f"{name}: a score of layer {layer} (row {row}) is not a number, so its slots cannot be ranked: "
            "correct the score, or its hyper-parameters"
        )


def refuse_prompt(model: Model, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """InputError saying that a prompt's logits are NaN, and which layer's output was the first."""
    raise InputError(
        f"the logits of the prompt are not numbers (NaN){_source(model, tokens, lengths)}: check the weights "
        "and the type they are loaded in (dtype=)"
    )


def refuse_step(step: int, name: str) -> None:
    """InputError saying that the logits after a generated token are NaN."""
    raise InputError(
        f"the logits, or a score of the method, are not numbers (NaN) at step {step} with method {name}, "
        "after those of the prompt were: try method full, or another dtype="
    )


def refuse_processed(step: int) -> None:
    """InputError saying that processors left a step without a token."""
    raise InputError(
        f"the processors leave no token to choose at step {step}: their logits are not numbers (NaN), or all "
        "-inf: correct them, or let them allow at least one token"
    )


def _source(model: Model, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, "B"]) -> str:
    """Where the NaN of a prompt comes from; empty if reading the prompt again does not show it."""
    if has_verbs(model):
        return ""
    run, word = Run(model.config, Method(), on_mesh=model.on_mesh), _Broken()
    found = _observe(run, model.params, jnp.asarray(tokens), jnp.asarray(lengths), None, frozenset({word}))
    if not np.isnan(fetch(found.logits)).any():
        return ", which they are without the cache"
    for gm, fresh in zip(run.groups(model.params), found.fresh, strict=True):
        bad = np.flatnonzero(fetch(fresh.observed[key_of(word)]) if isinstance(fresh, ComputedTokens) else [])
        if len(bad):
            layer = gm.number(int(bad[0]))
            return f", first in the output of {f'layer {layer - 1}' if layer else 'the embedding'}"
    return f", first in the output of layer {model.config.layers - 1} or of the last matrix"
