"""Draws the house: floors from bottom to top, rooms as boxes, arrows to what a room is built on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402
from matplotlib.path import Path as Curve  # noqa: E402

ROOM_WIDTH, ROOM_HEIGHT, LANE_WIDTH, GAP = 2.3, 0.5, 0.2, 0.4
# Used nearly everywhere: arrows to it would say nothing and hide the others.
UBIQUITOUS = "errors, files"
WALLS = ("#f3f6fa", "#ffffff")
COLOURS = ("#4269d0", "#b8860b", "#c4473a", "#3a8f86", "#3a8546", "#b8559b", "#8b5cd6", "#8a6a4f", "#5f6b7a")

Edge = tuple[str, str]


class Node(NamedTuple):
    """What stands on a floor: a room, or the lane in which an arrow passes the floor."""

    room: str
    through: Edge | None = None

    @property
    def width(self) -> float:
        return ROOM_WIDTH if self.through is None else LANE_WIDTH


def reduced(edges: set[Edge]) -> set[Edge]:
    """The edges that do not follow from others; the graph has no circles.

    >>> sorted(reduced({("a", "b"), ("b", "c"), ("a", "c")}))
    [('a', 'b'), ('b', 'c')]
    """
    below: dict[str, set[str]] = {}
    for a, b in edges:
        below.setdefault(a, set()).add(b)

    def reaches(a: str, b: str) -> bool:
        return any(x == b or reaches(x, b) for x in below.get(a, ()))

    return {(a, b) for a, b in edges if not any(reaches(x, b) for x in below[a] - {b})}


def draw(
    path: Path,
    floors: Sequence[tuple[str, Sequence[Any]]],
    edges: set[Edge],
    sizes: dict[str, tuple[int, int]],
    data: str,
) -> None:
    """Writes the picture as SVG, the same bytes for the same arguments; `data` is its description."""
    arrows = sorted(reduced({(a, b) for a, b in edges if b != UBIQUITOUS}))
    at, routes = _laid_out([[room.name for room in rooms] for _, rooms in floors], arrows)
    left, right = (f(x + s * n.width / 2 for n, (x, _) in at.items()) for f, s in ((min, -1), (max, 1)))
    left -= 2.4
    plt.rcParams.update({"svg.hashsalt": "house", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axis = plt.subplots(figsize=(12, 11))
    axis.set(xlim=(left, right + GAP), ylim=(-0.55, len(floors) - 0.4))
    axis.axis("off")
    for i, (floor, _) in enumerate(floors):
        axis.axhspan(i - 0.5, i + 0.5, color=WALLS[_group(floors, i) % 2], zorder=0, linewidth=0)
        if floor:
            above = itertools.takewhile(lambda other: not other[0], floors[i + 1 :])
            middle = i + sum(1 for _ in above) / 2
            axis.text(left + 0.15, middle, floor, va="center", fontsize=11, color="#5f6b7a", style="italic")
    floor_of = {room.name: _group(floors, i) for i, (_, rooms) in enumerate(floors) for room in rooms}
    for a, b in arrows:
        _arrow(axis, routes[a, b], COLOURS[floor_of[a] % len(COLOURS)])
    for node, (x, y) in at.items():
        if node.through is None:
            _box(axis, node.room, x, y, *sizes[node.room], COLOURS[floor_of[node.room] % len(COLOURS)])
    figure.savefig(
        path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Description": data}
    )
    plt.close(figure)


def _group(floors: Sequence[tuple[str, Sequence[Any]]], i: int) -> int:
    """Floors without a name belong to the named one below them."""
    return sum(bool(name) for name, _ in floors[: i + 1])


def _box(axis: Any, name: str, x: float, y: float, files: int, lines: int, colour: str) -> None:
    corner = x - ROOM_WIDTH / 2, y - ROOM_HEIGHT / 2
    style = "round,pad=0,rounding_size=0.08"
    axis.add_patch(
        FancyBboxPatch(
            corner,
            ROOM_WIDTH,
            ROOM_HEIGHT,
            boxstyle=style,
            facecolor="white",
            edgecolor=colour,
            linewidth=1.4,
            zorder=3,
        )
    )
    axis.text(
        x, y + 0.1, name, ha="center", va="center", fontsize=9.5, weight="bold", color="#1f2933", zorder=4
    )
    what = f"{files} file{'s' * (files > 1)}, {lines:,} lines"
    axis.text(x, y - 0.12, what, ha="center", va="center", fontsize=7.5, color="#5f6b7a", zorder=4)


def _arrow(axis: Any, points: list[tuple[float, float]], colour: str) -> None:
    """Down through the lanes, always leaving and arriving upright."""
    corners, codes = [points[0]], [Curve.MOVETO]
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        middle = (y + to_y) / 2
        corners += [(x, middle), (to_x, middle), (to_x, to_y)]
        codes += [Curve.CURVE4] * 3
    axis.add_patch(
        FancyArrowPatch(
            path=Curve(corners, codes), arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.1,
            fill=False, zorder=2, joinstyle="round",
        )
    )  # fmt: skip


def _laid_out(
    floors: list[list[str]], arrows: list[Edge]
) -> tuple[dict[Node, tuple[float, float]], dict[Edge, list[tuple[float, float]]]]:
    """Where rooms and lanes stand, and the points through which each arrow goes, from its upper room down."""
    level = {room: i for i, rooms in enumerate(floors) for room in rooms}
    rows = [[Node(room) for room in rooms] for rooms in floors]
    chains: dict[Edge, list[Node]] = {}
    for a, b in arrows:
        lanes = [Node(f"{a}-{b}-{i}", (a, b)) for i in range(level[a] - 1, level[b], -1)]
        for i, lane in zip(range(level[a] - 1, level[b], -1), lanes, strict=True):
            rows[i].append(lane)
        chains[a, b] = [Node(a), *lanes, Node(b)]
    near: dict[Node, list[Node]] = {node: [] for row in rows for node in row}
    for chain in chains.values():
        for upper, lower in itertools.pairwise(chain):
            near[upper].append(lower)
            near[lower].append(upper)
    tries = [_spread(rows, near, seed) for seed in range(60)]
    x, rows = min(tries, key=lambda found: sum(abs(found[0][a] - found[0][b]) for a in near for b in near[a]))
    at = {node: (x[node], float(i)) for i, row in enumerate(rows) for node in row}
    return at, {edge: _route(chain, at, near) for edge, chain in chains.items()}


def _spread(
    rows: list[list[Node]], near: dict[Node, list[Node]], seed: int
) -> tuple[dict[Node, float], list[list[Node]]]:
    """From a random order on, every node near the middle of its neighbours; and the order that comes out."""
    draw = random.Random(seed)
    rows = [draw.sample(row, len(row)) for row in rows]
    x = {node: 2.0 * i for row in rows for i, node in enumerate(row)}
    for turn in range(60):
        for row in rows if turn % 2 else reversed(rows):
            wish = {n: _middle(n, near[n], x) for n in row}
            if turn < 30:
                row.sort(key=lambda n: wish[n])
            for node, place in zip(row, _apart(row, wish), strict=True):
                x[node] = place
    return x, rows


def _middle(node: Node, near: list[Node], x: dict[Node, float]) -> float:
    """The mean place of the neighbours; lanes count most among each other, so that arrows run straight."""
    if not near:
        return sum(x.values()) / len(x)
    weights = [1 + 3 * (other.through is not None) + 8 * (other.through == node.through) for other in near]
    if node.through is None:
        weights = [1 for _ in near]
    return sum(w * x[n] for w, n in zip(weights, near, strict=True)) / sum(weights)


def _apart(row: list[Node], wish: dict[Node, float]) -> list[float]:
    """Places near the wishes, in this order, with gaps: halfway between pushing all right and all left."""
    space = [(a.width + b.width) / 2 + GAP for a, b in itertools.pairwise(row)]
    right = [wish[n] for n in row]
    for i, s in enumerate(space):
        right[i + 1] = max(right[i + 1], right[i] + s)
    left = [wish[n] for n in row]
    for i, s in reversed(list(enumerate(space))):
        left[i] = min(left[i], left[i + 1] - s)
    return [(a + b) / 2 for a, b in zip(right, left, strict=True)]


def _route(
    chain: list[Node], at: dict[Node, tuple[float, float]], near: dict[Node, list[Node]]
) -> list[tuple[float, float]]:
    """From the lower edge of the upper room, through the lanes, to the upper edge of the lower room."""

    def door(room: Node, other: Node, side: int) -> tuple[float, float]:
        x, y = at[room]
        beside = sorted((n for n in near[room] if (at[n][1] - y) * side > 0), key=lambda n: at[n][0])
        share = (beside.index(other) + 1) / (len(beside) + 1) - 0.5
        return x + share * ROOM_WIDTH * 0.8, y + side * ROOM_HEIGHT / 2

    points = [door(chain[0], chain[1], -1)]
    for lane in chain[1:-1]:
        x, y = at[lane]
        points += [(x, y + ROOM_HEIGHT / 2), (x, y - ROOM_HEIGHT / 2)]
    return [*points, door(chain[-1], chain[-2], 1)]
