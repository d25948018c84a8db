"""Levels for codes of keys and values, by the likelihood's sensitivity (KVQuant, arXiv:2401.18079)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.attending import attend_new, new_keys, published_by, rotated
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected
from kvjax.models.model import Model
from kvjax.models.stacking import layers_of_groups
from kvjax.models.transformer import decode_layers, positions, unembed
from kvjax.state.cache import NOTHING
from kvjax.steps import Run
from kvjax.steps.shared.run import held
from kvjax.store.extremes import Extremes
from kvjax.store.kmeans import best_levels
from kvjax.store.levels import ByChannel, Levels

# The number of bins into which the range [-1, 1] is cut; numbers of one bin get one level.
BINS = 1024


class Numbers(NamedTuple):
    """Keys before rotation and values of every layer, or one number for each of these."""

    k: Float[Array, "L B K T H"]
    v: Float[Array, "L B K T V"]


def fit_levels(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    bits: int | None = None,
    outliers: float | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the range of every key channel, and the levels of every layer's keys and values.

    Ranges are quantiles over all texts: half of the share `outliers` of a channel's numbers is beyond each
    end. Levels minimise sum_i F_i (x_i - Q(x_i))^2 over the numbers within the ranges, where F_i is the
    square of the gradient of the texts' negative log-likelihood (the Fisher information's diagonal; section
    3.3), so a number that was scaled to [-1, 1] has the weight F_i times its range squared. The first tokens,
    which the method stores unencoded, do not count. bits, outliers: those of the method unless they are
    given. The fit makes two passes over the texts. Raises InputError for a model whose layers are not all
    plain attention with slots of their own, for bits that are not 1 to 4, for a share that is not below 1,
    and for texts that are too short.
    """
    plan = _plan(model, method, bits, outliers)
    count = sum(max(len(row) - plan.sinks, 0) for rows in batches for row in rows)
    beyond = int(plan.outliers / 2 * count)
    if count <= 2 * beyond or all(len(row) < 2 for rows in batches for row in rows):
        raise InputError("the texts are too short to fit levels on: give rows of several tokens")
    low, high = np.zeros(0), np.zeros(0)
    for rows in progress(batches):
        given, counts = padded_rows(model, rows, plan.sinks)
        k = np.asarray(_keys(model.config, model.params, *given))
        # [L, K, H, tokens]: for each channel, the numbers that may be among the outermost of all texts.
        mine = np.moveaxis(k, (1, 3), (-2, -1))[..., counts]
        low, high = _outermost(low, mine, beyond + 1), -_outermost(-high, -mine, beyond + 1)
    low, high = low.max(-1), high.min(-1)
    centre, size = ((high + low) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)
    sums = {name: np.zeros((model.config.layers, 3, BINS)) for name in Numbers._fields}
    for rows in progress(batches):
        given, counts = padded_rows(model, rows, plan.sinks)
        numbers, gradient = felt(model.config, model.params, *given)
        k = (np.asarray(numbers.k) - centre[:, None, :, None]) / _nonzero(size)[:, None, :, None]
        weight = np.square(np.asarray(gradient.k, np.float64) * size[:, None, :, None])
        sums["k"] += _binned(k, weight, counts)
        v, spread = _by_token(np.asarray(numbers.v), plan.outliers)
        weight = np.square(np.asarray(gradient.v, np.float64) * spread)
        sums["v"] += _binned(v, weight, counts)
    levels = {
        n: np.stack([best_levels(w, s, q, 2**plan.bits) for w, s, q in each]) for n, each in sums.items()
    }
    arrays = {"key centre": centre, "key range": size}
    arrays |= {"key levels": levels["k"].astype(np.float32), "value levels": levels["v"].astype(np.float32)}
    return Fitted(arrays, "Levels", model.signature)


class LevelSettings(NamedTuple):
    """The settings of the fit: bits, the share of outliers, and the first tokens, which are not encoded."""

    bits: int
    outliers: float
    sinks: int


def _plan(model: Model, method: Method, bits: int | None, outliers: float | None) -> LevelSettings:
    only_slots(model, "levels")
    words = [*words_of(method)]
    own = [word.bits for word in words if isinstance(word, Levels)]
    shares = [word.share for word in words if isinstance(word, ByChannel)]
    plan = LevelSettings(
        own[0] if bits is None else bits,
        (shares[0] if shares else 0.0) if outliers is None else outliers,
        0 if method.store is None else method.store.sinks,
    )
    if plan.bits not in (1, 2, 3, 4):
        raise InputError(f"bits is {plan.bits}, expected 1, 2, 3 or 4")
    if not 0 <= plan.outliers < 1:
        raise InputError(f"outliers is {plan.outliers}, expected a share of the numbers in [0, 1)")
    return plan


def only_slots(model: Model, what: str) -> None:
    """Raise InputError if a layer of the model keeps no slots of its own."""
    kinds = {gm.kind for gm in Run(model.config, Method()).groups(model.params)}
    if kinds != {"slots"}:
        raise InputError(f"{what} are fitted where every layer keeps slots of its own: use another method")


