"""Fits KVLink's link tokens: documents are read alone, joined, and what follows them is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.blend import check_layers
from kvjax.api.join import spaced
from kvjax.api.links import LINKS, positions_of, read_over
from kvjax.api.prefill import prefill
from kvjax.api.rows import take_rows
from kvjax.base.checks import check_in_vocabulary, whole_number
from kvjax.base.errors import InputError
from kvjax.fitting.loops.descent import Arrays, descended
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.layers import Params
from kvjax.models.model import Model, check_single
from kvjax.state.cache import Cache
from kvjax.steps import Run


class LinkBatch(NamedTuple):
    """Joined documents with gaps for their links, where these begin, and the tokens that follow."""

    cache: Cache
    ends: Int[Array, "texts B"]
    after: Int[Array, "B T"]


def fit_links(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    tokens: int = 5,
    documents: int = 10,
    share: float = 0.5,
    batch: int = 4,
    epochs: int = 1,
    steps: int = 1,
    rate: float = 0.01,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit KVLink's link tokens to a model (Yang et al., 2025, arXiv:2502.16002), for `kvjax.join(links=)`.

    Link tokens are embeddings that stand after each of several documents which were read separately. A link
    attends to all documents and links before it, and later tokens attend to links, so they can carry to later
    tokens what separate reading lost.

    The first `share` of every text is cut into `documents` pieces of equal length. Each piece is read alone,
    and `tokens` links of its own follow it, as in the authors' code. The loss is -log p of the rest of the
    text, which attends to all pieces and links. Adam takes `steps` steps per batch, in `epochs` passes.
    Deviations: only the embeddings of links are trained, where the paper also trains the model; no special
    tokens mark where a piece begins and ends; and texts are cut at equal lengths, where the authors cut at
    random places.

    Args:
        model: the model that reads the documents.
        texts: rows of at least 4 * documents token ids.
        tokens: links after each document.
        documents: the most texts that can be joined with the links.
        share: of a text that is documents, in (0, 1).
        batch: texts per step.
        epochs: passes over the texts.
        steps: Adam's steps per batch.
        rate: the learning rate.
        seed: of the first embeddings, which are those of tokens drawn at random.
        progress: wraps the loop, as `rich.progress.track` does.

    Returns:
        Arrays for `kvjax.join` and `kvjax.save_fitted`.

    Raises:
        InputError: for texts that are too short, a share outside (0, 1), and layers that share slots.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> links = kvjax.fit_links(model, [list(range(3, 67))], tokens=2, documents=3, epochs=1)
    >>> links.arrays["links"].shape
    (1, 3, 2, 128)
    """
    check_single(model, "link the texts of one decoder")
    for name, value in zip(
        ("tokens", "documents", "batch", "epochs", "steps"),
        (tokens, documents, batch, epochs, steps),
        strict=True,
    ):
        whole_number(name, value, 1, name)
    if not 0 < share < 1:
        raise InputError(
            f"share={share!r} was given, expected the share of a text in (0, 1) that is documents"
        )
    if not texts or min(map(len, texts)) * min(share, 1 - share) < 2 * documents:
        raise InputError(f"texts are empty or too short for {documents} documents and what follows them")
    check_in_vocabulary(np.concatenate([np.asarray(text) for text in texts]), model.config.vocab)
    check_layers(model)
    model, draw = model.in_runs(), np.random.default_rng(seed)
    ids = draw.integers(model.config.vocab, size=(1, documents, tokens))
    start = {"links": model.params["embed"][jnp.asarray(ids)].astype(jnp.float32)}
    rows = [list(text[: min(map(len, texts))]) for text in texts]
    each = [rows[at : at + batch] for _ in range(epochs) for at in range(0, len(rows), batch)]
    size = round(share * len(rows[0])) // documents
    read = (cut(model, some, size, documents, tokens) for some in progress(each))
    run = Run(model.config, Method())

    def loss(arrays: Arrays, batch: LinkBatch, params: Params) -> Float[Array, ""]:
        return surprise(run, params, arrays["links"][0], batch)

    found = descended(loss, start, read, model.params, rate=rate, steps=steps)
    return Fitted(found, LINKS, model.signature)


def surprise(
    run: Run, params: Params, links: Float[Array, "texts n D"], batch: LinkBatch
) -> Float[Array, ""]:
    """Return the mean of -log p of the tokens that follow the first one after documents and links."""
    pos, rows = positions_of(batch.ends, links.shape[1]), len(batch.after)
    embed = params["embed"]
    x = jnp.broadcast_to(links.reshape(1, -1, links.shape[-1]), (rows, pos.shape[1], links.shape[-1]))
    after = embed[batch.after] * jnp.asarray(run.config.embed_scale, embed.dtype)
    x = jnp.concatenate([x.astype(embed.dtype), after], 1)
    begin = batch.ends[-1][:, None] + links.shape[1]
    pos = jnp.concatenate([pos, begin + jnp.arange(after.shape[1], dtype=jnp.int32)[None]], 1)
    said = read_over(run, params, x, pos, batch.cache).logits[:, -after.shape[1] : -1]
    logp = jax.nn.log_softmax(said.astype(jnp.float32))
    return -jnp.take_along_axis(logp, batch.after[:, 1:, None], -1).mean()


def joined_documents(
    model: Model, texts: Sequence[Sequence[Sequence[int]]], after: Sequence[Sequence[int]], tokens: int
) -> LinkBatch:
    """Read documents alone, texts[b][i] of row b, and join each row's with gaps for `tokens` links."""
    rows, documents = len(texts), len(texts[0])
    _, cache = prefill(model, [list(one) for text in texts for one in text])
    each = [take_rows(cache, [b * documents + i for b in range(rows)]) for i in range(documents)]
    joined, _, ends = spaced(model, each, tokens, len(after[0]))
    return LinkBatch(joined, jnp.asarray(ends, jnp.int32), jnp.asarray(after, jnp.int32))


def cut(model: Model, rows: Sequence[Sequence[int]], size: int, documents: int, tokens: int) -> LinkBatch:
    """Return rows whose first tokens are documents of `size` tokens, and whose others follow."""
    ends = [size * (i + 1) for i in range(documents)]
    texts = [[row[end - size : end] for end in ends] for row in rows]
    return joined_documents(model, texts, [row[ends[-1] :] for row in rows], tokens)
