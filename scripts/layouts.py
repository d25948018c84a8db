"""Compiler reports on one decode step of every layout class: tests/aot/layouts.json, and its table.

python scripts/layouts.py                               # prints the table
python scripts/layouts.py --write                       # puts it into docs/kernels.md
python scripts/layouts.py --compile cpu,v5e:2x2,h100    # compiles all again; extras: tpu, cuda-aot
python scripts/layouts.py --compile h100 --case 'layout-k*'
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docs_tables import write_table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.aot import record

RECORD = record.FOLDER / "layouts.json"
COMPILERS = {"cpu": "jaxlib", "v5e:2x2": "libtpu", "h100": "jax-cuda13-plugin"}


def compile_all(targets: list[str], glob: str) -> None:
    """Compile all matching cases one by one, and saves every row as soon as it is known."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from kvjax.aot.cases.layouts import CASES
    from kvjax.aot.probe import on_cpu, probe
    from kvjax.base.atomic_files import write_atomic

    for target in targets:
        for name in fnmatch.filter(CASES, glob):
            found = on_cpu(name) if target == "cpu" else probe(target, name)
            if "error" in found:
                sys.exit(f"{name} on {target}: {found['error']}")
            print(name, target, {figure: found[figure] for figure in record.FIGURES["layouts"]}, flush=True)
            versions, rows = record.read("layouts")
            versions |= {package: version(package) for package in (COMPILERS[target], "jax")}
            rows = {key: row for key, row in rows.items() if key[0] in CASES} | {(name, target): found}
            order = sorted(rows, key=lambda key: (list(CASES).index(key[0]), list(COMPILERS).index(key[1])))
            text = record.text("layouts", versions, {key: rows[key] for key in order})
            write_atomic(RECORD, text.encode())


def table() -> str:
    """Per class, in MiB: the cache of two layers, and by compiler the bytes moved and extra memory."""
    from kvjax.aot.cases.layouts import SENTENCES
    from kvjax.compat.layout_class import layout_class

    versions, rows = record.read("layouts")
    lines = [
        "Compilers: " + ", ".join(f"{n} {versions[n]}" for n in COMPILERS.values()) + ".",
        "",
        "| class | example | keys of a layer | " + " | ".join(f"{t.split(':')[0]}" for t in COMPILERS) + " |",
        "|---" * (3 + len(COMPILERS)) + "|",
    ]
    for name, sentence in SENTENCES.items():
        kind = f"{layout_class(sentence.method())}{', a layer with a window' * sentence.windowed}"
        found = [rows[f"layout-{name}", target] for target in COMPILERS]
        cells = [f"{found[-1]['leaf'] / 2**20:.0f}", *map(_cell, found)]
        lines.append(f"| {kind} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
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
