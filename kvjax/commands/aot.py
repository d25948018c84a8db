"""`kvjax aot`: what the TPU compiler says of the kernels, without a TPU."""

from __future__ import annotations

import argparse
import fnmatch
import json
from pathlib import Path
from typing import Any

from kvjax.aot.hardware import TOPOLOGIES

HELP = "compile the kernels for TPUs ahead of time, and print what the compiler says of them"
EXAMPLE = """examples:
  kvjax aot --list
  kvjax aot --case 'paged_decode-*-h128' --topology v5e:2x2,v6e:2x2
  kvjax aot --all --json aot.json
  kvjax aot --tune stacked_decode,paged_decode --topology v6e:2x2"""
NOTE = (
    "Compiler model, not measured. bundles: issue cycles of the schedule; model: the compiler's simulated "
    "cycles; hbm, mxu: bytes and operations at the device's published rates."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case",
        default="paged_decode-bfloat16-h128",
        metavar="GLOB",
        help="which cases (default: %(default)s)",
    )
    parser.add_argument(
        "--topology", default=",".join(TOPOLOGIES), metavar="A,B", help="which TPUs (default: %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found to FILE")
    parser.add_argument(
        "--tune", metavar="A,B", help="try slots per step of these operations, and write the kernels' table"
    )
    parser.add_argument(
        "--sweep", default="kvjax-tune.json", metavar="FILE",
        help="where --tune keeps what it found until it is done; a second call goes on from there "
        "(default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """The exit code: 1 where something did not compile."""
    if args.tune is not None:
        _tune(args)
        return 0
    from importlib.metadata import version

    from rich.progress import track

    from kvjax.aot.cases import CASES
    from kvjax.aot.hardware import device_of
    from kvjax.aot.probe import available, probe
    from kvjax.commands.terminal import console
    from kvjax.errors import InputError
    from kvjax.files import write_atomic

    if args.list:
        print("\n".join(CASES))
        return 0
    names = [n for n in CASES if args.all or fnmatch.fnmatch(n, args.case)]
    topologies = args.topology.split(",")
    for topology in topologies:
        device_of(topology)
    if not names:
        raise InputError(f"no case is called {args.case!r}: see `kvjax aot --list`")
    if available():
        raise InputError(available())
    todo = [(name, topology) for name in names for topology in topologies]
    out = console()
    found = []
    for name, topology in track(todo, "compiling", console=out, transient=True):
        found.append({"case": name, "topology": topology} | probe(topology, name))
    if args.json:
        report = {"note": NOTE, "libtpu": version("libtpu"), "jax": version("jax"), "cases": found}
        write_atomic(Path(args.json), (json.dumps(report, indent=1) + "\n").encode())
    out.print(_table(found))
    for row in found:
        if "error" in row:
            out.print(f"{row['case']} on {row['topology']}: {row['error']}")
    out.print(NOTE, style="dim")
    return int(any("error" in row for row in found))


def _tune(args: argparse.Namespace) -> None:
    import os

    from rich.progress import track

    from kvjax.aot.hardware import device_of
    from kvjax.aot.probe import available
    from kvjax.aot.tune import best, check, jobs, measure, write_table
    from kvjax.commands.terminal import console
    from kvjax.errors import InputError
    from kvjax.pallas_kernels.blocks import TABLE

    operations, topologies = args.tune.split(","), args.topology.split(",")
    check(operations)
    for topology in topologies:
        device_of(topology)
    if available():
        raise InputError(available())
    todo, kept = jobs(operations, topologies), Path(args.sweep)
    if not os.access(TABLE, os.W_OK):
        raise InputError(f"{TABLE} cannot be written: tune in a clone that is installed with pip install -e")
    out = console()
    found = list(track(measure(todo, kept), "compiling", total=len(todo), console=out, transient=True))
    write_table(found)
    kept.unlink(missing_ok=True)
    out.print(_tuned(found, best(found)))
    out.print(f"The best of each are in {TABLE}. {NOTE}", style="dim")


def _tuned(found: list[dict[str, Any]], chosen: list[dict[str, Any]]) -> Any:
    """Every candidate; the best stand out, and what does not compile says why."""
    from rich.table import Table

    from kvjax.commands.terminal import BOX, size

    table = Table(box=BOX)
    for name in ("operation", "generation", "payload"):
        table.add_column(name, no_wrap=True)
    for name in ("width", "slots", "us", "VMEM", "spills per bundle", ""):
        table.add_column(name, justify="right")
    names = ("operation", "generation", "payload", "width", "slots")
    taken = {tuple(row[n] for n in names) for row in chosen}
    for row in found:
        what = (row["operation"], row["topology"].split(":")[0], row["payload"], row["width"], row["slots"])
        if "error" in row:
            table.add_row(*map(str, what), "-", "-", "-", row["error"][:60], style="red")
            continue
        figures = (f"{row['us']:.0f}", size(row["vmem"]), f"{row['spills']:.3f}")
        table.add_row(*map(str, what), *figures, "best" if what in taken else "")
    return table


def _table(found: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from kvjax.commands.terminal import BOX, size

    table = Table(box=BOX)
    for name in ("case", "topology"):
        table.add_column(name, no_wrap=True)
    for name in ("temp", "copies", "VMEM", "spills", "bundles us", "model us", "hbm us", "mxu us", "bound"):
        table.add_column(name, justify="right")
    for row in found:
        if "error" in row:
            table.add_row(row["case"], row["topology"], *["-"] * 8, "see below", style="red")
            continue
        table.add_row(
            row["case"], row["topology"], size(row["temporaries"]), str(row["copies"]),
            size(row["vmem"] or 0), str(row["spills"]), f"{row['bundles_us']:.0f}",
            "-" if row["model_us"] is None else f"{row['model_us']:.0f}", f"{row['hbm_us']:.0f}",
            f"{row['mxu_us']:.0f}", f"{row['bound']} {row['bound_us']:.0f}",
        )  # fmt: skip
    return table
