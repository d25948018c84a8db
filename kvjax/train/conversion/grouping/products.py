"""The inputs of the grouping searches: mean products of heads' weights, or of their activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.params import plan, regroup
from kvjax.steps.prefilling.observe import observe
from kvjax.steps.shared.run import Run

Products = Float[np.ndarray, "K K"]


class HeadProducts(NamedTuple):
    """One layer: entry [i, j] is the mean over all numbers of KV heads i and j of their product."""

    k: Products
    v: Products


def weight_products(params: Params, config: Config) -> list[HeadProducts]:
    """Mean products of every two heads' projection weights, biases among them, per layer, in float64.

    Raises ValueError unless every layer is plain attention.

    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=2, heads=4, kv_heads=4, head_dim=4, d_ff=32)
    >>> layers = weight_products(init(config, jax.random.key(0)), config)
    >>> len(layers), layers[0].k.shape
    (2, (4, 4))
    """
    check_plain(config)
    layers = regroup(params, plan(config, stacked=False))["layers"]
    return [HeadProducts(*(_products(_rows(p, name, config)) for name in "kv")) for p in layers]


def activation_products(
    params: Params, config: Config, tokens: Int[Array | np.ndarray, "B T"]
) -> list[HeadProducts]:
    """Mean products of every two heads' keys, and values, averaged over the rows of `tokens`, per layer.

    AsymGQA (Chen et al., 2024, arXiv:2406.14963) compares heads by it, with the mean over rows first,
    position by position, as in public code of its search (the paper's own equation was out of reach). The
    rotation of keys changes nothing: it is the same for all heads. Raises ValueError unless every layer is
    plain attention.
    """
    layers = _activations(params, config, tokens)
    return [HeadProducts(*(_products(x.mean(0).reshape(x.shape[1], -1)) for x in kv)) for kv in layers]


def key_norms(
    params: Params, config: Config, tokens: Int[Array | np.ndarray, "B T"]
) -> Float[np.ndarray, "L K"]:
    """Norms of every head's keys over all positions and channels, summed over the rows of `tokens`.

    Key-driven GQA (Khan et al., 2024, arXiv:2408.08454) allocates by them. Raises ValueError unless every
    layer is plain attention.
    """
    return np.stack([np.sqrt((k**2).sum((2, 3))).sum(0) for k, _ in _activations(params, config, tokens)])


def cosine(products: Products) -> Products:
    """Compute the products of the same heads scaled to one length: their cosine similarities.

    >>> cosine(np.array([[4.0, 1.0], [1.0, 1.0]])).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    norm = np.sqrt(np.maximum(np.diag(products), np.finfo(np.float64).tiny))
    return products / np.outer(norm, norm)


def pooling_error(products: Products, groups: Sequence[int]) -> float:
    """Mean squared difference of heads from the mean of their group: 1/K sum_i mean (w_i - w_group(i))^2.

    Of weights, its sum over keys and values is QCQA's weight-sharing error (arXiv:2406.10247; read in code
    that reproduces the paper, whose factor may differ). Raises ValueError if the groups do not name every
    head.

    >>> pooling_error(np.eye(4), [0, 0, 1, 2])
    0.25
    """
    if len(groups) != len(products):
        raise ValueError(f"groups={tuple(groups)} names {len(groups)} heads, expected {len(products)}")
    return float(pooling_errors(products, np.array([canonical(groups)]))[0])


def pooling_errors(products: Products, groups: Int[np.ndarray, "P K"]) -> Float[np.ndarray, "P"]:
    """`pooling_error` of every row, with groups numbered from 0; errors too small for float32 are 0.

    >>> pooling_errors(np.eye(2), np.array([[0, 0], [0, 1]])).tolist()
    [0.5, 0.0]
    """
    member = (groups[:, :, None] == np.arange(groups.max() + 1)).astype(np.float64)
    shared = ((products @ member) * member).sum(1) / np.maximum(member.sum(1), 1.0)
    whole = np.trace(products)
    lost = whole - shared.sum(1)
    return np.where(lost > 1e-13 * whole, lost, 0.0) / len(products)


def check_count(groups: int, heads: int) -> None:
    """Raise ValueError unless `heads` heads can form `groups` groups."""
    if not 1 <= groups <= heads:
        raise ValueError(f"{heads} heads cannot form {groups} groups: give 1 to {heads}")


def canonical(groups: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Renumber the same groups in the order of their first heads.

    >>> canonical([2, 0, 2, 5])
    (0, 1, 0, 2)
    """
    names: dict[int, int] = {}
    return tuple(names.setdefault(int(g), len(names)) for g in groups)


def _products(heads: Float[np.ndarray, "K F"]) -> Products:
    heads = heads.astype(np.float64)
    return heads @ heads.T / heads.shape[1]


def _rows(p: Params, name: str, config: Config) -> Float[np.ndarray, "K F"]:
    """Return the weights of a layer's heads, a bias as one more row of each matrix: [K, (D + 1) H]."""
    leaves = [p[name][0]] + ([p[f"{name}_bias"]] if f"{name}_bias" in p else [])
    whole = np.concatenate([np.asarray(w, np.float64) for w in leaves])
    heads = whole.reshape(len(whole), -1, config.head_dim)
    return np.swapaxes(heads, 0, 1).reshape(heads.shape[1], -1)


def _activations(
    params: Params, config: Config, tokens: Int[Array | np.ndarray, "B T"]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rotated keys and values [B, K, T, H] of every layer, in float64."""
    check_plain(config)
    layers = _read(regroup(params, plan(config, stacked=False)), jnp.asarray(tokens, jnp.int32), config)
    return ((np.asarray(k, np.float64), np.asarray(v, np.float64)) for k, v in layers)


@partial(jax.jit, static_argnames="config")
def _read(params: Params, tokens: Int[Array, "B T"], config: Config) -> list[tuple[Array, Array]]:
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    prompt = observe(Run(config, Method()), params, tokens, lengths, None, frozenset())
    layers: tuple[Any, ...] = prompt.fresh
    return [(layer.k[0], layer.v[0]) for layer in layers]


def check_plain(config: Config) -> None:
    """Raise ValueError unless every layer is plain attention."""
    if any(mixer_of(config, i) != Attention() for i in range(config.layers)):
        raise ValueError("heads are compared in models whose layers are all plain attention")
