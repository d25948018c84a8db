"""Searches for bits of keys and values in each layer, by the errors of attention's outputs (KVTuner)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.compress.select import ComputedTokens
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Inputs, Observation
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.codes import Codec
from kvjax.steps import Run
from kvjax.store.affine import Affine
from kvjax.store.layer_bits import LayerBits

# Bits of keys and of values that are tried together.
PAIRS = tuple(itertools.product((8, 4, 2), repeat=2))


@dataclasses.dataclass(frozen=True)
class OutputErrors(Observation):
    """The number of queries, and for each pair of codecs the sum of |o - o'| / |o| over heads and queries.

    o: the output of attention, o' the same from encoded keys and values.
    """

    pairs: tuple[tuple[Codec, Codec], ...]
    spec: AttentionSpec

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, ""], Float[Array, "P"]]:
        k, v, real = inputs.k, inputs.v, inputs.pos >= 0
        assert k is not None and v is not None
        seen = (inputs.pos[:, None, :] <= inputs.pos[:, :, None]) & real[:, None, :]
        whole = self._outputs(inputs.q, k, v, seen)
        size = jnp.maximum(jnp.linalg.norm(whole, axis=-1), 1e-12)
        errors = []
        for pair in self.pairs:
            stored_k, stored_v = (
                codec.decode(codec.encode(x), x.shape[-1], x.dtype)
                for codec, x in zip(pair, (k, v), strict=True)
            )
            off = self._outputs(inputs.q, stored_k, stored_v, seen) - whole
            error = jnp.linalg.norm(off, axis=-1) / size
            errors.append(jnp.where(real[:, None, None], error, 0.0).sum())
        return real.sum().astype(jnp.float32) * inputs.q.shape[1], jnp.stack(errors)

    def _outputs(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K T H"], v: Float[Array, "B K T V"], seen: Array
    ) -> Float[Array, "B K G T V"]:
        """Attention in float32, head by head of each KV head's group."""
        q = q.reshape(*k.shape[:2], -1, *q.shape[2:]).astype(jnp.float32)
        logits = (
            jnp.einsum("bkgth,bksh->bkgts", q, k.astype(jnp.float32), precision="highest") * self.spec.scale
        )
        if self.spec.softcap is not None:
            logits = self.spec.softcap * jnp.tanh(logits / self.spec.softcap)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30), axis=-1)
        return jnp.einsum("bkgts,bksv->bkgtv", weights, v.astype(jnp.float32), precision="highest")


def fit_layer_bits(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    mean: float | int = 4,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the bits of each layer's keys and values, each 8, 4 or 2, in one pass over the texts.

    Of all choices with at most `mean` bits per number, it is the one with the smallest sum over layers of the
    relative error of attention's outputs; of two alike, the one of fewer bits. Raises InputError for a `mean`
    below 2, and for a model whose layers differ in what they keep.
    """
    check_whole(model, "bits")
    if mean < 2:
        raise InputError(f"mean is {mean:g} bits per number, expected at least 2, the fewest that are tried")
    store = method.store
    assert store is not None and isinstance(store.keys, LayerBits) and isinstance(store.values, LayerBits)
    run = Run(model.config, Method())
    pairs = tuple((_with(store.keys.codec, a), _with(store.values.codec, b)) for a, b in PAIRS)
    asked, total = OutputErrors(pairs, run.attention_spec(0)), None
    for rows in progress(batches):
        batch = padded(model, rows, None)
        found = _errors(run, asked, model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths))
        each = [np.asarray(x, np.float64) for x in found]
        total = each if total is None else [a + b for a, b in zip(total, each, strict=True)]
    assert total is not None
    best = chosen(total[1] / total[0][:, None], mean)
    bits = np.array([PAIRS[i] for i in best], np.int32)
    return Fitted({"key bits": bits[:, 0], "value bits": bits[:, 1]}, "LayerBits", model.signature)


def chosen(errors: Float[np.ndarray, "L P"], mean: float | int) -> list[int]:
    """Which pair each layer has: the smallest sum of errors with at most `mean` bits per number.

    Exact, by dynamic programming over bits spent so far.

    >>> chosen(np.array([[0, 1, 4, 1, 2, 5, 4, 5, 8.0], [0, 0, 0, 0, 0, 0, 0, 0, 1]]), 4)
    [4, 5]
    """
    cost = [a + b for a, b in PAIRS]
    # By the bits of keys and values spent: the error, and the pairs.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for row in errors:
        longer: dict[int, tuple[float, list[int]]] = {}
        for spent, (error, pairs) in best.items():
            for i, more in enumerate(cost):
                now = error + float(row[i]), [*pairs, i]
                if spent + more not in longer or now[0] < longer[spent + more][0]:
                    longer[spent + more] = now
        best = longer
    within = {spent: now for spent, now in best.items() if spent <= 2 * mean * len(errors)}
    return within[min(within, key=lambda spent: (within[spent][0], spent))][1]


def _with(codec: Affine, bits: int) -> Affine:
    return dataclasses.replace(codec, bits=bits)


@partial(jax.jit, static_argnames=("run", "asked"))
def _errors(
    run: Run, asked: OutputErrors, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "L"], Float[Array, "L P"]]:
    prompt = steps.observe(run, params, tokens, lengths, None, frozenset({asked}))
    each = [f.observed[key_of(asked)] for f in prompt.fresh if isinstance(f, ComputedTokens)]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *each)
