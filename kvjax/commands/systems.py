"""`kvjax systems`: every serving system with its paper, or the card of one."""

from __future__ import annotations

import argparse
import json
from typing import Any

HELP = "list the serving systems that `kvjax simulate` runs, or print one's card: paper, sentence, claim"
EXAMPLE = """examples:
  kvjax systems
  kvjax systems sarathi
  kvjax systems --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="whose card to print (default: list all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead: an array, or one card")


def run(args: argparse.Namespace) -> None:
    from kvjax.commands.terminal import BOX, console, pairs
    from kvjax.serve.systems import SYSTEMS
    from kvjax.serve.systems.kernels import KERNELS

    found = [card(args.id)] if args.id else [card(id) for id in (*SYSTEMS, *KERNELS)]
    if args.json:
        print(json.dumps(found[0] if args.id else found, indent=1))
    elif args.id:
        console().print(pairs([(name, text) for name, text in found[0].items() if text]), highlight=False)
    else:
        from rich.table import Table

        table = Table("system", "paper", "what the simulator, or a count, shows", box=BOX)
        for one in found:
            table.add_row(one["system"], one["paper"], one["claim"])
        console().print(table)


def card(id: str) -> dict[str, Any]:
    """Return the fields of a system, or of a kernel, under their names on its card."""
    import inspect

    from kvjax.serve.systems import SYSTEMS, resolve
    from kvjax.serve.systems.kernels import KERNELS

    if kernel := KERNELS.get(id.lower().replace("_", "-")):
        return {
            "system": kernel.id,
            "paper": f"{kernel.title} ({kernel.url})" if kernel.url else kernel.title,
            "runs": kernel.runs,
            "claim": kernel.claim,
            "reverses": kernel.reverses,
            "tested": f"tests/serve/test_kernel_claims.py::{kernel.tested}",
        }
    id = resolve(id)
    function = SYSTEMS[id]
    known = function.paper
    defaults = ", ".join(
        f"{name}={one.default}" for name, one in inspect.signature(function).parameters.items()
    )
    return {
        "system": id,
        "paper": f"{known.title} ({known.url})" if known.url else known.title,
        "about": inspect.cleandoc(function.__doc__ or ""),
        "call": f"{id}({defaults})",
        "sentence": str(function()),
        "claim": known.claim,
        "reverses": known.reverses,
        "tested": f"tests/serve/test_claims.py::{known.tested}",
        "run": f'kvjax simulate --system "{id}()" --synthetic azure-conv',
    }
