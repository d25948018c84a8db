"""Which mesh a preset of `kvjax.mesh.rules` gets on a topology, if none is given."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.grammar import Method
from kvjax.mesh.on_mesh import OnMesh, parse_mesh
from kvjax.mesh.rules import AXES, DATA, PRESETS, MeshAxes, Rules, as_rules
from kvjax.models.axes import check_rules, left_whole
from kvjax.models.config import Config
from kvjax.models.mixers.attention import mixer_of
from kvjax.plan.topologies import Topology
from kvjax.state.axes import check_rows

AUTO = "auto"
# Presets tried by default: heads and channels split weights, rows and slots the rest.
_TRIED = ("tensor", "tensor+sequence")
# The share of a device's memory that weights and caches may take before slots are split, too.
SPARE = 0.75


class MeshLayout(NamedTuple):
    """A preset of rules on a mesh, with the user's changes.

    preset: its name. changed: the axes that the user changed. on: the mesh, and the rules as a method's
    caches follow them.
    """

    preset: str
    changed: Mapping[str, MeshAxes]
    on: OnMesh

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh's axes by their names."""
        return dict(self.on.mesh.shape)

    @property
    def words(self) -> str:
        """The layout as the command line takes it."""
        changed = "".join(f" --rule {axis}={_words(name)}" for axis, name in self.changed.items())
        return f"--preset {self.preset} --mesh {','.join(f'{k}={n}' for k, n in self.mesh.items())}{changed}"


def abstract(topology: Topology, mesh: Mapping[str, int], rules: Rules) -> OnMesh:
    """Make a mesh of absent devices: for shapes and sizes, not for compilation."""
    kinds = (AxisType.Auto,) * len(mesh)
    one = jax.sharding.AbstractDevice(device_kind=topology.kind, num_cores=1, platform=topology.platform)
    shape = AbstractMesh(tuple(mesh.values()), tuple(mesh), kinds, abstract_device=one)
    return OnMesh(shape, rules)


def check_preset(preset: str) -> None:
    """InputError, with the nearest name, unless it is a preset or "auto"."""
    if preset not in (*PRESETS, AUTO):
        near = difflib.get_close_matches(preset, [*PRESETS, AUTO], 1)
        hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(PRESETS)}, or {AUTO}"
        raise InputError(f"unknown preset {preset!r}: {hint}")


def layout(
    config: Config,
    method: Method,
    topology: Topology,
    batch: int,
    preset: str,
    size: Callable[[OnMesh], int],
    mesh: str | None = None,
    changed: Mapping[str, MeshAxes] | None = None,
) -> MeshLayout:
    """How a model with `batch` rows is split over a topology. size: bytes per device.

    preset: of the rules, or "auto", which tries some. mesh: its axes as text, instead of the best ones.
    changed: other mesh axes for some logical axes.

    A layout that leaves weights whole, because a size does not divide, is taken only if there is no other.

    Raises InputError for unknown presets, and for rows, meshes and rules that do not go together.
    """
    check_preset(preset)
    changed = changed or {}
    trials = list(_trials(topology, preset, changed)) if preset == AUTO else [(preset, changed)]
    found: list[tuple[int, MeshLayout]] = []
    refused: InputError | None = None
    for name, but in trials:
        for sizes in _meshes(topology, name, but, mesh):
            try:
                rules = as_rules(name, tuple(sizes))
                on = abstract(topology, sizes, as_rules(rules.but(**but) if but else rules, tuple(sizes)))
                check_rules(config, on)
                check_rows(batch, on)
                on = mesh_for(method, on) or on
            except InputError as error:
                refused = refused or error
                continue
            found.append((size(on), MeshLayout(name, but, on)))
    if not found:
        assert refused is not None
        raise refused
    divide = [one for one in found if not left_whole(config, one[1].on)]
    return min(divide or found, key=lambda one: _cost(config, topology, *one))[1]


def _cost(config: Config, topology: Topology, size: int, one: MeshLayout) -> tuple[bool, bool, int]:
    """Make a key by which layouts are compared, the least being the best; of equals, the first is taken.

    Merging KV heads whose slots are on several devices takes time at every step, and codes and prompts over
    them need many temporaries, so slots are split only if a device could hardly hold them otherwise.
    """
    crowded = topology.memory is not None and size > SPARE * topology.memory
    return crowded, not crowded and parts_of_lists(config, one.on) > 1, size


def parts_of_lists(config: Config, on: OnMesh) -> int:
    """Return the largest number of devices over which the slots of any KV head are split."""
    mixers = dict.fromkeys(mixer_of(config, i) for i in range(config.layers))
    slots = [mixer.slots(config) for mixer in mixers]
    return max((on.parts_of_a_list(one.heads) for one in slots if one is not None), default=1)


def _trials(
    topology: Topology, preset: str, changed: Mapping[str, MeshAxes]
) -> Iterator[tuple[str, Mapping[str, MeshAxes]]]:
    if topology.count == 1:
        yield "single", changed
        return
    yield from ((name, changed) for name in _TRIED)


def _meshes(
    topology: Topology, preset: str, changed: Mapping[str, MeshAxes], given: str | None
) -> Iterator[dict[str, int]]:
    """Yield the meshes of all devices that a preset's axes can have; one device, for "single"."""
    if given is not None:
        sizes = parse_mesh(given)
        count = math.prod(sizes.values())
        if count > topology.count:
            raise InputError(
                f"mesh {given!r} has {count} devices, and {topology.name} has {topology.count}: lower its "
                "sizes, or give a larger topology"
            )
        yield sizes
        return
    rules = PRESETS[preset].but(**changed) if changed else PRESETS[preset]
    names = list(dict.fromkeys(name for _, name in rules.used() if name != DATA))
    if not names and rules == Rules():
        yield {DATA: 1}
        return
    for sizes in _factors(topology.count, len(names) + 1):
        yield dict(zip([DATA, *names], sizes, strict=True))


def _factors(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Return all ways to write a number as a product of `parts` factors, with small first factors first."""
    if parts == 1:
        yield (count,)
        return
    for first in (n for n in range(1, count + 1) if count % n == 0):
        for rest in _factors(count // first, parts - 1):
            yield first, *rest


def read_rules(words: list[str]) -> dict[str, MeshAxes]:
    """Rules as the command line writes them, AXIS=MESH_AXIS, several joined by +, or AXIS=none.

    >>> read_rules(["slots=model+seq", "vocab=none"])
    {'slots': ('model', 'seq'), 'vocab': None}
    """
    found: dict[str, MeshAxes] = {}
    for word in words:
        axis, equals, name = (part.strip() for part in word.partition("="))
        if axis not in AXES or not (equals and name):
            near = difflib.get_close_matches(axis, AXES, 1)
            hint = f"did you mean {near[0]}={name or 'model'}?" if near else f"axes are {', '.join(AXES)}"
            raise InputError(
                f"rule {word!r} is not understood, expected AXIS=MESH_AXIS such as slots=model: {hint}"
            )
        parts = tuple(name.split("+"))
        found[axis] = None if name == "none" else parts[0] if len(parts) == 1 else parts
    return found


def _words(name: MeshAxes) -> str:
    return "none" if name is None else name if isinstance(name, str) else "+".join(name)
