"""Which device of a mesh would hold which parts of a model and its cache, without these devices."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from kvjax.base.errors import InputError
from kvjax.commands.inspect_model import find_config
from kvjax.commands.options import LONGEST_DEFAULT
from kvjax.commands.terminal import console, pairs, size
from kvjax.io.gin_bindings import load_preset
from kvjax.mesh.on_mesh import OnMesh, parse_mesh
from kvjax.mesh.rules import as_rules
from kvjax.methods.parse import parse_method
from kvjax.models.axes import check_rules, left_whole, weight_shardings, without_axes
from kvjax.models.config import Config
from kvjax.models.params import plan
from kvjax.models.placement import leaves
from kvjax.plan.cache_sizes import CacheSizes, abstract_params
from kvjax.plan.prompts import in_words
from kvjax.state.shardings import described


def print_mesh(name: str, mesh: str, rules: str, method: str, context: int | None, dtype: str) -> None:
    """Print what each device holds of a model and its cache after `context` tokens (None: a default length).

    Raises InputError if there is no such model, mesh or method.
    """
    config, _ = find_config(name)
    axes = parse_mesh(mesh)
    on = OnMesh(AbstractMesh(tuple(axes.values()), tuple(axes)), as_rules(rules, tuple(axes)))
    check_rules(config, on)
    assert isinstance(config, Config)
    tokens = context or min(config.max_positions, LONGEST_DEFAULT)
    if tokens > config.max_positions:
        raise InputError(
            f"--context is {tokens}, expected at most the model's {config.max_positions} positions: lower it"
        )
    _, build = parse_method(method, load_preset("short" if tokens <= 1024 else "long"))
    chosen = build(0.5 if build.takes_budget else None)
    rows, out = on.devices("batch"), console()
    with out.status(f"sizing a cache of {tokens} tokens"):
        cache = dataclasses.replace(
            CacheSizes(config, dtype, tokens, [chosen], rows).cache(chosen), method=chosen
        )
    whole, each = _weights(config, dtype, on)
    words = ", ".join(f"{axis} over {name}" for axis, name in on.rules.used() if name in axes)
    out.print(
        pairs(
            [
                ("model", name),
                ("rules", f"{rules}: {words or 'everything is on every device'}"),
                ("weights", f"{size(whole)} in {dtype}, {size(each)} on each device"),
                ("cache", f"{chosen.id}, {'one row' if rows == 1 else f'{rows} rows'} of {tokens} tokens"),
            ]
        )
    )
    out.print()
    out.print(str(described(cache, on)), soft_wrap=True, highlight=False, markup=False)
    for line in (*left_whole(config, on), *without_axes(config, on)):
        out.print(f"\n{line}", soft_wrap=True, highlight=False, markup=False)
    lines = list(in_words(config, on, rows, tokens, 0, dtype))
    if lines:
        out.print(f"\nA prompt of {tokens} tokens, {tokens // on.devices('tokens')} on each device:")
    for line in lines:
        out.print(line, soft_wrap=True, highlight=False, markup=False)


def _weights(config: Config, dtype: str, on: OnMesh) -> tuple[int, int]:
    """Return the bytes of all weights of a model, and of the weights that each device holds."""
    groups, item = plan(config, stacked=False), jnp.dtype(dtype).itemsize
    place = weight_shardings(config, groups, on)
    shapes = [(path, x.shape) for path, x in leaves(abstract_params(config, dtype, stacked=False))]
    whole = sum(math.prod(shape) for _, shape in shapes)
    each = sum(math.prod(place(path, shape).shard_shape(shape)) for path, shape in shapes)
    return whole * item, each * item
