"""A mesh with its rules, which give the sharding of any array."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from kvjax.base.errors import InputError
from kvjax.mesh.rules import Rules, as_rules

# One logical axis per axis of an array; None: never split.
Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A mesh and the rules by which arrays are split over it; static and hashable.

    mesh: its axes are automatic: XLA's partitioner (GSPMD) derives the rest from the given shardings. An
    abstract mesh has no devices and serves to see which device would hold what.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules

    def devices(self, axis: str) -> int:
        """Into how many parts a logical axis is split.

        >>> OnMesh(as_mesh("data=1"), Rules(batch="data")).devices("batch")
        1
        """
        return math.prod(self.mesh.shape[name] for name in self.rules.mesh_axes(axis))

    def over(self, axis: str) -> str:
        """Return the mesh axes of a logical axis with their sizes, as text: "model=4"."""
        return " x ".join(f"{name}={self.mesh.shape[name]}" for name in self.rules.mesh_axes(axis))

    def splits(self, axis: str | None, size: int) -> bool:
        """Whether an axis of that size is split."""
        n = 1 if axis is None else self.devices(axis)
        return n > 1 and size % n == 0

    def parts(self, axis: str, size: int) -> int:
        """Into how many parts an axis of that size is split; 1 if it stays whole."""
        return self.devices(axis) if self.splits(axis, size) else 1

    @property
    def slots_instead(self) -> bool:
        """Whether slots are split over the same devices if heads cannot be."""
        return bool({*self.rules.mesh_axes("slots")} & {*self.rules.mesh_axes("kv_heads")})

    def parts_of_a_list(self, lists: int) -> int:
        """Over how many devices the slots of a KV head may be split, in a layer with `lists` KV heads."""
        return 1 if self.slots_instead and self.splits("kv_heads", lists) else self.devices("slots")

    def token_axes(self, tokens: int) -> tuple[str, ...]:
        """Find the mesh axes over which so many tokens of a prompt are split; none if they do not divide."""
        return self.rules.mesh_axes("tokens") if self.splits("tokens", tokens) else ()

    def with_whole_tokens(self) -> OnMesh:
        """Keep prompts replicated on every device, and the rest the same."""
        return dataclasses.replace(self, rules=self.rules.but(tokens=None))

    @property
    def with_whole_layers(self) -> OnMesh | None:
        """The same, if every device has parts of every layer; None if layers are split."""
        return self if self.devices("layers") == 1 else None

    def with_whole_slots(self) -> OnMesh:
        """Keep the slots of a KV head together, and the rest the same."""
        return dataclasses.replace(self, rules=self.rules.but(slots=None))

    def spec(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Build the partition spec of an array of that shape; axes that do not divide are not split."""
        if not math.prod(shape):
            return PartitionSpec()
        taken: set[str] = set()
        parts: list[str | tuple[str, ...] | None] = []
        for axis, size in zip(axes, shape, strict=True):
            names = () if axis is None or not self.splits(axis, size) else self.rules.mesh_axes(axis)
            # If KV heads are split already, their slots stay together.
            names = () if taken & {*names} else names
            taken |= {*names}
            parts.append(names if len(names) > 1 else names[0] if names else None)
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    def sharding(self, axes: Axes, shape: Sequence[int], memory: str | None = None) -> NamedSharding:
        """`spec` on this mesh, in a memory kind of the devices; None: their own memory."""
        return NamedSharding(self.mesh, self.spec(axes, shape), memory_kind=memory)

    def pin(self, x: Array, axes: Axes, memory: str | None = None) -> Array:
        """Add a sharding constraint to x, inside a program."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape, memory))

    def check(self, axis: str, size: int, what: str, instead: str) -> None:
        """InputError if `size` of `what` cannot be split as the rules say. instead: a size that could."""
        if size % self.devices(axis):
            name = "sequence" if axis == "tokens" else "tensor"
            raise InputError(
                f"{size} {what} do not divide over mesh axis {self.over(axis)}: {instead}, or leave them "
                f"whole with rules such as kvjax.Rules.named({name!r}).but({axis}=None)"
            )


def on_mesh(mesh: Any, rules: Any) -> OnMesh | None:
    """Combine the user's `mesh=` and `rules=`; None if neither is given, and then nothing is split.

    Raises InputError for an invalid mesh or rules, rules without a mesh, and a mesh without rules.
    """
    if mesh is None and rules is None:
        return None
    if mesh is None:
        raise InputError(f"rules={rules!r} was given without a mesh: add mesh='data=2,model=4' or a Mesh")
    if rules is None:
        raise InputError("mesh= was given without rules: add rules='tensor', or a kvjax.Rules")
    real = as_mesh(mesh)
    return OnMesh(real, as_rules(rules, real.axis_names))


def as_mesh(mesh: Any) -> Mesh:
    """Make a mesh, or text such as "data=2,model=4", a mesh with automatic axes over the first devices.

    Raises InputError if it is neither, or has more devices than there are.

    >>> as_mesh("model=1").axis_names
    ('model',)
    """
    if isinstance(mesh, str):
        sizes = parse_mesh(mesh)
        count = math.prod(sizes.values())
        if count > jax.device_count():
            raise InputError(
                f"mesh {mesh!r} has {count} devices, and there are {jax.device_count()}: lower its sizes; on "
                f"a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={count} makes as many"
            )
        if jax.process_count() > 1 and count < jax.device_count():
            raise InputError(
                f"mesh {mesh!r} has {count} devices, and {jax.process_count()} hosts have "
                f"{jax.device_count()}, of which none can stand aside: raise its sizes, or give a Mesh"
            )
        devices = np.array(jax.devices()[:count]).reshape(*sizes.values())
        return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    if not isinstance(mesh, Mesh):
        raise InputError(f"mesh is {mesh!r}, expected a jax.sharding.Mesh, or words as in 'data=2,model=4'")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def parse_mesh(words: str) -> dict[str, int]:
    """Parse the sizes of a mesh's axes by name. InputError if the text is not of the form a=2,b=4.

    >>> parse_mesh("data=2,model=4")
    {'data': 2, 'model': 4}
    """
    parts = words.split(",")
    found = [re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*", part) for part in parts]
    sizes = {match[1]: int(match[2]) for match in found if match is not None}
    if len(sizes) < len(parts):
        raise InputError(
            f"mesh {words!r} is not understood, expected names and sizes as in data=2,model=4, each name once"
        )
    return sizes
