"""Profiles of heads: how much each head retrieves of the tokens that an answer needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.compress.select import ComputedTokens, union
from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Observed, View, over_layers
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import probabilities, window_logits
from kvjax.keep.select import ranks
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import NOTHING
from kvjax.steps import Run


def fit_profile(
    model: Model,
    batches: list[list[Sample]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the importance [L, K] of every KV head: what it retrieves while the model predicts right answers.

    Every token of an answer is predicted at a query that sees the context, the question and the answer so
    far. If k tokens of the context are needed, consider the k tokens to which a head attends most at this
    query: those among them that are needed count with their probabilities, divided by k (section 4.1). This
    is summed over an answer's tokens, and the mean taken over samples and a group's heads. Raises InputError
    for a model whose layers differ in what they keep.
    """
    each = _over_samples(model, batches, progress, "profiles", "best")
    grouped = each.reshape(len(each), model.config.kv_heads, -1).mean(2)
    return Fitted({"importance": np.asarray(grouped, np.float32)}, "Profile", model.signature)


def fit_semantic_heads(
    model: Model,
    batches: list[list[Sample]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit how much query heads [L, N] attend to the tokens that answers need (arXiv:2508.02401, 3.1).

    CompressKV's score: all the attention that the needed tokens get counts, summed over an answer's tokens
    and divided by the number of needed tokens; the mean over samples. Raises InputError for a model whose
    layers differ in what they keep.
    """
    each = _over_samples(model, batches, progress, "heads", "all")
    return Fitted({"attention": np.asarray(each, np.float32)}, "SemanticHeads", model.signature)


def fit_copies(
    model: Model,
    batches: list[list[Sample]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit how often every KV head [L, K] copies: its best query head's retrieval score (arXiv:2404.15574).

    A query head copies a token of an answer if, at the query that predicts it, the token that the head
    attends to most is one that the answer needs and is the same token (section 2). The score is the share of
    an answer's tokens that are copied, the mean over samples. Raises InputError for a model whose layers
    differ in what they keep.
    """
    each = _over_samples(model, batches, progress, "profiles", "copies")
    grouped = each.reshape(len(each), model.config.kv_heads, -1).max(2)
    return Fitted({"importance": np.asarray(grouped, np.float32)}, "CopyProfile", model.signature)


def _over_samples(
    model: Model,
    batches: list[list[Sample]],
    progress: Callable[[Iterable[Any]], Iterable[Any]],
    what: str,
    counts: str,
) -> Float[np.ndarray, "L N"]:
    """Return what every query head retrieves, the mean over samples; counts: see `_retrieved`."""
    check_whole(model, what)
    run = Run(model.config, Method())
    last = max(len(sample.answer) for batch in batches for sample in batch)
    total, count = 0.0, 0
    for samples in progress(batches):
        rows = [[*s.context, *s.question, *s.answer[:-1]] for s in samples]
        given = padded(model, rows, None)
        found = _retrieved(
            run,
            model.params,
            jnp.asarray(given.tokens),
            jnp.asarray(given.lengths),
            jnp.asarray(_said(samples, last)),
            jnp.asarray(_needed(samples, given.tokens.shape[1])),
            counts=counts,
        )
        total, count = total + np.asarray(found, np.float64).sum(1), count + len(samples)
    return np.asarray(total / count)


def _needed(samples: Sequence[Sample], tokens: int) -> Bool[np.ndarray, "B T"]:
    needed = np.zeros((len(samples), tokens), bool)
    for i, sample in enumerate(samples):
        for start, end in sample.spans:
            needed[i, start:end] = True
    return needed


def _said(samples: Sequence[Sample], last: int) -> Int[np.ndarray, "B W"]:
    """Return the answer tokens that the last queries predict; -1 at queries that predict none."""
    said = np.full((len(samples), last), -1, np.int32)
    for row, sample in zip(said, samples, strict=True):
        row[last - len(sample.answer) :] = sample.answer
    return said


@partial(jax.jit, static_argnames=("run", "counts"))
def _retrieved(
    run: Run,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    said: Int[Array, "B W"],
    needed: Bool[Array, "B T"],
    *,
    counts: str,
) -> Float[Array, "L B N"]:
    """How much each head retrieves at the last queries of every row, which predict the tokens `said`.

    counts: "all" counts the attention to all needed tokens; "best" only that to needed tokens among a head's
    best, as many as are needed; both per needed token. "copies": the share of queries whose best token is
    needed and equal to the predicted token.
    """
    last = said.shape[1]
    prompt = steps.observe(run, params, tokens, lengths, None, frozenset({Queries(last)}))
    pos, length = prompt.positions
    many = needed.sum(-1, dtype=jnp.int32)
    asking = said >= 0

    def one(first: int, view: View, observed: dict[str, Any]) -> Float[Array, "B N"]:
        seen = Observed(observed, None, length, length, first, run.attention_spec(first))
        p = probabilities(window_logits(view, seen, last))
        right = needed[:, None, None, None] & asking[:, None, None, :, None]
        if counts == "copies":
            same = tokens[:, None, None, None] == said[:, None, None, :, None]
            copied = (right & same & (ranks(p) < 1)).astype(jnp.float32).sum((3, 4)).reshape(len(many), -1)
            return copied / jnp.maximum(asking.sum(-1, keepdims=True), 1).astype(jnp.float32)
        right = right & (ranks(p) < many[:, None, None, None, None]) if counts == "best" else right
        each = jnp.where(right, p, 0.0).sum((3, 4)).reshape(len(many), -1)
        return each / jnp.maximum(many, 1).astype(jnp.float32)[:, None]

    found = []
    for gm, fresh in zip(run.groups(params), prompt.fresh, strict=True):
        assert isinstance(fresh, ComputedTokens)
        view = union(gm, NOTHING, (), fresh, pos)
        found.append(over_layers(partial(one, gm.first), view, fresh.observed))
    return jnp.concatenate(found)
