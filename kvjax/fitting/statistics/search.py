"""Searches for budgets of layers under which a model's answers stay correct (EvolKV, arXiv:2509.08315)."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.keep.budgets.profile import ByProfile, SearchedProfile
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.steps import Run


class SearchBatch(NamedTuple):
    """Prompts with their questions, and the answers to predict after them.

    fed: the answers' tokens but the last, as inputs. said: the answers' tokens, to predict; -1 for none.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    fed: Int[Array, "B A"]
    said: Int[Array, "B A"]


def fit_budgets(
    model: Model,
    batches: list[list[Sample]],
    *,
    method: Method,
    layers: int = 8,
    epochs: int = 10,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the importance [L, K] of every layer to maximise correct answer tokens; equal for a layer's heads.

    Layers are taken in groups of `layers` neighbours, from the lowest upwards. CMA-ES (Hansen, 2016; the
    package `cmaes`) searches for the logarithms of a group's importances in `epochs` generations, with those
    of all other layers fixed at the best found so far. The objective is how often the model, given a
    compressed prompt, its question and the answer so far, predicts the answer's next token. Equal importances
    are the first candidate, so the result is never worse on these samples. Raises InputError without the
    package, for a model of one layer or whose layers differ in what they keep, and for a method that evicts
    nothing from any prompt.
    """
    check_whole(model, "budgets")
    count = model.config.layers
    if count < 2:
        raise InputError(
            "budgets are searched for between layers, and this model has one: use another method"
        )
    run, any_importance = _run(model, method)
    asked = [_asked(model, samples) for samples in batches]
    longest = max(int(one.lengths.max()) for one in asked)
    assert method.keep is not None
    if method.keep.budget.capacity(longest) >= longest:
        raise InputError(
            f"the budget {method.keep.budget.amount!r} keeps all of {longest} tokens, and budgets are "
            "searched for by what goes wrong with less: give less, as in budget=0.25"
        )

    def right(logs: Float[np.ndarray, "L"]) -> float:
        """Compute the share of answers' tokens that are right with these importances."""
        importance = np.exp(logs - logs.max()).astype(np.float32)
        each = np.repeat(importance[:, None], model.config.kv_heads, 1)
        params = model.params | {"fitted": {any_importance.digest: {"importance": jnp.asarray(each)}}}
        found = [np.asarray(_right(run, params, one)) for one in asked]
        return float(np.sum([f[0] for f in found]) / np.sum([f[1] for f in found]))

    best, score = np.zeros(count), None
    groups = np.array_split(np.arange(count), max(min(-(-count // max(layers, 2)), count // 2), 1))
    todo = [(group, turn) for group in groups for turn in range(epochs)]
    search = None
    for group, turn in progress(todo):
        score = right(best) if score is None else score
        if turn == 0:
            search = _cma()(mean=best[group], sigma=0.5, seed=seed + int(group[0]))
        assert search is not None
        told = []
        for _ in range(search.population_size):
            mine = search.ask()
            tried = best.copy()
            tried[group] = mine
            found = right(tried)
            told.append((mine, -found))
            if found > score:
                best, score = tried, found
        search.tell(told)
    importance = np.repeat(np.exp(best - best.max())[:, None], model.config.kv_heads, 1)
    return Fitted({"importance": importance.astype(np.float32)}, "SearchedProfile", model.signature)


def _cma() -> Any:
    try:
        return importlib.import_module("cmaes").CMA
    except ImportError as error:
        raise InputError(
            "budgets are searched for with the package cmaes, which is not installed: run "
            "pip install 'kvjax[fit]'"
        ) from error


def _run(model: Model, method: Method) -> tuple[Run, Fitted]:
    """Build the method's run with placeholder importances; all candidates use the same compiled programs."""
    keep = method.keep
    if keep is None or not isinstance(keep.allocate, ByProfile):
        raise InputError(f"{method.id} has no budgets that follow from a profile: fit evolkv")
    shape = (model.config.layers, model.config.kv_heads)
    any_importance = Fitted({"importance": np.ones(shape, np.float32)}, "SearchedProfile", model.signature)
    allocate = dataclasses.replace(keep.allocate, profile=SearchedProfile(any_importance))
    acting = dataclasses.replace(method, keep=dataclasses.replace(keep, allocate=allocate), spec=())
    return Run(model.config, acting), any_importance


def _asked(model: Model, samples: list[Sample]) -> SearchBatch:
    given = padded(model, [[*s.context, *s.question] for s in samples], None)
    most = max(len(s.answer) for s in samples)
    fed, said = np.zeros((len(samples), most), np.int32), np.full((len(samples), most), -1, np.int32)
    for i, sample in enumerate(samples):
        said[i, : len(sample.answer)] = sample.answer
        fed[i, : len(sample.answer) - 1] = sample.answer[:-1]
    return SearchBatch(*(jnp.asarray(x) for x in (given.tokens, given.lengths, fed, said)))


@partial(jax.jit, static_argnames=("run",))
def _right(run: Run, params: Params, asked: SearchBatch) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How many tokens of the answers the model predicts after compressed prompts, and how many there are."""
    tokens, lengths, fed, said = asked
    prompt = steps.observe(run, params, tokens, lengths, None, steps.needs_of(run, params))
    bound = tokens.shape[1]
    cache = steps.settle(run, params, prompt, None, tokens=bound, room=fed.shape[1], compress=True)
    plain = Run(run.config, run.method.decode_part())
    lengths_fed = jnp.maximum((said >= 0).sum(-1, dtype=jnp.int32) - 1, 1)
    more = steps.observe(plain, params, fed, lengths_fed, cache, frozenset(), as_steps=True).logits
    logits = jnp.concatenate([prompt.logits[:, None], more[:, :-1]], 1)
    real: Bool[Array, "B A"] = said >= 0
    right = real & (jnp.argmax(logits, -1).astype(jnp.int32) == said)
    return right.sum().astype(jnp.float32), real.sum().astype(jnp.float32)
