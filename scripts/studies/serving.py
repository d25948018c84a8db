"""Requests per second by compression ratio, and memory wasted by pages: docs/how-to/simulate.md.

    python -m scripts.studies.serving            prints the tables
    python -m scripts.studies.serving --write    puts them into the page
    python -m scripts.studies.serving simulate   simulates what the data lacks, cell by cell (seconds each)

Nothing is measured: costs come from a roofline. Requests are drawn with the statistics of Azure's
conversations of 2023.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.serve.load.metrics import Slo, metrics, waste
from kvjax.serve.load.synth import synthetic
from kvjax.serve.sim import Costs, simulate
from kvjax.serve.systems import system
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, parser, progress

DATA = Data(DOCS / "serving.json", empty={"goodput": [], "waste": []})
MODEL, DEVICE, REQUESTS, SEED = "llama-3.1-8b", "h100", 1500, 0
SYSTEMS = ("fastertransformer(rows=32, longest=8192)", "vllm", "sarathi(tokens=512)", "sarathi(tokens=2048)")
GIBS, RATIOS = (12, 50), (1.0, 0.5, 0.25)
OBJECTIVE, SHARE = Slo(ttft=0.4, tpot=0.04), 0.9
PAGES = (16, 32, 64, 128, 256)
# The range of requests per second in which the largest rate is searched, and the precision.
LEAST, MOST, CLOSE = 0.25, 40.0, 0.03


def cells() -> list[tuple[str, int, float]]:
    """(system, GiB for the cache, share of its bytes) of every cell."""
    return [(one, gib, ratio) for gib in GIBS for one in SYSTEMS for ratio in RATIOS]


def simulate_all() -> None:
    """Simulates every cell that the data lacks."""
    from kvjax.plan.serving import serving_costs

    data, costs = DATA.read(), Costs(**serving_costs(MODEL, DEVICE))
    data["costs"] = costs.by
    if not data["waste"]:
        load = synthetic(f"azure-conv:requests={REQUESTS},seed={SEED}")
        data["waste"] = [
            {"page": page, "waste": round(waste(simulate(system(f"vllm(page={page})"), load, costs)), 4)}
            for page in PAGES
        ]
    done = {(one["system"], one["gib"], one["ratio"]) for one in data["goodput"]}
    for cell in progress(cell for cell in cells() if cell not in done):
        name, gib, ratio = cell
        given = dataclasses.replace(costs, memory=gib * 2**30).compressed(ratio)
        rate = largest_rate(name, given)
        data["goodput"].append({"system": name, "gib": gib, "ratio": ratio, "rate": round(rate, 2)})
        data["goodput"].sort(key=lambda one: cells().index((one["system"], one["gib"], one["ratio"])))
        DATA.write(data)
        print(*cell, round(rate, 2), flush=True)


def largest_rate(name: str, costs: Costs) -> float:
    """The largest rate at which nine of ten requests meet the objective; 0 if there is none."""
    low, high = LEAST, MOST
    if not _kept(name, costs, low):
        return 0.0
    while high / low > 1 + CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _kept(name, costs, middle) else (low, middle)
    return low


def _kept(name: str, costs: Costs, rate: float) -> bool:
    load = synthetic(f"azure-conv:requests={REQUESTS},seed={SEED},rate={rate}")
    return metrics(simulate(system(name), load, costs), OBJECTIVE)["slo_attained"] >= SHARE


def goodput_table() -> str:
    """Requests per second by system, memory and ratio."""
    found = {(one["system"], one["gib"], one["ratio"]): one["rate"] for one in DATA.read()["goodput"]}
    head = [f"{gib} GiB, {ratio:g} of the bytes" for gib in GIBS for ratio in RATIOS]
    rows: list[list[Any]] = [
        [f"`{name}`", *(found.get((name, gib, ratio), "") for gib in GIBS for ratio in RATIOS)]
        for name in SYSTEMS
    ]
    return _table(["system", *head], rows)


def waste_table() -> str:
    """Share of held slots that store nothing, by page."""
    found = DATA.read()["waste"]
    head = ["page, tokens", *(str(one["page"]) for one in found)]
    return _table(head, [["waste", *(f"{one['waste']:.1%}" for one in found)]])


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


PAGE = Page("how-to/simulate.md", {"goodput": goodput_table, "waste": waste_table})


def main() -> None:
    args = parser(__doc__, ["simulate"]).parse_args()
    if args.what:
        simulate_all()
    PAGE.show(args)


if __name__ == "__main__":
    main()
