"""What fits which devices, by `kvjax plan`: the tables of docs/scaling-table.md, from its .json.

    python scripts/plan_table.py            prints the tables
    python scripts/plan_table.py --write    puts them into the page
    python scripts/plan_table.py --compile  compiles what the data does not have, cell by cell (minutes each)

The data is written after every cell, so that --compile goes on where it was stopped. Delete a cell to have it
compiled again.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docs_tables import print_or_write

DATA = Path(__file__).parents[1] / "docs" / "scaling-table.json"
ROWS = 8
CONTEXTS = {"1M": 2**20, "128k": 2**17}
TOPOLOGIES = ("v5p:4x4x4", "v5e:16x16", "tpu7x:2x2x1", "v6e:4x4", "v5e:4x4", "h100:8")
CACHES = (
    ("llama-3.1-70b", "full"),
    ("llama-3.1-70b", "snapkv:budget=0.25"),
    ("llama-3.1-70b", "kivi:bits=4"),
    ("deepseek-v3", "full"),
    ("yoco-3b", "full"),
)
GIB = 2**30


def cells() -> list[tuple[str, str, str, str]]:
    """(topology, context, model, method) of every cell, the most interesting first."""
    return [(t, c, *cache) for t in TOPOLOGIES for c in CONTEXTS for cache in CACHES]


def load() -> dict[str, Any]:
    return json.loads(DATA.read_text()) if DATA.exists() else {"cells": []}


def compile_all() -> None:
    """Plans every cell that the data lacks; what cannot fit by its sizes is not compiled."""
    data = load()
    done = {(one["topology"], one["asked"], one["model"], one["method"]) for one in data["cells"]}
    for cell in cells():
        if cell not in done:
            found = _plan(*cell)
            data["cells"].append(found)
            # In one order, whatever was compiled when.
            order = {one: i for i, one in enumerate(cells())}
            data["cells"].sort(key=lambda x: order[x["topology"], x["asked"], x["model"], x["method"]])
            data["versions"] = {name: version(name) for name in ("jax", "libtpu", "jax-cuda13-plugin")}
            DATA.write_text(json.dumps(data, indent=1) + "\n")
            print(*cell, found["fits"], flush=True)


def _plan(topology: str, context: str, model: str, method: str) -> dict[str, Any]:
    from kvjax.plan.named import named
    from kvjax.plan.planning import Asked, Planner
    from kvjax.plan.topologies import topology_of

    devices = topology_of(topology)
    asked = Asked(model, named(model).config, devices, CONTEXTS[context], ROWS, method, chunk=0)
    planner = Planner(asked)
    on = planner.layout.on
    held = planner.sizes.weights(on) + planner.sizes.cache(on, ROWS, CONTEXTS[context])
    assert devices.memory is not None
    plan = planner.plan(compile=held <= devices.memory, largest=False)
    search = planner.search()
    assert search is not None
    kept = ("topology", "model", "mesh", "preset", "weights", "cache", "memory", "fits", "decode")
    return {"asked": context, "method": method, "rows": search.rows(CONTEXTS[context])} | {
        n: plan[n] for n in kept
    }


def table(context: str) -> str:
    """The table of one context, in Markdown."""
    lines = [
        "| devices | model | method | mesh | weights | cache | temporaries | fits | sent | ms | rows |",
        f"|{'---|' * 11}",
    ]
    for one in load()["cells"]:
        if one["asked"] == context:
            lines.append(f"| {' | '.join(_row(one))} |")
    return "\n".join(lines)


def _row(one: dict[str, Any]) -> list[str]:
    step = one["decode"] or {}
    mesh = " x ".join(f"{name} {n}" for name, n in one["mesh"].items() if n > 1)
    sent = sum(count for _, _, count in step.get("collectives", []))
    least = step.get("roofline")
    beside = step["needs"] - one["weights"] - one["cache"] if step.get("needs") else None
    return [
        one["topology"], one["model"], one["method"], mesh,
        *(f"{one[n] / GIB:.1f}" for n in ("weights", "cache")),
        "-" if beside is None else f"{max(beside, 0) / GIB:.2f}",
        {True: "yes", False: "no", None: "?"}[one["fits"]],
        f"{sent / 2**20:.1f}" if step.get("collectives") is not None else "-",
        "-" if least is None else f"{least['ms']:.1f}", str(one["rows"]),
    ]  # fmt: skip


if __name__ == "__main__":
    if "--compile" in sys.argv:
        compile_all()
    else:
        print_or_write(__doc__, "scaling-table.md", {f"plan {c}": lambda c=c: table(c) for c in CONTEXTS})
