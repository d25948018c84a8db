"""The record of what compilers say of the kernels (tests/aot/baseline.json and gpu.json), as tables.

python scripts/aot.py            # prints all of it
python scripts/aot.py --write    # puts the summary into docs/kernels.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from docs_tables import write_table

FOLDER = Path(__file__).parents[1] / "tests" / "aot"
TPU = json.loads((FOLDER / "baseline.json").read_text())
GPU = json.loads((FOLDER / "gpu.json").read_text())
# One case of every kernel, for the page.
OF_TPU = [
    "paged_decode-bfloat16-h128", "paged_decode-int8-h128", "paged_decode-kivi2-h128",
    "stacked_decode-bfloat16-h128", "stacked_decode-uint8-h128", "ragged_decode-bfloat16-h128",
    "picked_decode-bfloat16-h128-page16", "grouped_decode-uint2-h128", "mla_decode-bfloat16-n128",
    "paged_append-bfloat16-alone", "flash_prefill-bfloat16-h128", "flash_prefill-bfloat16-h128-back",
    "attention_stats-prompt-sum", "page_scores-bounds-8192", "gated_delta-bfloat16",
    "gated_delta-gradient-bfloat16", "gated_delta-step", "gated_delta-levels", "decoder-full",
]  # fmt: skip
OF_GPU = [
    "paged_decode-bfloat16-h128", "paged_decode-int8-h128", "stacked_decode-bfloat16-h128",
    "stacked_decode-uint8-h128", "ragged_decode-bfloat16-h128", "picked_decode-bfloat16-h128-page16",
    "grouped_decode-uint2-h128", "decoder-full",
]  # fmt: skip
WAITS_FOR = {"hbm": "memory", "bundles": "issue", "mxu": "products", "model": "simulation"}


def header(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def devices_and_rows(record: dict[str, Any]) -> tuple[list[str], dict[tuple[str, str], dict[str, Any]]]:
    rows = {(row["case"], row["topology"]): row for row in record["cases"]}
    return list(dict.fromkeys(topology for _, topology in rows)), rows


def summary() -> str:
    """For the page: the least time of one case of every kernel, and what it waits for."""
    devices, rows = devices_and_rows(TPU)
    lines = [f"TPUs; libtpu {TPU['libtpu']}, jax {TPU['jax']}. Microseconds, and what they are spent on:", ""]
    lines += header("case", *(device.split(":")[0] for device in devices))
    for case in OF_TPU:
        found = [rows[case, device] for device in devices]
        cells = [f"{row['bound_us']:.0f} {WAITS_FOR[row['bound']]}" for row in found]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    devices, rows = devices_and_rows(GPU)
    plugin = GPU["jax-cuda13-plugin"]
    lines += [
        "",
        f"GPUs; jax-cuda13-plugin {plugin}, jax {GPU['jax']}. Microseconds that the bytes alone take,",
    ]
    lines += ["and the most registers of a thread, and bytes that it spills, on any of them:", ""]
    lines += header("case", *devices, "registers", "spilled")
    for case in OF_GPU:
        found = [rows[case, device] for device in devices]
        cells = [f"{row['hbm_us']:.0f}" for row in found]
        cells += [str(max(row[figure] for row in found)) for figure in ("registers", "spills")]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def tpu_table() -> str:
    small = [row for row in TPU["cases"] if row["case"].endswith("-compiles")]
    lines = [f"Compiler model, not measured; libtpu {TPU['libtpu']}, jax {TPU['jax']}.", ""]
    lines += header("case", "topology", "VMEM, MiB", "spills", "bundles, us", "HBM, us", "MXU, us", "bound")
    for row in TPU["cases"]:
        name = f"| {row['case']} | {row['topology']} |"
        if "error" in row:
            lines.append(f"{name} does not compile: {row['error']} | | | | | |")
        elif row not in small:
            lines.append(
                f"{name} {row['vmem'] / 2**20:.1f} | {row['spills']} | {row['bundles_us']:.0f} | "
                f"{row['hbm_us']:.0f} | {row['mxu_us']:.0f} | {row['bound']}, {row['bound_us']:.0f} us |"
            )
    whole = [row for row in small if "error" not in row]
    lines += ["", f"Of {len(small)} small programs `*-compiles` and topologies, {len(whole)} compile."]
    return "\n".join(lines)


def gpu_table() -> str:
    plugin = GPU["jax-cuda13-plugin"]
    lines = [f"Compiled, not measured; jax-cuda13-plugin {plugin}, jax {GPU['jax']}.", ""]
    lines += header(
        "case", "GPU", "temporaries, MiB", "registers", "spilled", "shared, KiB", "resident", "waves",
        "HBM, us", "MXU, us",
    )  # fmt: skip
    for row in GPU["cases"]:
        figures = [row[name] for name in ("registers", "spills", "shared", "resident", "waves")]
        figures[2] = None if figures[2] is None else f"{figures[2] / 1024:.0f}"
        own = " | ".join("XLA's" if x is None else str(x) for x in figures)
        lines.append(
            f"| {row['case']} | {row['topology']} | {row['temporaries'] / 2**20:.1f} | {own} | "
            f"{row['hbm_us']:.0f} | {row['mxu_us']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the summary into docs/kernels.md")
    if parser.parse_args().write:
        write_table("kernels.md", "summary", summary())
    else:
        print(tpu_table(), gpu_table(), sep="\n\n")
