"""The house: the floors of kvjax, the rooms on each of them, and which room imports which.

    python scripts/house.py            # prints every room and the rooms that it imports
    python scripts/house.py --write    # draws docs/house.svg and writes the table of docs/architecture.md

A room is a folder or a few files of one purpose. It may import the rooms of the floors below its own and no
other, not even inside a function; tests/test_floors.py holds it to that. Files are parsed, never imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from house_rooms import FLOOR, FLOORS, ROOMS

ROOT = Path(__file__).parents[1]
# Where the folders of the repository lie in the package, as setup.py says; scripts are no package.
PACKAGES = {
    "kvjax": "kvjax",
    "models": "kvjax.models",
    "pallas_kernels": "kvjax.pallas_kernels",
    "configs": "kvjax.configs",
    "scripts": "",
}


class Import(NamedTuple):
    """That `file` imports the module of the file `of`, in which line; types: only for a type checker."""

    file: str
    of: str
    line: int
    types: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({room_of(self.file)}) imports {self.of} ({room_of(self.of)})"


# --- files, rooms and imports --------------------------------------------------------------------------


@cache
def modules() -> dict[str, str]:
    """The file of every module, by the module's name."""
    found = {}
    for top, package in PACKAGES.items():
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / top).with_suffix("").parts]
            name = ".".join(part for part in parts if part and part != "__init__")
            found[name] = str(path.relative_to(ROOT))
    return found


def room_of(file: str) -> str:
    """The room in which a file lies; the longest path counts. KeyError where it lies in none."""
    paths = {path: room.name for room in ROOMS.values() for path in room.paths}
    for path in (file, *map(str, Path(file).parents)):
        if path in paths:
            return paths[path]
    raise KeyError(f"{file} lies in no room: give it one in FLOORS of scripts/house_rooms.py")


@cache
def imports() -> tuple[Import, ...]:
    """Every import of one file of the repository by another, those inside functions included."""
    found = set()
    for name, file in modules().items():
        for module, line, types in _imported(name, file):
            if (of := _file_of(module)) and of != file:
                found.add(Import(file, of, line, types))
    return tuple(sorted(found))


def _imported(name: str, file: str) -> Iterator[tuple[str, int, bool]]:
    """Names of modules, or of what they define, the lines that ask for them, and whether for types alone."""
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    doors = set()  # what this file calls the package `kvjax`, whose public names are imported when asked for
    tree = ast.parse((ROOT / file).read_text())
    for node, types in _statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, types
                doors |= {alias.asname or "kvjax"} if alias.name == "kvjax" else set()
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield _home(f"{base}.{alias.name}"), node.lineno, types
    for node in ast.walk(tree) if doors else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in doors:
            yield _home(f"kvjax.{node.attr}"), node.lineno, False


def _statements(node: ast.AST, types: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All statements below a node, and whether only a type checker reads them.

    Expressions, which are most of a file, hold no imports.
    """
    checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, part, ()) if not isinstance(node, ast.expr) else ():
            below = types or (checking and part == "body")
            yield statement, below
            yield from _statements(statement, below)


@cache
def _homes() -> dict[str, str]:
    """The modules of the public names, as kvjax/__init__.py lists them."""
    tree = ast.parse((ROOT / "kvjax/__init__.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    return {f"kvjax.{name}": home for name, home in ast.literal_eval(table).items()}


def _home(name: str) -> str:
    return _homes().get(name, name)


def _file_of(module: str) -> str | None:
    """The file of a module, or of the module that defines a name; None for other libraries."""
    return modules().get(module) or modules().get(module.rpartition(".")[0])


def edges() -> set[tuple[str, str]]:
    """(room, room that it imports)."""
    pairs = {(room_of(one.file), room_of(one.of)) for one in imports()}
    return {(a, b) for a, b in pairs if a != b}


def upward() -> list[Import]:
    """Imports of a room that does not lie on a floor below."""
    rooms = ((one, room_of(one.file), room_of(one.of)) for one in imports())
    return [one for one, a, b in rooms if a != b and FLOOR[a] <= FLOOR[b]]


def circles(uses: dict[str, set[str]]) -> list[list[str]]:
    """Groups in which everything is used by everything else, if only through others.

    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    [['b', 'c']]
    """
    reach: dict[str, set[str]] = {}
    for start in uses:
        seen: set[str] = set()
        todo = list(uses[start])
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                todo += uses.get(one, ())
        reach[start] = seen
    found = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in uses}
    return sorted(list(group) for group in found if group)


def file_uses() -> dict[str, set[str]]:
    """The files that each file imports when the program runs: types may refer to each other."""
    found: dict[str, set[str]] = {file: set() for file in modules().values()}
    for one in imports():
        if not one.types:
            found[one.file].add(one.of)
    return found


# --- what is shown -------------------------------------------------------------------------------------


def data() -> str:
    """Every room and the rooms that it imports, from the ground up: what the picture shows, as text."""
    below: dict[str, list[str]] = {name: [] for name in ROOMS}
    for a, b in sorted(edges(), key=lambda pair: (FLOOR[pair[1]], pair[1])):
        below[a].append(b)
    return "\n".join(f"{name} -> {' | '.join(below[name]) or 'nothing'}" for name in ROOMS)


def table() -> str:
    """The floors in Markdown, from the ground up."""
    rows = ["| floor | room | files | what lives there |", "|---|---|---|---|"]
    for floor, rooms in FLOORS:
        for i, room in enumerate(rooms):
            paths = ", ".join(f"`{path}`" for path in room.paths)
            rows.append(f"| {floor if i == 0 else ''} | {room.name} | {paths} | {room.about} |")
    return "\n".join(rows)


def sizes() -> dict[str, tuple[int, int]]:
    """Files and lines of every room."""
    found = {name: (0, 0) for name in ROOMS}
    for file in modules().values():
        files, lines = found[room_of(file)]
        found[room_of(file)] = files + 1, lines + len((ROOT / file).read_text().splitlines())
    return found


if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["--write"]:
        from docs_tables import write_table  # here, so that the test of the floors imports no matplotlib
        from house_picture import draw

        write_table("architecture.md", "house", table())
        draw(ROOT / "docs/house.svg", FLOORS, edges(), sizes(), data())
    else:
        print(data())
