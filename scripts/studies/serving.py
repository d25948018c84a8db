"""Memory wasted by pages: the table in docs/how-to/simulate.md.

    python -m scripts.studies.serving            prints the table
    python -m scripts.studies.serving --write    puts it into the page
    python -m scripts.studies.serving simulate   simulates what the data lacks (seconds)

Nothing is measured: costs come from a roofline. Requests are drawn with the statistics of Azure's
conversations of 2023.
"""

from __future__ import annotations

from kvjax.serve.load.metrics import waste
from kvjax.serve.load.synth import synthetic
from kvjax.serve.sim import Costs, simulate
from kvjax.serve.systems import system
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, parser

DATA = Data(DOCS / "serving.json", empty={"waste": []})
MODEL, DEVICE, REQUESTS, SEED = "llama-3.1-8b", "h100", 1500, 0
PAGES = (16, 32, 64, 128, 256)


def simulate_all() -> None:
    """Simulate every page size that the data lacks."""
    from kvjax.plan.serving import serving_costs

    data, costs = DATA.read(), Costs(**serving_costs(MODEL, DEVICE))
    load, done = synthetic(f"azure-conv:requests={REQUESTS},seed={SEED}"), {x["page"] for x in data["waste"]}
    data["costs"] = costs.by
    for page in PAGES:
        if page not in done:
            found = waste(simulate(system(f"vllm(page={page})"), load, costs))
            data["waste"].append({"page": page, "waste": round(found, 4)})
    DATA.write(data)


def waste_table() -> str:
    """Write the share of allocated slots that store nothing, by page size."""
    found = DATA.read()["waste"]
    head = ["page, tokens", *(str(one["page"]) for one in found)]
    lines = [head, ["---"] * len(head), ["waste", *(f"{one['waste']:.1%}" for one in found)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGE = Page("how-to/simulate.md", {"waste": waste_table})


def main() -> None:
    args = parser(__doc__, ["simulate"]).parse_args()
    if args.what:
        simulate_all()
    PAGE.show(args)


if __name__ == "__main__":
    main()
