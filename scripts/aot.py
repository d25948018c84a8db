"""Records compiler reports on the kernels (tests/aot/*.json), and summarises them in docs/kernels.md.

    kvjax aot --all --json aot.json && python scripts/aot.py aot.json --write

python scripts/aot.py                  # prints the summary of the records
python scripts/aot.py REPORT ...       # puts what `kvjax aot --json` found into the records
python scripts/aot.py --write          # puts the summary into docs/kernels.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs_tables import write_table

from kvjax.aot.cases import CASES, host
from kvjax.aot.cases import gpu as of_gpu
from kvjax.aot.hardware import GPUS, TOPOLOGIES

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.aot import record

# One case of each kernel, for the page.
OF_TPU = [
    "paged_decode-bfloat16-h128", "paged_decode-int8-h128", "paged_decode-kivi2-h128",
    "stacked_decode-bfloat16-h128", "stacked_decode-uint8-h128", "ragged_decode-bfloat16-h128",
    "picked_decode-bfloat16-h128-page16", "grouped_decode-uint2-h128", "mla_decode-bfloat16-n128",
    "paged_append-bfloat16-alone", "flash_prefill-bfloat16-h128", "flash_prefill-bfloat16-h128-back",
    "attention_stats-prompt-sum", "sparse_prompt-bfloat16-128x128-each", "page_scores-bounds-8192",
    "gated_delta-bfloat16", "gated_delta-gradient-bfloat16", "gated_delta-step", "gated_delta-levels",
    "decoder-full",
]  # fmt: skip
OF_GPU = [
    "paged_decode-bfloat16-h128", "paged_decode-int8-h128", "stacked_decode-bfloat16-h128",
    "stacked_decode-uint8-h128", "ragged_decode-bfloat16-h128", "picked_decode-bfloat16-h128-page16",
    "grouped_decode-uint2-h128", "page_scores-bounds-8192", "best_pages-float32-8192",
    "sparse_prompt-bfloat16-128x128-each", "decoder-full",
]  # fmt: skip
KNOWN = {"baseline": CASES, "gpu": of_gpu.CASES, "host": host.CASES | host.GPU_CASES}
WAITS_FOR = {"hbm": "memory", "bundles": "issue", "mxu": "products", "model": "simulation"}


def header(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def put(report: Mapping[str, Any]) -> None:
    """Add a report's rows to the records, which keep rows of other cases by the same compilers.

    Small programs are not recorded, since they only have to compile. Exits if one did not compile, or if a
    record would hold rows of different compilers.
    """
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in report["cases"]:
        if "error" in row:
            sys.exit(f"{row['case']} on {row['topology']}: {row['error']}")
        if not row["case"].endswith("-compiles"):
            staged = len(row.get("staged", ()))
            found.setdefault(_record_of(row), {})[row["case"], row["topology"]] = {**row, "staged": staged}
    for name, new in found.items():
        versions, old = record.read(name)
        made = {package: str(report.get(package)) for package in versions}
        kept = {key: row for key, row in old.items() if key not in new and key[0] in KNOWN[name]}
        if kept and made != versions:
            sys.exit(f"{name}.json is of {versions}, the report of {made}: compile all {len(old)} cases")
        order = [(case, device) for case in KNOWN[name] for device in (*TOPOLOGIES, *GPUS)]
        rows = kept | new
        whole = {key: rows[key] for key in order if key in rows}
        (record.FOLDER / f"{name}.json").write_text(record.text(name, made, whole))


def _record_of(row: Mapping[str, Any]) -> str:
    if row["case"].startswith("host-"):
        return "host"
    return "gpu" if row["topology"] in GPUS else "baseline"


def devices_of(rows: record.Rows) -> list[str]:
    return list(dict.fromkeys(device for _, device in rows))


def summary() -> str:
    """Write the page's summary: the shortest time of one case of each kernel, and what bounds it."""
    versions, rows = record.read("baseline")
    devices = devices_of(rows)
    lines = [f"TPUs; libtpu {versions['libtpu']}, jax {versions['jax']}."]
    lines[0] += " Microseconds, and what they are spent on:"
    lines.append("")
    lines += header("case", *(device.split(":")[0] for device in devices))
    for case in OF_TPU:
        found = [rows[case, device] for device in devices]
        cells = [f"{row['bound_us']:.0f} {WAITS_FOR[row['bound']]}" for row in found]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    versions, rows = record.read("gpu")
    devices, plugin = devices_of(rows), versions["jax-cuda13-plugin"]
    lines += [
        "",
        f"GPUs; jax-cuda13-plugin {plugin}, jax {versions['jax']}. Microseconds that the bytes alone take,",
    ]
    lines += ["and the most registers of a thread, and bytes that it spills, on any of them:", ""]
    lines += header("case", *devices, "registers", "spilled")
    for case in OF_GPU:
        found = [rows[case, device] for device in devices]
        cells = [f"{row['hbm_us']:.0f}" for row in found]
        cells += [str(max(row[figure] for row in found)) for figure in ("registers", "spills")]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT", help="what goes into the records")
    parser.add_argument("--write", action="store_true", help="put the summary into docs/kernels.md")
    given = parser.parse_args()
    for path in given.reports:
        put(json.loads(path.read_text()))
    if given.write:
        write_table("kernels.md", "summary", summary())
    elif not given.reports:
        print(summary())
