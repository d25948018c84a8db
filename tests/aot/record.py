"""The records of what compilers found: a case per line, with the figures that tests and docs/kernels.md use.

`kvjax aot --json` prints everything else of a case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
Rows = Mapping[tuple[str, str], Mapping[str, Any]]
_MEMORY = ("temporaries", "cache", "aliases")
_FITS = (*_MEMORY, "copies")
FIGURES = {
    "baseline": (*_FITS, "staged", "relaid", "vmem", "spills", "bundles_us", "bound", "bound_us"),
    "gpu": (*_FITS, "kernels", "resident", "registers", "spills", "shared", "hbm_us"),
    "host": (*_MEMORY, "host_arguments", "host_aliases", "host_temporaries", "fetches", "beside"),
    "layouts": (*_MEMORY, "leaf", "moved"),
}


class Record(NamedTuple):
    """versions: of the compilers, by package. rows: figures by their names, of (case, device)."""

    versions: dict[str, str]
    rows: dict[tuple[str, str], dict[str, Any]]


def read(name: str) -> Record:
    """Read the record `name` of FIGURES."""
    found = json.loads((FOLDER / f"{name}.json").read_text())
    rows = {
        (case, device): dict(zip(FIGURES[name], row, strict=True)) for case, device, *row in found["rows"]
    }
    return Record(found["versions"], rows)


def text(name: str, versions: Mapping[str, str], rows: Rows) -> str:
    """Write the file's text: of every row, the figures of FIGURES in their order."""
    lines = [json.dumps([*key, *(row[figure] for figure in FIGURES[name])]) for key, row in rows.items()]
    columns = json.dumps(["case", "device", *FIGURES[name]])
    head = f'{{"versions": {json.dumps(dict(versions))},\n"columns": {columns},\n"rows": [\n'
    return head + ",\n".join(lines) + "\n]}\n"
