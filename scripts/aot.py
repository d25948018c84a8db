"""The tables of docs/kernels.md, from what `kvjax aot --all` found: tests/aot/baseline.json and gpu.json.

python scripts/aot.py            # prints the tables
python scripts/aot.py --write    # puts them into docs/kernels.md
"""

from __future__ import annotations

import json
from pathlib import Path

from docs_tables import print_or_write

FOLDER = Path(__file__).parents[1] / "tests" / "aot"


def tpu_table() -> str:
    found = json.loads((FOLDER / "baseline.json").read_text())
    lines = [
        f"Compiler model, not measured; libtpu {found['libtpu']}, jax {found['jax']}.",
        "",
        "| case | topology | VMEM, MiB | spills | bundles, us | HBM, us | MXU, us | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    small = [row for row in found["cases"] if row["case"].endswith("-compiles")]
    for row in (row for row in found["cases"] if row not in small):
        name = f"| {row['case']} | {row['topology']} |"
        if "error" in row:
            lines.append(f"{name} does not compile: {row['error']} | | | | | |")
            continue
        lines.append(
            f"{name} {row['vmem'] / 2**20:.1f} | {row['spills']} | {row['bundles_us']:.0f} | "
            f"{row['hbm_us']:.0f} | {row['mxu_us']:.0f} | {row['bound']}, {row['bound_us']:.0f} us |"
        )
    whole = [row for row in small if "error" not in row]
    if small:
        lines += ["", f"Of {len(small)} small programs `*-compiles` and topologies, {len(whole)} compile."]
    return "\n".join(lines)


def gpu_table() -> str:
    found = json.loads((FOLDER / "gpu.json").read_text())
    lines = [
        f"Compiled, not measured; jax-cuda13-plugin {found['jax-cuda13-plugin']}, jax {found['jax']}.",
        "",
        "| case | GPU | temporaries, MiB | registers | spilled | shared, KiB | resident | waves | HBM, us "
        "| MXU, us |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        figures = [row[name] for name in ("registers", "spills", "shared", "resident", "waves")]
        figures[2] = None if figures[2] is None else f"{figures[2] / 1024:.0f}"
        own = " | ".join("XLA's" if x is None else str(x) for x in figures)
        lines.append(
            f"| {row['case']} | {row['topology']} | {row['temporaries'] / 2**20:.1f} | {own} | "
            f"{row['hbm_us']:.0f} | {row['mxu_us']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print_or_write(__doc__, "kernels.md", {"table": tpu_table, "gpu table": gpu_table})
