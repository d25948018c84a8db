"""What compilers say of one decode step of every class of layout: tests/aot/layouts.json, and its table.

python scripts/layouts.py                               # prints the table
python scripts/layouts.py --write                       # puts it into docs/kernels.md
python scripts/layouts.py --compile cpu,v5e:2x2,h100    # compiles all again; extras: tpu, cuda-aot
python scripts/layouts.py --compile h100 --case 'layout-k*'
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docs_tables import write_table

RECORD = Path(__file__).parents[1] / "tests" / "aot" / "layouts.json"
COMPILERS = {"cpu": "jaxlib", "v5e:2x2": "libtpu", "h100": "jax-cuda13-plugin"}
FIGURES = ("cache", "leaf", "aliases", "temporaries", "moved")


def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": []}


def compile_all(targets: list[str], glob: str) -> None:
    """Compiles what matches, one by one, and keeps every row as soon as it is known."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from kvjax.aot.cases.layouts import CASES, SENTENCES
    from kvjax.aot.probe import on_cpu, probe
    from kvjax.base.atomic_files import write_atomic
    from kvjax.compat.layout_class import layout_class

    for target in targets:
        for name in fnmatch.filter(CASES, glob):
            found = on_cpu(name) if target == "cpu" else probe(target, name)
            sentence = SENTENCES[name.removeprefix("layout-")]
            kind = f"{layout_class(sentence.method())}{', a layer with a window' * sentence.windowed}"
            figures = {"error": found["error"]} if "error" in found else {n: found[n] for n in FIGURES}
            row = {"case": name, "class": kind, "target": target} | figures
            print(row, flush=True)
            record = recorded()
            rows = {(one["case"], one["target"]): one for one in record["rows"]} | {(name, target): row}
            made = {n: version(n) for n in {COMPILERS[target], "jax"}}
            order = sorted(rows, key=lambda key: (list(CASES).index(key[0]), list(COMPILERS).index(key[1])))
            record = record | made | {"rows": [rows[key] for key in order]}
            write_atomic(RECORD, (json.dumps(record, indent=1) + "\n").encode())


def table() -> str:
    """Per class, in MiB: the cache of two layers, and what each compiler moves and needs beside it."""
    record = recorded()
    rows = {(row["case"], row["target"]): row for row in record["rows"]}
    kinds = {row["case"]: row["class"] for row in record["rows"]}
    lines = [
        "Compilers: " + ", ".join(f"{n} {record[n]}" for n in COMPILERS.values() if n in record) + ".",
        "",
        "| class | example | keys of a layer | " + " | ".join(f"{t.split(':')[0]}" for t in COMPILERS) + " |",
        "|---" * (3 + len(COMPILERS)) + "|",
    ]
    for case, kind in kinds.items():
        found = [rows.get((case, target), {"error": "not compiled"}) for target in COMPILERS]
        leaf = next((row["leaf"] for row in reversed(found) if "leaf" in row), 0)
        cells = [f"{leaf / 2**20:.0f}", *map(_cell, found)]
        lines.append(f"| {kind} | `{case.removeprefix('layout-')}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"][:40]
    copied = f", copies {row['moved'] / 2**20:.0f}" if row["moved"] >= row["leaf"] else ""
    return f"{row['temporaries'] / 2**20:.0f}{copied}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", metavar="A,B", help=f"targets to compile for: {', '.join(COMPILERS)}")
    parser.add_argument("--case", default="*", metavar="GLOB", help="which cases (default: all)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    given = parser.parse_args()
    if given.compile:
        compile_all(given.compile.split(","), given.case)
    if given.write:
        write_table("kernels.md", "layouts", table())
    elif not given.compile:
        print(table())
