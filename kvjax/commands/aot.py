"""`kvjax aot`: compiles the kernels for TPUs and GPUs that need not be present."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.aot.hardware import GPUS, TOPOLOGIES, Device, Gpu

if TYPE_CHECKING:
    from rich.table import Table

HELP = "compile the kernels for TPUs or GPUs ahead of time, and print what the compiler says of them"
EXAMPLE = """examples:
  kvjax aot --list
  kvjax aot --case 'paged_decode-*-h128' --topology v5e:2x2,v6e:2x2
  kvjax aot --case 'decoder-*' --topology h100,a100
  kvjax aot --all --json aot.json
  kvjax aot --tune stacked_decode,paged_decode --topology v6e:2x2"""
NOTE = (
    "Compiler model, not measured. bundles: issue cycles of the schedule; model: the compiler's simulated "
    "cycles; hbm, mxu: bytes and operations at the device's published rates."
)
NOTE_GPU = (
    "Compiled, not measured. registers: of a thread; spills: bytes it moves for want of more; resident: "
    "programs that one processor holds; waves: turns in which all run; hbm, mxu: as of a TPU."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case",
        default="paged_decode-bfloat16-h128",
        metavar="GLOB",
        help="which cases (default: %(default)s)",
    )
    parser.add_argument(
        "--topology",
        default=",".join(TOPOLOGIES),
        metavar="A,B",
        help=f"which TPUs or GPUs ({', '.join(GPUS)}; default: %(default)s)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every case but 'layout-*', whose record scripts/layouts.py writes, and 'host-*'",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the cases of the first topology and stop"
    )
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
    """Compile, and return the exit code: 1 if something did not compile."""
    import jax

    # Only child processes compile. Here, libtpu would only print at length that it finds no TPU.
    jax.config.update("jax_platforms", "cpu")
    if args.tune is not None:
        _tune(args)
        return 0
    # With CUDA's compiler but without its libraries, jax would print at length that they are missing.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from kvjax.aot.hardware import device_of
    from kvjax.aot.probe import cases_of, probe
    from kvjax.base.atomic_files import check_file, write_named
    from kvjax.commands.terminal import console, print_text, tracked

    check_file(args.json)
    devices = {topology: device_of(topology) for topology in args.topology.split(",")}
    if args.list:
        print("\n".join(cases_of(next(iter(devices.values())))))
        return 0
    todo = _todo(args, devices)
    out = console()
    found = []
    for name, topology in tracked(todo, "compiling", console=out):
        found.append({"case": name, "topology": topology} | probe(topology, name))
    if args.json:
        write_named(Path(args.json), (json.dumps(_report(found), indent=1) + "\n").encode())
    for table, note, rows in ((_table, NOTE, "tpu"), (_gpu_table, NOTE_GPU, "gpu")):
        own = [row for row in found if devices[row["topology"]].platform == rows]
        if own:
            out.print(table(own))
            print_text(out, note, style="dim")
    for row in found:
        if "error" in row:
            out.print(f"{row['case']} on {row['topology']}: {row['error']}")
    return int(any("error" in row for row in found))


def _todo(args: argparse.Namespace, devices: dict[str, Device | Gpu]) -> list[tuple[str, str]]:
    """Return the (case, topology) pairs to compile; InputError if there are none, or no compiler."""
    from kvjax.aot.probe import available, cases_of
    from kvjax.base.errors import InputError

    todo = [
        (name, topology)
        for topology, device in devices.items()
        for name in cases_of(device)
        if (not name.startswith(("layout-", "host-")) if args.all else fnmatch.fnmatch(name, args.case))
    ]
    if not todo:
        raise InputError(f"no case is called {args.case!r}: see `kvjax aot --list`")
    for device in devices.values():
        if why := available(device.platform):
            raise InputError(why)
    return sorted(todo, key=lambda x: x[0])


def _report(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the --json file: the rows, and the versions of the packages that made them."""
    from importlib.metadata import PackageNotFoundError, version

    made = {}
    for name in ("libtpu", "jax-cuda13-plugin", "jax"):
        try:
            made[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"note": f"{NOTE} {NOTE_GPU}", **made, "cases": found}


def _tune(args: argparse.Namespace) -> None:
    from kvjax.aot.hardware import device_of
    from kvjax.aot.probe import available
    from kvjax.aot.tune import best, check, jobs, measure, write_table
    from kvjax.base.errors import InputError
    from kvjax.commands.terminal import console, print_text, tracked
    from kvjax.pallas_kernels.block_sizes import TABLE

    operations, topologies = args.tune.split(","), args.topology.split(",")
    check(operations)
    for topology in topologies:
        if device_of(topology).platform != "tpu":
            raise InputError(f"{topology} is no TPU: the kernels of GPUs are tuned by scripts/bench.py")
    if available():
        raise InputError(available())
    todo, kept = jobs(operations, topologies), Path(args.sweep)
    if not os.access(TABLE, os.W_OK):
        raise InputError(f"{TABLE} cannot be written: tune in a clone that is installed with pip install -e")
    out = console()
    found = list(tracked(measure(todo, kept), "compiling", total=len(todo), console=out))
    write_table(found)
    kept.unlink(missing_ok=True)
    out.print(_tuned(found, best(found)))
    print_text(out, f"The best of each are in {TABLE}. {NOTE}", style="dim")


def _tuned(found: list[dict[str, Any]], chosen: list[dict[str, Any]]) -> Table:
    """Return a table of all candidates: the best are highlighted, and failures show their error."""
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


def _table(found: list[dict[str, Any]]) -> Table:
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


def _gpu_table(found: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    from kvjax.commands.terminal import BOX, size

    table = Table(box=BOX)
    for name in ("case", "GPU"):
        table.add_column(name, no_wrap=True)
    figures = ("registers", "spills", "shared", "resident", "waves")
    for name in ("temp", "copies", *figures, "hbm us", "mxu us"):
        table.add_column(name, justify="right")
    for row in found:
        if "error" in row:
            table.add_row(row["case"], row["topology"], *["-"] * 7, "see below", style="red")
            continue
        own = ("-" if row[name] is None else str(row[name]) for name in figures)
        table.add_row(
            row["case"], row["topology"], size(row["temporaries"]), str(row["copies"]), *own,
            f"{row['hbm_us']:.0f}", f"{row['mxu_us']:.0f}",
        )  # fmt: skip
    return table
