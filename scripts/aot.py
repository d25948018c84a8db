"""The table of docs/kernels.md, from what `kvjax aot --all --json tests/aot/baseline.json` found.

python scripts/aot.py            # prints the table
python scripts/aot.py --write    # puts it into docs/kernels.md
"""

from __future__ import annotations

import json
from pathlib import Path

from table_page import print_or_write

FOUND = Path(__file__).parents[1] / "tests" / "aot" / "baseline.json"


def table() -> str:
    found = json.loads(FOUND.read_text())
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


if __name__ == "__main__":
    print_or_write(__doc__, "kernels.md", "table", table)
