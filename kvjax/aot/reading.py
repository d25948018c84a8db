"""Parses a compiled module's text and the compiler's dumps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A bundle of instructions: its address, perhaps a loop's mark, and one ">" for every loop around it.
BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*((?:>\s*)*)\{", re.M)
COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* copy\(")
# An instruction's first result and its opcode; an asynchronous instruction can have several results.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \(?(\w+)\[([\d,]*)\].*? ([\w\-]+)\(", re.M)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
FUSED = re.compile(r"fusion\(.*calls=%([\w.\-]+)")
# Opcodes that move data and compute nothing, and those that do not even move data.
MOVING = frozenset(
    ("copy", "copy-start", "transpose", "reverse", "concatenate", "pad", "slice", "dynamic-slice", "gather")
) | {f"{name}{how}" for name in ("all-gather", "all-to-all", "collective-permute") for how in ("", "-start")}
STILL = frozenset(("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"))
# Instructions that start a copy from another memory, with its shapes, and those that wait for it.
FETCH = re.compile(r"^\s*%([\w.\-]+) = .* (?:copy|slice|dynamic-slice)-start\(")
DONE = re.compile(r"-done\(.*?%([\w.\-]+)\)")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
ADDRESS = re.compile(r"^\s*(0x[0-9a-f]+|0)\s")
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
# A jump over a conditional part; the mark denotes code within a loop.
JUMP = re.compile(r":\s*>.*sbr\.rel \(.*?target = \$region(\d+)")
SUB_BYTE = {"s4": 4, "u4": 4, "s2": 2, "u2": 2}


def array_bytes(dtype: str, shape: str) -> int:
    """Bytes of an array as HLO writes it.

    >>> array_bytes("bf16", "4,128"), array_bytes("s4", "256"), array_bytes("f8e5m2", "16")
    (1024, 128, 16)
    """
    found = re.search(r"\d+", dtype)
    bits = SUB_BYTE.get(dtype) or (int(found.group()) if found else 8)
    return math.prod(int(n) for n in shape.split(",") if n) * bits // 8


def memory(compiled: Any, least: int) -> dict[str, Any]:
    """Bytes that a compiled program takes, its copies of at least `least` bytes, and its `largest_move`.

    >>> import jax
    >>> memory(jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((256,), "float32")).compile(), 1024)
    {'arguments': 1024, 'temporaries': 0, 'aliases': 0, 'copies': 0, 'moved': 0}
    """
    taken, module = compiled.memory_analysis(), compiled.as_text() or ""
    return {
        "arguments": taken.argument_size_in_bytes,
        "temporaries": taken.temp_size_in_bytes,
        "aliases": taken.alias_size_in_bytes + taken.host_alias_size_in_bytes,
        "copies": large_copies(module, least),
        "moved": largest_move(module),
    }


def host_memory(compiled: Any, least: int) -> dict[str, int]:
    """Bytes of host memory that a program takes, and its fetches of arrays of at least `least` bytes.

    host_arguments, host_aliases, host_temporaries: as the compiler counts them. fetches: asynchronous copies
    to the device. beside: those that overlap with a feed-forward's computation.
    """
    taken = compiled.memory_analysis()
    fetches, beside = fetched(compiled.as_text() or "", least)
    return {
        "host_arguments": taken.host_argument_size_in_bytes,
        "host_aliases": taken.host_alias_size_in_bytes,
        "host_temporaries": taken.host_temp_size_in_bytes,
        "fetches": fetches,
        "beside": beside,
    }


def fetched(module: str, least: int) -> tuple[int, int]:
    r"""How many arrays are fetched asynchronously from host memory, and how many overlap with computation.

    >>> fetched("ENTRY %m (a: f32[8]) -> f32[8] {\n  %s = (f32[8], f32[8]{0:S(5)}, u32[]) copy-start(%a)\n"
    ...     '  %f = f32[8] fusion(%b), metadata={op_name="jit(f)/mlp/dot"}\n'
    ...     "  %d = f32[8] copy-done(%s)\n}\n", 32)
    (1, 1)
    """
    found, beside = 0, 0
    for _, body in COMPUTATION.findall(module):
        open_: dict[str, bool] = {}
        for line in body.splitlines():
            if (started := FETCH.match(line)) is not None and "S(5)" in line.split("-start(")[0]:
                sizes = [array_bytes(*shape) for shape in SHAPE.findall(line.split("-start(")[0])]
                if max(sizes) >= least:
                    open_[started[1]] = False
            elif (done := DONE.search(line)) is not None and done[1] in open_:
                found, beside = found + 1, beside + open_.pop(done[1])
            elif "/mlp/" in line and (" fusion(" in line or " custom-call(" in line):
                open_ = dict.fromkeys(open_, True)
    return found, beside


def large_copies(module: str, least: int) -> int:
    r"""Return the copies of at least `least` bytes in a module's text: a cache whose layout changed.

    A fusion that aliases its operand does not count: it reads the same memory in other tiles.

    >>> large_copies("%copy.1 = bf16[4,128]{1,0} copy(%a)\n%copy.2 = f32[2]{0} copy(%b)", 1024)
    1
    """
    for name in re.findall(r"output_to_operand_aliasing=.*calls=%([\w.\-]+)", module):
        module = re.sub(rf"^%{re.escape(name)} \(.*?^}}", "", module, flags=re.MULTILINE | re.DOTALL)
    return sum(array_bytes(*m.groups()) >= least for m in COPY.finditer(module))


def largest_move(module: str) -> int:
    r"""Bytes of the largest array that a module makes only to move numbers or to change their order.

    A fusion counts if all of its instructions only move data; one that aliases its operand writes in place.

    >>> largest_move("%f (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
    ...     "  ROOT %c = f32[8]{0} copy(%p)\n}\n\nENTRY %m (a: f32[8]) -> f32[8] {\n"
    ...     "  ROOT %x = f32[8]{0} fusion(%a), kind=kLoop, calls=%f\n}\n")
    32
    """
    bodies = dict(COMPUTATION.findall(module))
    fused = set(FUSED.findall(module))
    made = {name: {one[3] for one in INSTRUCTION.finditer(bodies.get(name, ""))} for name in fused}
    only = {name for name, each in made.items() if each <= MOVING | STILL and each & MOVING}
    found = [0]
    for name, body in bodies.items():
        for line in () if name in fused else body.splitlines():
            if (made := INSTRUCTION.match(line)) is None:
                continue
            call = FUSED.search(line)
            moves = made[3] in MOVING if call is None else call[1] in only and "output_to_operand" not in line
            found += [array_bytes(made[1], made[2])] if moves else []
    return max(found)


def staged(module: str, least: int) -> list[str]:
    """Operands of Pallas calls, of at least `least` bytes, that XLA moved into VMEM (no HBM is read)."""
    found = []
    for call in re.finditer(r"custom-call\(([^)]*)\)[^\n]*tpu_custom_call", module):
        for name in re.findall(r"%([\w.\-]+)", call.group(1)):
            made = re.search(rf"^\s*(?:ROOT )?%{re.escape(name)} = (\w+)\[([\d,]*)\](\S*) ", module, re.M)
            if made and "S(1)" in made.group(3) and array_bytes(made.group(1), made.group(2)) >= least:
                found.append(name)
    return found


def schedule(folder: str, kernel: str) -> dict[str, Any]:
    """Bundles per loop depth and conditional part, spilled stores, VMEM and estimated cycles of a kernel.

    Figures that the dump lacks are None, such as the cycles without a profile.
    """
    bundles: dict[str, int] = {}
    parts: list[int] = []
    for text in _dumps(folder, kernel, "-final_bundles.txt", but="schedule-analysis"):
        parts += branches(text)
        for marks in BUNDLE.findall(text):
            depth = str(marks.count(">"))
            bundles[depth] = bundles.get(depth, 0) + 1
    spills = [
        _spills(text) for text in _dumps(folder, kernel, "-final_hlo-static-per-bundle-utilization.txt")
    ]
    vmem = [_vmem(text, kernel) for text in _dumps(folder, "", "vmem_report.html")]
    profiled = _dumps(f"{folder}/profile", kernel, ".textproto")
    cycles = [int(n) for text in profiled for n in re.findall(r"estimated_cycles: (\d+)", text)]
    return {
        "bundles": bundles,
        "branches": parts,
        "spills": sum(spills) if spills else None,
        "vmem": max(vmem, default=None),
        "cycles": max(cycles, default=0) or None,
    }


def branches(text: str) -> list[int]:
    r"""Bundles of every conditional part within a loop that has no other such part in it, in their order.

    >>> branches("0x0 : > { sbr.rel (%p) target = $region2 }\n0x9 : > { } /* Start region 2 */")
    [9]
    """
    starts: dict[str, int] = {}
    jumps, address = [], 0
    for line in text.splitlines():
        at = ADDRESS.match(line)
        address = int(at[1], 0) if at else address
        for region in REGION.findall(line):
            starts.setdefault(region, address)
        jumps += [(address, region) for region in JUMP.findall(line)]
    spans = [(a, starts[n]) for a, n in jumps if starts.get(n, 0) > a]
    inner = [x for x in spans if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in spans)]
    return [z - a for a, z in inner]


def largest(sizes: list[int], count: int) -> list[int]:
    """Return the `count` largest, in their order.

    >>> largest([3, 9, 1, 7], 2)
    [9, 7]
    """
    chosen = sorted(sorted(range(len(sizes)), key=lambda n: -sizes[n])[:count])
    return [sizes[n] for n in chosen]


def _dumps(folder: str, kernel: str, ending: str, but: str = "\0") -> Iterator[str]:
    for path in sorted(Path(folder).glob(f"*{kernel}*{ending}" if kernel else f"*{ending}")):
        if but not in path.name:
            yield path.read_text(errors="replace")


def _spills(table: str) -> int:
    """Count the spilled stores in a table whose second line names the columns and whose rows are bundles."""
    lines = table.splitlines()
    column = next((i for i, n in enumerate(lines[1].split(",")) if n.strip() == "VSTORE:SPILL"), None)
    if column is None:
        return 0
    start = next(i for i, line in enumerate(lines) if line.startswith("== UTILIZATION"))
    rows = (line.split() for line in lines[start + 1 :])
    return sum(int(row[column]) for row in rows if len(row) > column)


def _vmem(report: str, kernel: str) -> int:
    """Read the kernel's VMEM in bytes, from the compiler's report.

    Its blocks begin at 0, below those that XLA holds through the program: only its own allocations count.
    """
    mark = "const DATA ="
    data = json.JSONDecoder().raw_decode(report[report.index(mark) + len(mark) :].lstrip())[0]
    own = [x["blocks"] for name, x in data["hlo_breakdowns"].items() if name.startswith(kernel)]
    return max((sum(a["size"] for block in x for a in block["allocations"]) for x in own), default=0)
