"""Tunes the slots per step without hardware: compiles candidates, and writes the best to the kernels' table.

A kernel that streams a cache through two buffers starts the copy for step i + 2 when it finishes step i. So
two steps take at least one step's work, the latency of a copy, and the copy itself; and all steps take at
least their issue cycles, and their bytes at the memory's bandwidth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.aot.cases import CASES
from kvjax.aot.hardware import Device, device_of
from kvjax.aot.probe import probe
from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.pallas_kernels.block_sizes import TABLE

# The compiler's simulation starts a copy in 600 to 650 cycles on v5e; assumed for the others.
LATENCY_US = 0.43
# Of the 16 MiB available to a kernel; the rest is for positions, biases, probabilities and more queries.
VMEM = 9 * 2**19
# Most spilled stores per bundle. Bundles count their time already; with more, a kernel does little else.
SPILLS = 0.25
# Times that differ by less count as equal, and the shorter step is taken: it wastes less on short lists.
TIE = 0.05


class Sweep(NamedTuple):
    """What to tune: the cases by payload and row width, the tuned option, and its candidate values.

    vmem: bytes that the kernel may take.
    """

    cases: dict[tuple[str, int], str]
    option: str
    candidates: tuple[int, ...]
    vmem: int = VMEM


SWEEPS = {
    "stacked_decode": Sweep(
        {
            **{("bfloat16", h): f"stacked_decode-bfloat16-h{h}" for h in (64, 128, 256)},
            ("float32", 128): "stacked_decode-float32-h128",
        },
        "block",
        (512, 1024, 2048, 4096, 8192),
    ),
    "grouped_decode": Sweep(
        {(f"uint{bits}", 128): f"grouped_decode-uint{bits}-h128" for bits in (2, 4)},
        "block",
        (1024, 2048, 4096, 8192),
    ),
    "paged_decode": Sweep(
        {(n, h): f"paged_decode-{n}-h{h}" for n in ("bfloat16", "int8", "int4") for h in (128, 256)},
        "step",
        (1024, 2048, 4096, 8192, 16384),
    ),
    "mla_decode": Sweep(
        {("bfloat16", 640): "mla_decode-bfloat16-n128"},
        "step",
        (512, 1024, 2048, 4096),
        12 * 2**20,
    ),
}
Row = dict[str, Any]


def check(operations: Iterable[str]) -> None:
    """Raise InputError for operations of no sweep."""
    for operation in operations:
        if operation not in SWEEPS:
            raise InputError(f"nothing to tune in {operation!r}: expected {', '.join(SWEEPS)}")


def jobs(operations: list[str], topologies: Iterable[str]) -> list[Row]:
    """One row for every candidate, without its figures. Raises InputError for operations of no sweep."""
    check(operations)
    rows = []
    for operation in operations:
        sweep = SWEEPS[operation]
        rows += [
            dict(
                operation=operation,
                topology=t,
                payload=payload,
                width=width,
                slots=n,
                libtpu=version("libtpu"),
            )
            for t in topologies
            for payload, width in sweep.cases
            for n in sweep.candidates
        ]
    return rows


def measure(todo: list[Row], kept: Path) -> Iterator[Row]:
    """Yield the rows with figures as they are found; those in the file `kept` are not compiled again."""
    known = json.loads(kept.read_text()) if kept.exists() else []
    found = {_key(row): row for row in known}
    for row in todo:
        if _key(row) not in found:
            found[_key(row)] = row | _figures(row)
            write_atomic(kept, (json.dumps(list(found.values())) + "\n").encode())
        yield found[_key(row)]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[n] for n in ("operation", "topology", "payload", "width", "slots", "libtpu"))


def _figures(row: Row) -> Row:
    sweep, device = SWEEPS[row["operation"]], device_of(row["topology"])
    name, options = sweep.cases[row["payload"], row["width"]], {sweep.option: row["slots"]}
    found = probe(row["topology"], name, **options)
    if "error" in found:
        return {"error": found["error"]}
    spills = (found["spills"] or 0) / sum(found["bundles"].values())
    assert isinstance(device, Device)
    us = bound_us(found["bundles_us"], found["hbm_us"], _steps(partial(CASES[name], **options), device))
    return {"us": round(us, 1), "vmem": found["vmem"], "spills": round(spills, 3)}


def _steps(case: Callable[[Device], Any], device: Device) -> float:
    """Count the steps of one core."""
    return case(device).trips["2"] / device.cores


def bound_us(bundles_us: float, hbm_us: float, steps: float) -> float:
    """Compute a lower bound of the time of `steps` steps through two buffers (see the module's docstring).

    >>> bound_us(100.0, 300.0, 100.0), bound_us(100.0, 110.0, 1000.0)
    (300.0, 320.0)
    """
    return max(bundles_us, hbm_us, (bundles_us + hbm_us + LATENCY_US * steps) / 2)


def pick(rows: list[Row], vmem: int = VMEM) -> Row | None:
    """Pick the fastest row; among rows within `TIE` of it, the one with the least VMEM; None if none fits.

    >>> row = dict(slots=512, us=100.0, vmem=2**20, spills=0.0)
    >>> pick([row, row | dict(slots=1024, us=99.0, vmem=2**21)])["slots"]
    512
    """
    fit = [row for row in rows if "error" not in row and row["vmem"] <= vmem and row["spills"] <= SPILLS]
    if not fit:
        return None
    least = min(row["us"] for row in fit)
    return min((row for row in fit if row["us"] <= least * (1 + TIE)), key=lambda x: (x["vmem"], x["slots"]))


def best(found: list[Row]) -> list[Row]:
    """Rows of the table: the best of every operation, generation, payload and width that has one."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        groups.setdefault(_place(row), []).append(row)
    chosen = {place: pick(rows, SWEEPS[place[0]].vmem) for place, rows in groups.items()}
    return [
        dict(zip(("operation", "generation", "payload", "width"), place, strict=True))
        | {name: row[name] for name in ("slots", "us", "vmem", "libtpu")}
        for place, row in chosen.items()
        if row is not None
    ]


def _place(row: Row) -> tuple[Any, ...]:
    return row["operation"], row["topology"].split(":")[0], row["payload"], row["width"]


def write_table(found: list[Row], path: Path = TABLE) -> None:
    """Replace the table's entries for the operations and generations in `found`, and keep the rest."""
    table = json.loads(path.read_text()) if path.exists() else {"rows": []}
    swept = {_place(row)[:2] for row in found}
    rows = [row for row in table["rows"] if (row["operation"], row["generation"]) not in swept]
    rows = sorted(
        rows + best(found), key=lambda r: (r["operation"], r["generation"], r["payload"], r["width"])
    )
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    note = "Compiler model, not measured: kvjax aot --tune writes this."
    write_atomic(path, f'{{\n "note": {json.dumps(note)},\n "rows": [\n  {lines}\n ]\n}}\n'.encode())
