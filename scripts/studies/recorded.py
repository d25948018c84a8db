"""How near the simulator comes to a run that was recorded: TTFT and TPOT of the same requests, both ways.

    python -m scripts.studies.recorded            ten minutes on an idle core
    python -m scripts.studies.recorded --write    writes the table in docs/how-to/simulate.md

Costs are fitted to the iterations of other requests, and the simulator serves the recorded ones with them.
The other requests are served twice, once with all lengths a quarter: with tables of one width, what a token
costs outside attention and what its pairs cost cannot be told apart. Seconds are those of the process on one
core, which other load on the machine lengthens little. No cost is fitted to the recorded run; which other
loads are measured, and that a mixed step gathers its slots once, were chosen on earlier runs of it. 120
requests are recorded: the 99th percentile of 40 lies between the two slowest, and the simulator's jumps by a
sixth when every iteration takes 3% longer, because arrivals then meet other slices of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.serve import Prompt, run
from kvjax.serve.device.compiling import compiled
from kvjax.serve.device.run import Served
from kvjax.serve.load.metrics import metrics
from kvjax.serve.load.synth import synthetic
from kvjax.serve.load.texts import scaled, texts
from kvjax.serve.sim import Costs, read_costs, simulate
from kvjax.serve.systems import system
from scripts.bench.timing import pin

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "simulate.md"
BEGIN, END = "<!-- recorded: written by scripts/studies/recorded.py --write -->", "<!-- end of recorded -->"
# 26 million random weights: an iteration takes long beside what the host does for it.
CONFIG = Config(
    vocab=512, d_model=512, layers=8, heads=8, kv_heads=4, head_dim=64, d_ff=1536, max_positions=1024
)
LOAD, ROUNDS = "azure-conv:requests={},rate=1,cv=1,seed={}", 3
# Of the recorded requests and of the others: how many, and their seed.
RECORDED, OTHER = (120, 0), (40, 1)
SCALE, SHORTER = 16, 64
SYSTEMS = ("vllm(rows=16)", "sarathi(tokens=64, rows=16)")
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


def served(model: Model, text: str, load: tuple[int, int], scale: int = SCALE) -> Served:
    """Serve so many requests of a seed with a system and record it, lengths divided by `scale`."""
    asked = scaled(synthetic(LOAD.format(*load)), scale)
    prompts = texts(asked, model.config.vocab, model.config.max_positions)
    requests = [
        Prompt(prompt, r.output, stop=[], arrived=r.arrived) for prompt, r in zip(prompts, asked, strict=True)
    ]
    return run(model, requests, system(text), record=True, clock=time.process_time)


def costs_of(runs: Sequence[Served]) -> Costs:
    """Fit the costs to what runs measured."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(len(runs))]
        for file, run in zip(files, runs, strict=True):
            file.write_text(json.dumps(run.measured))
        return read_costs(*files)


def beside(model: Model, text: str) -> dict[str, Any]:
    """Return figures of runs that compiled nothing and of their simulations, each the median of rounds."""
    found: dict[str, list[dict[str, Any]]] = {"run": [], "simulated": []}
    while len(found["run"]) < ROUNDS:
        costs = costs_of([served(model, text, OTHER, scale) for scale in (SCALE, SHORTER)])
        programs = compiled()
        done = served(model, text, RECORDED)
        if programs == compiled():
            again = [entry.request for entry in done.outcome.entries]
            found["run"].append(metrics(done.outcome))
            found["simulated"].append(metrics(simulate(system(text), again, costs, pages=done.pages)))
            print(text, *({name: one[-1][name] for name in FIGURES} for one in found.values()), flush=True)
    medians = {
        side: {name: statistics.median(one[name] for one in rounds) for name in FIGURES}
        for side, rounds in found.items()
    }
    return {"system": text, **medians}


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of the run, how much more or less the simulator says, and how many are near."""
    names = [" ".join([name[:3], name[4:8].upper()]) for name in FIGURES]
    lines = ["| system | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for row in rows:
        cells = [
            f"{row['run'][name]:.0f} ({row['simulated'][name] / row['run'][name] - 1:+.0%})"
            for name in FIGURES
        ]
        lines.append(f"| `{row['system']}` | " + " | ".join(cells) + " |")
    off = [abs(row["simulated"][name] / row["run"][name] - 1) for row in rows for name in FIGURES]
    near = sum(one <= 0.15 for one in off)
    head = f"Seconds are those of the process on one core; {near} of {len(off)} figures are within 15%."
    return "\n".join([head, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    pin(1)
    model = Model(CONFIG, init(CONFIG, jax.random.key(0)))
    found = table([beside(model, text) for text in SYSTEMS])
    print(found)
    if args.write:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
