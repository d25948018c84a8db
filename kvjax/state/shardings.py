"""Shardings: the parts of a cache, how each is split over devices, and a picture of the largest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.state.axes import map_axes
from kvjax.state.cache import Cache, check_alive
from kvjax.state.layer_order import layers_of

# Common names of the axes.
_WORDS = {"batch": "rows", "kv_heads": "KV heads", "heads": "heads", "slots": "slots", "pages": "pages"}
_FIELDS = {"k": "keys", "v": "values", "pos": "positions", "first": "page tables", "lengths": "page tables"}
_FIELDS |= {"owner": "owners", "summary": "summaries", "near": "copies", "bias": "biases"}


class CachePart(NamedTuple):
    """A part of a cache: its layers, its contents, how it is split, its bytes in all and per device.

    split: (name of an axis, the mesh axes that split it). why: why something is replicated that the
    rules would split; empty if nothing is.
    """

    where: str
    what: str
    split: tuple[tuple[str, str], ...]
    nbytes: int
    per_device: int
    why: str


class Shardings(NamedTuple):
    """The parts of a cache and where they are; `print` shows a table, and who holds the largest part.

    mesh: the sizes of its axes by name; one device without a mesh.
    """

    mesh: Mapping[str, int]
    parts: tuple[CachePart, ...]
    picture: str

    @property
    def per_device(self) -> int:
        """Bytes of the cache on each device."""
        return sum(part.per_device for part in self.parts)

    def __str__(self) -> str:
        count = math.prod(self.mesh.values())
        devices = f"{count} devices: " + ", ".join(f"{n}={s}" for n, s in self.mesh.items())
        rows = [("layers", "part", "split", "in all", "per device", "")]
        for part in self.parts:
            split = ", ".join(f"{axis} over {names}" for axis, names in part.split) or "whole"
            sizes = (size_text(part.nbytes), size_text(part.per_device))
            rows.append((part.where, part.what, split, *sizes, part.why))
        total = sum(part.nbytes for part in self.parts)
        rows.append(("all", "", "", size_text(total), size_text(self.per_device), ""))
        head = devices if self.mesh else "one device"
        return "\n".join(
            [head, "", *_aligned(rows, right=(3, 4)), *(["", self.picture] if self.picture else [])]
        )


class _AxesLeaf:
    """An array's logical axes, as a leaf of a tree."""

    def __init__(self, axes: Axes, x: Any):
        self.axes, self.x = axes, x
        self.words = tuple("" if axis is None else _WORDS.get(axis, axis) for axis in axes)


def shardings(cache: Cache) -> Shardings:
    """List the parts of a cache with their bytes, in all and per device; `print` it.

    Args:
        cache: any live cache, on one device or many.

    Returns:
        A `Shardings`, whose `parts` say what each part is, how it is split and how many bytes it has.

    Raises:
        InputError: if the value is not a cache, or a step has consumed it.

    >>> import kvjax
    >>> _, cache = kvjax.prefill(kvjax.load("recall-tiny"), [[1, 2, 3]])
    >>> kvjax.shardings(cache).parts[0].what
    'tail: keys, values, positions'
    """
    check_alive(cache)
    return described(cache, cache.on_mesh)


