"""Selects the trained weights: all, those with some names, or low-rank updates of some matrices (LoRA).

Trained and frozen weights are two trees of the model's form, each with None where the other has the weight. A
matrix trained by LoRA is in the second, and the first has its `Adapter`. Names of parameters read "embed" or
"layers.3.q", however layers are stacked.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import Group, layer_shapes, plan
from kvjax.models.placement import map_leaves
from kvjax.train.settings import Tune


class Adapter(NamedTuple):
    """A change of low rank R of matrices: down @ up, times a scale."""

    down: Float[Array, "Lg *a D R"]
    up: Float[Array, "Lg *a R F"]


class FrozenWeights(NamedTuple):
    """The frozen weights, and the scale of the adapters."""

    params: Params
    scale: Float[Array, ""]


def kinds(config: Config, tune: Tune) -> dict[str, str]:
    """How every parameter is trained, by name: "trained", "lora" or "fixed".

    Raises InputError if a pattern names nothing, nothing is trained, or LoRA is applied to something that is
    not a matrix.

    >>> from kvjax.train.settings import SIZES
    >>> of = kinds(Config(vocab=8, **SIZES), Tune(lora=("*.q",), trained=("norm",)))
    >>> of["layers.3.q"], of["norm"], of["embed"]
    ('lora', 'trained', 'fixed')
    """
    ranks = {"embed": 2, "norm": 1} | ({} if config.tied else {"unembed": 2})
    for i in range(config.layers):
        ranks |= {f"layers.{i}.{name}": len(shape) for name, shape in layer_shapes(config, i).items()}
    chosen = tune.trained if tune.trained is not None else () if tune.lora else ("*",)
    for field, patterns in (("trained", chosen), ("frozen", tune.frozen), ("lora", tune.lora)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in ranks):
                raise InputError(
                    f"tune.{field}: no parameter is called {pattern!r}: names read like "
                    f"{', '.join([*ranks][-3:])} or embed"
                )
    of = {}
    for name, rank in ranks.items():
        of[name] = "fixed" if _any(name, tune.frozen) or not _any(name, chosen) else "trained"
        if _any(name, tune.lora) and not _any(name, tune.frozen):
            of[name] = "lora"
            if rank < 2 or not name.startswith("layers."):
                raise InputError(
                    f"tune.lora names {name}, which is no matrix of a layer: name matrices, such as '*.q'"
                )
    if {*of.values()} == {"fixed"}:
        raise InputError("tune leaves nothing that learns: name some parameters in tune.trained or tune.lora")
    return of


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def groups_of(config: Config, of: dict[str, str]) -> tuple[Group, ...]:
    """How layers are stacked: as in `plan`, in runs of layers that are trained alike."""

    def learns(layer: int) -> list[str]:
        return [of[f"layers.{layer}.{name}"] for name in layer_shapes(config, layer)]

    groups = []
    for first, size, _ in plan(config, patterns=False):
        cuts = [i for i in range(first + 1, first + size) if learns(i) != learns(i - 1)]
        ends = [*cuts, first + size]
        groups += [Group(a, b - a) for a, b in zip([first, *cuts], ends, strict=True)]
    return tuple(groups)


def split(params: Params, groups: tuple[Group, ...], of: dict[str, str], tune: Tune, key: Array) -> Any:
    """Return (trained, frozen) parameters, stacked by `groups`.

    An adapter is initially the identity: `down` with variance 1 / fan-in, `up` at zero (arXiv:2106.09685,
    section 4.1).
    """

    def kind(path: str) -> str:
        if not path.startswith("layers."):
            return of[path]
        _, group, name = path.split(".")
        return of[f"layers.{groups[int(group)].first}.{name}"]

    def learns(path: str, x: Array) -> Any:
        if kind(path) == "fixed":
            return None
        if kind(path) == "trained":
            return x
        *stack, d, f = x.shape
        drawn = jax.random.normal(jax.random.fold_in(key, crc32(path.encode())), (*stack, d, tune.rank))
        return Adapter(drawn * d**-0.5, jnp.zeros((*stack, tune.rank, f)))

    fixed = map_leaves(lambda path, x: None if kind(path) == "trained" else x, params)
    scale = jnp.asarray(tune.alpha / tune.rank, jnp.float32)
    return map_leaves(learns, params), FrozenWeights(fixed, scale)


def joined(trained: Any, fixed: FrozenWeights | None) -> Params:
    """Join the model's parameters from the trained and the frozen; None: all are trained.

    >>> frozen = FrozenWeights({"a": None, "b": jnp.zeros(1)}, jnp.ones(()))
    >>> joined({"a": jnp.ones(2), "b": None}, frozen)["b"].shape
    (1,)
    """
    if fixed is None:
        return trained

    def one(learns: Any, stays: Any) -> Array:
        if isinstance(learns, Adapter):
            return stays + fixed.scale * jnp.matmul(learns.down, learns.up)
        return stays if learns is None else learns

    whole = lambda x: x is None or isinstance(x, Adapter)  # noqa: E731
    return jax.tree.map(one, trained, fixed.params, is_leaf=whole)


def check_finite(params: Any, what: str) -> None:
    """Raise InputError if a weight of `what` is NaN or infinite, with the names of the first of them."""
    found = jax.tree.leaves_with_path(_all_finite(params))
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, ok in found if not bool(ok)]
    if names:
        raise InputError(f"{what} has weights that are NaN or infinite: {', '.join(names[:4])}")


@jax.jit
def _all_finite(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), params)
