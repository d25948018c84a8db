"""Collectives: what devices send each other in a compiled program, parsed from the program's text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvjax.aot.reading import array_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALL = re.compile(rf"= (\(.*?\)|\S+) ((?:ragged-)?(?:{'|'.join(KINDS)}))(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_WHILE = re.compile(r"\bwhile\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"compare\(([^)]*)\), direction=LT")


class Collective(NamedTuple):
    """All collectives of one kind in one run of a program. bytes: of their results, on one device."""

    kind: str
    count: int
    bytes: int


def collectives(module: str) -> list[Collective]:
    r"""List the collectives of a compiled module's text, those in loops counted once per iteration.

    A loop with a dynamic number of iterations counts as one iteration.

    >>> text = "ENTRY %main (p: f32[8]) -> f32[8] {\n  ROOT %r = f32[8]{0} all-reduce(%p)\n}"
    >>> collectives(text)
    [Collective(kind='all-reduce', count=1, bytes=32)]
    """
    parts, entry = _computations(module)
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
    for name, runs in _runs(parts, entry).items():
        for line in parts[name]:
            call = _CALL.search(line)
            if call is None:
                continue
            kind = call[2].removeprefix("ragged-")
            # The start of an asynchronous collective lists its operands and results, and perhaps context ids.
            named = [one for one in _ARRAY.findall(call[1]) if not call[3] or one != ("u32", "")]
            arrays = [array_bytes(*one) for one in named]
            half = len(arrays) // 2
            size = sum(arrays[half : 2 * half]) if call[3] and kind != "all-reduce" and half else sum(arrays)
            counts[kind] += runs
            sizes[kind] += runs * size
    return [Collective(kind, counts[kind], sizes[kind]) for kind in KINDS if counts[kind]]


def _computations(module: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of every computation by name, and the name of the entry."""
    parts: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in module.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            lines = parts.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif lines is not None:
            lines.append(line)
    return parts, entry


def _runs(parts: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often every computation runs in one run of `entry`."""
    runs = dict.fromkeys(parts, 0)

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for line in parts[name]:
            for called, turns in _called(parts, line):
                if called in parts:
                    visit(called, times * turns)

    if entry:
        visit(entry, 1)
    return runs


def _called(parts: dict[str, list[str]], line: str) -> Iterator[tuple[str, int]]:
    """Yield (computation, times) for what a line runs."""
    loop = _WHILE.search(line)
    if loop is not None:
        known = _TRIPS.search(line)
        yield loop[2], int(known[1]) if known else _turns(parts.get(loop[1], []))
        return
    yield from ((name, 1) for name in _CALLED.findall(line))
    for names in _BRANCHES.findall(line):
        yield from ((name.strip().removeprefix("%"), 1) for name in names.split(","))


def _turns(condition: list[str]) -> int:
    """Count the iterations of a loop that counts from 0 to a constant; 1 for other loops."""
    constants = dict(found for line in condition for found in _CONSTANT.findall(line))
    for line in condition:
        compared = _COMPARED.search(line)
        if compared is not None:
            bound = compared[1].split(",")[-1].strip().split(" ")[-1].removeprefix("%")
            return int(constants.get(bound, 1))
    return 1
