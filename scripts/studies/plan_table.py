"""Which models fit which devices, by `kvjax plan`: the tables of docs/scaling-table.md, from its .json.

    python -m scripts.studies.plan_table            prints the tables
    python -m scripts.studies.plan_table --write    puts them into the page
    python -m scripts.studies.plan_table compile  compiles what the data lacks, cell by cell (minutes each)
    python -m scripts.studies.plan_table prompts  does so with the chunks of prompts, `PROMPTS`

The data is written after every cell, so `compile` resumes where it was stopped. Delete a cell to compile it
again.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, parser, progress

DATA = Data(DOCS / "scaling-table.json", empty={"cells": []})
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
# Tokens of a prompt chunk, and the devices.
CHUNK = 512
PROMPTS = (
    ("v5p:4x4x4", "1M", "llama-3.1-70b", "full"),
    ("v5p:4x4x4", "128k", "llama-3.1-70b", "full"),
    ("h100:8", "128k", "llama-3.1-70b", "full"),
    ("v6e:4x4", "128k", "llama-3.1-70b", "full"),
    ("v5p:4x4x4", "128k", "llama-3.1-70b", "kivi:bits=4"),
    ("v5p:4x4x4", "1M", "yoco-3b", "full"),
    ("v5e:16x16", "1M", "yoco-3b", "full"),
)
GIB = 2**30


def cells() -> list[tuple[str, str, str, str]]:
    """Return (topology, context, model, method) of every cell, the most interesting first."""
    return [(t, c, *cache) for t in TOPOLOGIES for c in CONTEXTS for cache in CACHES]


def compile_all() -> None:
    """Plan every cell that the data lacks; cells that cannot fit by their sizes are not compiled."""
    data = DATA.read()
    done = {(one["topology"], one["asked"], one["model"], one["method"]) for one in data["cells"]}
    for cell in progress(cell for cell in cells() if cell not in done):
        found = _plan(*cell)
        data["cells"].append(found)
        # A fixed order, independent of the order of compilation.
        order = {one: i for i, one in enumerate(cells())}
        data["cells"].sort(key=lambda x: order[x["topology"], x["asked"], x["model"], x["method"]])
        data["versions"] = {name: version(name) for name in ("jax", "libtpu", "jax-cuda13-plugin")}
        DATA.write(data)
        print(*cell, found["fits"], flush=True)


def compile_prompts() -> None:
    """Compile the chunk of every prompt that the data lacks."""
    data = DATA.read()
    found = data.setdefault("prompts", [])
    done = {(one["topology"], one["asked"], one["model"], one["method"]) for one in found}
    for cell in progress(cell for cell in PROMPTS if cell not in done):
        planner = _planner(*cell, CHUNK)
        keys = ("topology", "asked", "model", "method")
        mesh = {"mesh": planner.layout.mesh, "memory": planner.asked.topology.memory}
        chunk = planner.judged(ROWS, CONTEXTS[cell[1]], CHUNK)
        found.append(dict(zip(keys, cell, strict=True)) | mesh | {"chunk": chunk})
        found.sort(key=lambda x: PROMPTS.index((x["topology"], x["asked"], x["model"], x["method"])))
        DATA.write(data)
        print(*cell, chunk.get("error", chunk["fits"]), flush=True)


def _planner(topology: str, context: str, model: str, method: str, chunk: int) -> Any:
    from kvjax.plan.named import named
    from kvjax.plan.planning import Planner, PlanRequest
    from kvjax.plan.topologies import topology_of

    config = named(model).config
    return Planner(
        PlanRequest(model, config, topology_of(topology), CONTEXTS[context], ROWS, method, chunk=chunk)
    )


def _plan(topology: str, context: str, model: str, method: str) -> dict[str, Any]:
    planner = _planner(topology, context, model, method, 0)
    on = planner.layout.on
    held = planner.sizes.weights(on) + planner.sizes.cache(on, ROWS, CONTEXTS[context])
    memory = planner.asked.topology.memory
    assert memory is not None
    plan = planner.plan(compile=held <= memory, largest=False)
    search = planner.search()
    assert search is not None
    kept = ("topology", "model", "mesh", "preset", "weights", "cache", "memory", "fits", "decode")
    return {"asked": context, "method": method, "rows": search.rows(CONTEXTS[context])} | {
        n: plan[n] for n in kept
    }


def table(context: str) -> str:
    """Write the table of one context, in Markdown."""
    lines = [
        "| devices | model | method | mesh | weights | cache | temporaries | fits | sent | ms | rows |",
        f"|{'---|' * 11}",
    ]
    for one in DATA.read()["cells"]:
        if one["asked"] == context:
            lines.append(f"| {' | '.join(_row(one))} |")
    return "\n".join(lines)


def prompts() -> str:
    """Write the table of chunks, in Markdown."""
    lines = [
        "| devices | tokens | model | method | mesh | weights | cache | temporaries | fits | sent | ms "
        "| prompt |",
        f"|{'---|' * 12}",
    ]
    for one in DATA.read().get("prompts", []):
        chunk = one["chunk"]
        mesh = " x ".join(f"{name} {n}" for name, n in one["mesh"].items() if n > 1)
        cells = [one["topology"], one["asked"], one["model"], one["method"], mesh]
        cells += [f"{chunk[n] / GIB:.1f}" for n in ("weights", "cache")]
        beside = chunk["needs"] - chunk["weights"] - chunk["cache"] if chunk.get("needs") else None
        cells.append("-" if beside is None else f"{max(beside, 0) / GIB:.2f}")
        cells.append({True: "yes", False: "no", None: "?"}[chunk["fits"]])
        least = chunk.get("roofline")
        sent = sum(count for *_, count in chunk.get("collectives", []))
        cells += ["-"] * 3 if least is None else _rates(sent, least["ms"], chunk["prompt_seconds"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rates(sent: int, ms: float, seconds: float) -> list[str]:
    return [f"{sent / 2**20:.0f}", f"{ms:.0f}", f"{seconds:.0f} s"]


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


PAGE = Page(
    "scaling-table.md", {f"plan {c}": lambda c=c: table(c) for c in CONTEXTS} | {"plan prompts": prompts}
)

if __name__ == "__main__":
    args = parser(__doc__, ("compile", "prompts")).parse_args()
    if args.what is None:
        PAGE.show(args)
    else:
        {"compile": compile_all, "prompts": compile_prompts}[args.what]()