def words_of(word: Any) -> Iterator[Any]:
    """Return every word of a sentence."""
    if dataclasses.is_dataclass(word):
        yield word
        for field in dataclasses.fields(word):
            yield from words_of(getattr(word, field.name))


def padded_rows(model: Model, rows: list[list[int]], sinks: int) -> tuple[tuple[Array, Array], np.ndarray]:
    """Return (tokens, lengths), and which of the tokens [B, T] count."""
    given = padded(model, rows, None)
    at = np.arange(given.tokens.shape[1])[None]
    counts = (at >= sinks) & (at < np.asarray(given.lengths)[:, None])
    return (jnp.asarray(given.tokens), jnp.asarray(given.lengths)), counts


def _outermost(held: np.ndarray, new: np.ndarray, count: int) -> np.ndarray:
    """Take the `count` smallest of the numbers on the last axis, of those held and new ones together."""
    both = np.concatenate([held, new], -1) if held.size else new
    return np.partition(both, count - 1, -1)[..., :count] if both.shape[-1] > count else both


def _nonzero(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, np.ones((), x.dtype), x)


def _by_token(
    v: Float[np.ndarray, "L B K T V"], outliers: float
) -> tuple[Float[np.ndarray, "L B K T V"], Float[np.ndarray, "L B K T 1"]]:
    """Values by the range of their token without its outliers, and that range; outliers are NaN."""
    ends = Extremes(outliers).count(v.shape[-1]) if outliers else 0
    order = np.argsort(np.argsort(v, -1, kind="stable"), -1, kind="stable")
    inner = np.where((order >= ends) & (order < v.shape[-1] - ends), v, np.nan)
    if v.shape[-1] <= 2 * ends:
        # If all numbers are outliers, none is left to have a range.
        return inner, np.zeros_like(v[..., :1])
    low, high = np.nanmin(inner, -1, keepdims=True), np.nanmax(inner, -1, keepdims=True)
    size = (high - low) / 2
    return (inner - (high + low) / 2) / _nonzero(size), size


def _binned(
    x: Float[np.ndarray, "L B K T H"], weight: Float[np.ndarray, "L B K T H"], counts: Bool[np.ndarray, "B T"]
) -> Float[np.ndarray, "L 3 N"]:
    """For every layer and bin, the sums of w, w x, w x^2 over the numbers that count and are in [-1, 1]."""
    out = []
    for mine, w in zip(x, weight, strict=True):
        inside = (np.abs(mine) <= 1) & counts[:, None, :, None]
        y, w = mine[inside].astype(np.float64), w[inside]
        at = np.minimum(((y + 1) / 2 * BINS).astype(int), BINS - 1)
        out.append([np.bincount(at, w * y**power, BINS) for power in (0, 1, 2)])
    return np.array(out)


def _read(
    config: Config,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    more: Numbers | None = None,
) -> tuple[Float[Array, ""], Numbers]:
    """Compute the negative log-likelihood of texts, and keys and values; more: what is added to these."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))

    def attend(layer: Layer, x: Projected, state: Any) -> Any:
        if x.k is None or x.v is None or x.expand is not None:
            raise InputError(
                "codes are fitted where every layer is plain attention, and this model has another kind: "
                "use another method"
            )
        k, v = x.k, x.v
        if more is not None:
            k, v = k + more.k[layer.number].astype(k.dtype), v + more.v[layer.number].astype(v.dtype)
        q, turned = (rotated(layer.rope, y, at.pos, at.length) for y in (x.q, k))
        out, _, scores = attend_new(layer, x, q, new_keys(layer, turned, v, at.pos), (), layer.pos)
        left = published_by(layer, state, turned, v, scores)
        return out, state, left | {"collected": Numbers(x.k, x.v)}

    def recur(*_: Any) -> NoReturn:
        raise AssertionError("no layer has a state")

    memory = Memory(at.pos, attend, recur, held)
    ran = decode_layers(params, tokens, config, memory, (NOTHING,) * len(layers_of_groups(params)))
    said = jax.nn.log_softmax(unembed(params, ran.x, config).astype(jnp.float32)[:, :-1])
    each = jnp.take_along_axis(said, tokens[:, 1:, None], axis=-1)[..., 0]
    loss = -jnp.where(at.pos[:, 1:] >= 0, each, 0.0).sum()
    numbers = jax.tree.map(lambda *layers: jnp.concatenate(layers).astype(jnp.float32), *ran.collected)
    return loss, numbers


@partial(jax.jit, static_argnums=0)
def _keys(
    config: Config, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, "L B K T H"]:
    return _read(config, params, tokens, lengths)[1].k


@partial(jax.jit, static_argnums=0)
def felt(
    config: Config, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Numbers, Numbers]:
    """Keys and values, and the gradient of the texts' negative log-likelihood with respect to them."""
    like = jax.eval_shape(lambda: _read(config, params, tokens, lengths)[1])
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    gradient, numbers = jax.grad(lambda more: _read(config, params, tokens, lengths, more), has_aux=True)(
        zero
    )
    return numbers, gradient