def described(cache: Cache, on: OnMesh | None) -> Shardings:
    """`shardings` of a cache, or of the shapes of a cache that would be placed by rules."""
    tree = map_axes(_AxesLeaf, cache)
    sizes = layers_of(cache)
    found: dict[tuple[str, tuple[tuple[str, str], ...], str], list[tuple[str, str, int, int]]] = {}
    largest, mesh = None, {} if on is None else dict(on.mesh.shape)
    for path, leaf in jax.tree.leaves_with_path(tree):
        x, spec, here = leaf.x, _spec(leaf, on), _mesh_of(leaf, on)
        mesh = mesh or here
        split = tuple(
            (words, " x ".join(f"{n}={here[n]}" for n in names))
            for words, names in zip(leaf.words, spec, strict=True)
            if words and math.prod(here[n] for n in names) > 1
        )
        parts = math.prod(here[n] for names in spec for n in names)
        count = math.prod(x.shape) * x.dtype.itemsize
        segment, what = _named(jax.tree_util.keystr(path))
        where = _where(jax.tree_util.keystr(path), sizes)
        key = (segment, split, _why(leaf, spec, on))
        found.setdefault(key, []).append((where, what, count, count // parts))
        if largest is None or count > largest[0]:
            largest = (count, leaf, spec, here, _of(what, where))
    parts = []
    for (segment, split, why), rows in found.items():
        names = ", ".join(dict.fromkeys(row[1] for row in rows))
        bytes_of = (sum(row[2] for row in rows), sum(row[3] for row in rows))
        parts.append(
            CachePart(
                _runs(row[0] for row in rows),
                f"{segment}: {names}" if segment else names,
                split,
                *bytes_of,
                why,
            )
        )
    return Shardings(mesh, tuple(parts), "" if largest is None or not mesh else _picture(*largest[1:]))


Names = tuple[tuple[str, ...], ...]


def _spec(leaf: _AxesLeaf, on: OnMesh | None) -> Names:
    """Return the mesh axes that split each axis of an array, where it is or would be."""
    sharding = getattr(leaf.x, "sharding", None)
    rank = len(leaf.x.shape)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    if spec is None:
        spec = () if on is None or isinstance(leaf.x, jax.Array) else on.spec(leaf.axes, leaf.x.shape)
    names = [() if name is None else name if isinstance(name, tuple) else (name,) for name in spec]
    return (*names, *((),) * (rank - len(names)))


def _mesh_of(leaf: _AxesLeaf, on: OnMesh | None) -> dict[str, int]:
    sharding = getattr(leaf.x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return dict(sharding.mesh.shape)
    return {} if on is None else dict(on.mesh.shape)


def _of(what: str, where: str) -> str:
    if not where or "pool" in where:
        return f"{what} of {where}" if where else what
    return f"{what} of {'layer' if where.isdigit() else 'layers'} {where}"


def _where(path: str, layers: list[range]) -> str:
    group = re.match(r"\.groups\[(\d+)\]", path)
    if group is not None:
        mine = layers[int(group[1])]
        if mine.step > 1:
            return ", ".join(map(str, mine))
        return f"{mine[0]}" if len(mine) == 1 else f"{mine[0]}-{mine[-1]}"
    pool = re.match(r"\.pools\[(\d+)\]", path)
    return f"pool {pool[1]}" if pool else ""


def _runs(places: Iterable[str]) -> str:
    """Layers as runs: "0-31" for 0, 1, ... 31."""
    found: list[list[int]] = []
    words: list[str] = []
    for place in dict.fromkeys(places):
        each = [one.split("-") for one in place.split(", ")]
        if place and all(end.isdigit() for ends in each for end in ends):
            found += [[int(ends[0]), int(ends[-1])] for ends in each]
        else:
            words += [place] if place else []
    runs: list[list[int]] = []
    for first, last in sorted(found):
        if runs and first == runs[-1][1] + 1:
            runs[-1][1] = last
        else:
            runs.append([first, last])
    return ", ".join([*(f"{a}" if a == b else f"{a}-{b}" for a, b in runs), *words])


def _named(path: str) -> tuple[str, str]:
    """Return (segment, contents) of a leaf of a cache, by its path in the tree."""
    found = re.match(r"\.groups\[\d+\]\.(bodies\[\d+\]|tail|sinks|state|rows)(.*)", path)
    if found is None:
        pool = re.match(r"\.pools\[\d+\]\.(\w+)", path)
        return ("pages", _FIELDS.get(pool[1], pool[1])) if pool else ("", "positions of the next tokens")
    segment, rest = found[1], found[2]
    if segment == "state":
        name = re.match(r"\.data\['(\w+)'\]", rest)
        return "state", name[1] if name else "state"
    if segment == "rows":
        return "rows", "what the method remembers"
    name = re.match(r"\.(\w+)", rest)
    field = "" if name is None else name[1]
    return {"tail": "tail", "sinks": "first tokens"}.get(segment, "body"), _FIELDS.get(field, field)


def _why(leaf: _AxesLeaf, spec: Names, on: OnMesh | None) -> str:
    """Why an array is not split along an axis for which the rules name mesh axes."""
    if on is None:
        return ""
    if leaf.axes[0] == "pages" and not spec[0]:
        split = {"batch", "kv_heads"} & {axis for axis, _ in on.rules.used() if on.devices(axis) > 1}
        return "one pool for KV heads of unequal lengths: every device holds it" if split else ""
    taken = {name for names in spec for name in names}
    for axis, words, size, names in zip(leaf.axes, leaf.words, leaf.x.shape, spec, strict=True):
        if axis is None or names or not size or on.devices(axis) == 1:
            continue
        if axis == "slots" and on.slots_instead:
            continue
        instead = taken >= {*on.rules.mesh_axes(axis)}
        does = "their slots are split instead" if instead else "every device holds all"
        return f"{size} {words} over {on.over(axis)}: {does}"
    return ""


# --- text ----------------------------------------------------------------------------------------------


def heavier(held: int | float, full: int | float, by: str = "it") -> str:
    """Return what reports say if a cache of `held` bytes is larger than the full one; empty if it is not.

    >>> heavier(120, 100), heavier(100, 100)
    ('it weighs more than the full cache', '')
    """
    return f"{by} weighs more than the full cache" if held > full else ""


def size_text(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"


def _aligned(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            x.rjust(w) if i in right else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _picture(leaf: _AxesLeaf, spec: Names, mesh: Mapping[str, int], name: str) -> str:
    """Which device holds which piece of an array: rows downwards, everything else to the right."""
    cells: dict[tuple[str, str], list[int]] = {}
    for number, place in enumerate(np.ndindex(*mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        down, right = "all rows", []
        for words, size, names in zip(leaf.words, leaf.x.shape, spec, strict=True):
            if not names:
                continue
            part, count = 0, 1
            for n in names:
                part, count = part * mesh[n] + at[n], count * mesh[n]
            first, last = part * size // count, (part + 1) * size // count - 1
            piece = f"{words} {first}" + ("" if first == last else f"-{last}")
            if words == "rows":
                down = piece
            else:
                right.append(piece)
        cells.setdefault((down, ", ".join(right) or "everything"), []).append(number)
    downs, rights = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    table = [("", *rights)]
    for down in downs:
        table.append((down, *(_devices(cells.get((down, right), [])) for right in rights)))
    return "\n".join([f"Who holds the {name}:", *_aligned(table)])


def _devices(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return f"device {numbers[0]}" if numbers else ""
    return f"devices {_runs(map(str, numbers))}"
