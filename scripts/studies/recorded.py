"""How near the simulator comes to a run that was recorded: TTFT and TPOT of the same requests, both ways.

python scripts/studies/recorded.py [--write]   # --write: the table in docs/how-to/simulate.md

A system serves the requests until nothing is compiled; the iterations of the last run are fitted, and the
simulator serves the same requests with these costs. Settings were chosen before the runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax

from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.serve import Prompt, run
from kvjax.serve.device.compiling import compiled
from kvjax.serve.load.metrics import metrics
from kvjax.serve.load.synth import synthetic
from kvjax.serve.load.texts import scaled, texts
from kvjax.serve.sim import read_costs, simulate
from kvjax.serve.systems import system

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "simulate.md"
BEGIN, END = "<!-- recorded: written by scripts/studies/recorded.py --write -->", "<!-- end of recorded -->"
# 26 million random weights: an iteration takes long beside what the host does for it.
CONFIG = Config(
    vocab=512, d_model=512, layers=8, heads=8, kv_heads=4, head_dim=64, d_ff=1536, max_positions=1024
)
LOAD, SCALE = "azure-conv:requests=40,rate=1,cv=1,seed=0", 16
SYSTEMS = ("vllm(rows=16)", "sarathi(tokens=64, rows=16)")
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


def beside(text: str) -> dict[str, Any]:
    """The figures of a run and of its simulation."""
    model, one = Model(CONFIG, init(CONFIG, jax.random.key(0))), system(text)
    asked = scaled(synthetic(LOAD), SCALE)
    prompts = texts(asked, CONFIG.vocab, CONFIG.max_positions)
    requests = [
        Prompt(prompt, r.output, stop=[], arrived=r.arrived) for prompt, r in zip(prompts, asked, strict=True)
    ]
    programs = -1
    while programs != compiled():
        programs = compiled()
        done = run(model, requests, one, record=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.json"
        file.write_text(json.dumps(done.measured))
        costs = read_costs(file)
    again = [entry.request for entry in done.outcome.entries]
    ours, theirs = metrics(done.outcome), metrics(simulate(one, again, costs, pages=done.pages, steps=16))
    return {"system": text, "run": ours, "simulated": theirs}


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of the run, and how much more or less the simulator says."""
    names = [" ".join([name[:3], name[4:8].upper()]) for name in FIGURES]
    lines = ["| system | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for row in rows:
        cells = [
            f"{row['run'][name]:.0f} ({row['simulated'][name] / row['run'][name] - 1:+.0%})"
            for name in FIGURES
        ]
        lines.append(f"| `{row['system']}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = table([beside(text) for text in SYSTEMS])
    print(found)
    if args.write:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
