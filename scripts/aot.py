"""The table of docs/kernels.md, from what `kvjax aot --all --json tests/aot/baseline.json` found.

python scripts/aot.py            # prints the table
python scripts/aot.py --write    # puts it into docs/kernels.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, FOUND = ROOT / "docs" / "kernels.md", ROOT / "tests" / "aot" / "baseline.json"
START, END = "<!-- table -->", "<!-- end of table -->"


def table(found: dict) -> str:
    lines = [
        f"Compiler model, not measured; libtpu {found['libtpu']}, jax {found['jax']}.",
        "",
        "| case | topology | VMEM, MiB | spills | bundles, us | HBM, us | MXU, us | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        name = f"| {row['case']} | {row['topology']} |"
        if "error" in row:
            lines.append(f"{name} does not compile: {row['error']} | | | | | |")
            continue
        lines.append(
            f"{name} {row['vmem'] / 2**20:.1f} | {row['spills']} | {row['bundles_us']:.0f} | "
            f"{row['hbm_us']:.0f} | {row['mxu_us']:.0f} | {row['bound']}, {row['bound_us']:.0f} us |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    made = table(json.loads(FOUND.read_text()))
    if not parser.parse_args().write:
        print(made)
        return
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{before}{START}\n{made}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
