"""A small classifier of tokens, fitted on what KVzip keeps of a model's cache (`fit_classifier`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvjax.api.scores import scores
from kvjax.base.errors import InputError
from kvjax.models.model import Model, check_single
from kvjax.prompts.scorer import embeddings
from kvjax.prompts.text import document

# Newton's method converges quadratically from zero, and the ridge keeps separable tokens finite.
NEWTON_STEPS, RIDGE = 20, 1e-3


class Classifier(NamedTuple):
    """The log odds that a token is kept: (h - mean) weight + bias, h its output in the last layer.

    model: the name of the model whose outputs these are.
    """

    weight: Float[np.ndarray, "D"]
    mean: Float[np.ndarray, "D"]
    bias: float
    model: str

    def logits(self, model: Model, ids: Int[np.ndarray, "T"]) -> Float[np.ndarray, "T"]:
        """Compute the log odds of every token of a text. Raises InputError for any but the fitted model."""
        if (model.name, model.config.d_model) != (self.model, len(self.weight)):
            raise InputError(
                f"the classifier was fitted on outputs of {self.model} with {len(self.weight)} channels, got "
                f"{model.name} with {model.config.d_model}: fit one with fit_classifier"
            )
        return (embeddings(model, ids).astype(np.float64) - self.mean) @ self.weight + self.bias


def fit_classifier(model: Model, texts: Sequence[str], *, keep: float = 0.5) -> Classifier:
    r"""Fit a classifier of tokens on those that KVzip keeps of some texts, for `shorten(by="llmlingua2")`.

    A token's label is whether its KVzip score (arXiv:2505.23416), the largest of all layers and KV heads, is
    among the `keep` largest of its text. The classifier is a logistic regression on the last layer's outputs.

    Args:
        model: a model of one decoder, with a tokenizer.
        texts: some texts, each within the model's positions.
        keep: the share of tokens with the label "kept", in (0, 1).

    Returns:
        A `Classifier`.

    Raises:
        InputError: for empty texts, a share outside (0, 1), and a model without a tokenizer.

    >>> import kvjax
    >>> model = kvjax.load("bytes-tiny")
    >>> kvjax.fit_classifier(model, ["def add(a, b):\n    return a + b\n" * 2]).weight.shape
    (128,)
    """
    check_single(model, "fit a classifier on one decoder")
    if isinstance(keep, bool) or not isinstance(keep, float) or not 0 < keep < 1:
        raise InputError(f"keep={keep!r} was given, expected the share of kept tokens: a number in (0, 1)")
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer, expected a model that reads text: load another one")
    if not texts or isinstance(texts, str) or not all(isinstance(t, str) and t.strip() for t in texts):
        raise InputError(f"texts are {texts!r:.80}, expected a list of texts, none of them empty")
    rows = [document(model.tokenizer, text).ids for text in texts]
    outputs = np.concatenate([embeddings(model, ids) for ids in rows]).astype(np.float64)
    labels = np.concatenate([kept_by_kvzip(model, ids, keep) for ids in rows])
    mean = outputs.mean(0)
    weight, bias = regression(outputs - mean, labels)
    return Classifier(weight, mean, bias, model.name)


def kept_by_kvzip(model: Model, ids: Int[np.ndarray, "T"], keep: float) -> Bool[np.ndarray, "T"]:
    """Which tokens have the largest KVzip scores, the largest of all layers and KV heads of each."""
    # Scores do not depend on the continuation, so the model need not write one.
    shown = scores(model, [ids.tolist()], f"kvzip(budget={keep})", continuation=[ids[-1:].tolist()])
    found = [s[0] for s in shown.scores if s is not None]
    each = np.max([s.max(0) for s in found], 0)[: len(ids)]
    out = np.zeros(len(ids), bool)
    out[np.argsort(-each, kind="stable")[: max(round(keep * len(ids)), 1)]] = True
    return out


def regression(x: Float[np.ndarray, "T D"], y: Bool[np.ndarray, "T"]) -> tuple[Float[np.ndarray, "D"], float]:
    """Logistic regression with a small ridge, by Newton's method: (weight, bias).

    It minimises mean log(1 + e^(-s z)) + ridge |w|^2 tr(x'x / T) / (2 D) with z = x w + b and s = 1 for y,
    else -1.
    """
    x = np.concatenate([x, np.ones((len(x), 1))], 1)
    penalty = RIDGE * np.square(x[:, :-1]).mean() * np.eye(x.shape[1])
    penalty[-1, -1] = 1e-9
    w = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -50, 50)))
        gradient = x.T @ (p - y) / len(x) + penalty @ w
        w = w - np.linalg.solve((x.T * (p * (1 - p))) @ x / len(x) + penalty, gradient)
    return w[:-1], float(w[-1])
