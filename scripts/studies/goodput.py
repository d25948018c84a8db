"""Goodput, accuracy and bytes: what a method is worth in requests per second, by system and trace.

    python -m scripts.studies.goodput simulate --traces DIR  # the cells that docs/goodput.json lacks
    python -m scripts.studies.goodput                        # prints the table
    python -m scripts.studies.goodput --write                # writes it into docs/goodput.md
    python -m scripts.studies.goodput picture                # draws docs/goodput.png

DIR holds the files that `TRACES` names. Rates are simulated; costs and bytes are those of `MODEL` on
`DEVICE`. Accuracy is measured: the board's (scripts/studies/board.py), of a smaller model. What a cell does
was fixed before the first run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.base.atomic_files import write_atomic
from kvjax.serve.load.metrics import Slo, metrics
from kvjax.serve.load.traces import read_trace
from kvjax.serve.requests import Request
from kvjax.serve.sim import Compression, Costs, simulate
from kvjax.serve.systems import system
from scripts.docs_tables import DOCS
from scripts.studies import board, goodput_picture
from scripts.studies.runner import Data, Page, parser, progress

DATA = Data(DOCS / "goodput.json", empty={"rates": []})
MODEL, DEVICE, DTYPE, REQUESTS = "llama-3.1-8b", "h100", "bfloat16", 1000
SYSTEMS = (
    "orca(rows=256)",
    "s3",
    "vllm",
    "sarathi(tokens=512)",
    "radixattention(page=64)",
    "sglang(page=64)",
)
METHODS = ("full", "int8", "int4", "kivi", "kvzip(budget=0.25)", "snapkv(budget=0.25)")
TRACES = {
    "azure-conv": "azure_2023_conv.csv",
    "azure-code": "azure_2023_code.csv",
    "mooncake-conversation": "mooncake_conversation.jsonl",
}
# The objective: so many times the seconds in which a prompt of this quantile is read alone, and per token.
ALONE, QUANTILE, TPOT = 5, 0.9, 0.04
# The share of requests that must meet it, and how closely the rate is searched, from which rate up.
SHARE, CLOSE, LEAST, MOST = 0.9, 0.03, 0.05, 1000.0
PROTOCOL = "agnostic"
Line = dict[str, Any]


def main() -> None:
    asked = parser(__doc__, ["simulate", "picture"])
    asked.add_argument("--traces", type=Path, metavar="DIR", help="where the files of the traces are")
    args = asked.parse_args()
    if args.what == "simulate":
        if args.traces is None:
            asked.error("simulate was given without --traces, expected the folder of the traces' files")
        simulate_all(args.traces)
    elif args.what == "picture":
        write_atomic(DOCS / "goodput.png", goodput_picture.picture(rows(), [*TRACES], SYSTEMS))
    else:
        PAGE.show(args)


def cells() -> list[tuple[str, str, str]]:
    """Return (trace, system, method) of every cell."""
    return [*itertools.product(TRACES, SYSTEMS, METHODS)]


def simulate_all(folder: Path) -> None:
    """Find the rate of every cell that the data lacks."""
    from kvjax.plan.serving import serving_compression, serving_costs

    costs = Costs(**serving_costs(MODEL, DEVICE, DTYPE))
    how = {method: serving_compression(MODEL, method, DTYPE) for method in METHODS}
    loads = {name: spread(read_trace(folder / file)) for name, file in TRACES.items()}
    objectives = {name: objective(load, costs) for name, load in loads.items()}
    about = {"costs": dataclasses.asdict(costs), "compressions": how}
    about |= {"objectives": {name: slo._asdict() for name, slo in objectives.items()}}
    DATA.change(lambda data: data.update(about))
    done = {cell_of(one): one["rate"] for one in DATA.read()["rates"]}
    for cell in progress(cell for cell in cells() if cell not in done):
        trace, name, method = cell
        load, slo, chosen = loads[trace][:REQUESTS], objectives[trace], system(name)
        compression = Compression(**how[method])

        def kept(rate: float, given: Any = (load, slo, chosen, compression)) -> bool:
            load, slo, chosen, compression = given
            out = simulate(chosen, at_rate(load, rate), costs, compression=compression)
            return metrics(out, slo)["slo_attained"] >= SHARE

        near = done.get((trace, name, METHODS[max(METHODS.index(method) - 1, 0)]))
        rate = done[cell] = largest_rate(kept, near, 1.25) if near else largest_rate(kept)
        line = {"trace": trace, "system": name, "method": method, "rate": round(rate, 2)}
        DATA.change(lambda data, line=line: _add(data["rates"], line))
        print(*cell, line["rate"], flush=True)


def largest_rate(kept: Callable[[float], bool], guess: float = 4.0, by: float = 2.0) -> float:
    """Find the largest rate at which an objective is met, within `CLOSE`; 0 if it is below `LEAST`.

    It is searched from a guess, in factors of `by` and then between two of them.
    """
    low = high = guess
    if kept(guess):
        while high < MOST and kept(high := by * low):
            low = high
    else:
        while not kept(low := high / by):
            if low < LEAST:
                return 0.0
            high = low
    while high / low > 1 + CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def objective(load: Sequence[Request], costs: Costs) -> Slo:
    """Choose the objective of a trace, which depends on its prompts alone."""
    prompt = int(np.quantile([one.prompt for one in load], QUANTILE))
    return Slo(round(ALONE * costs.seconds(prompt, prompt, prompt * (prompt + 1) // 2), 2), TPOT)


def spread(load: Sequence[Request]) -> list[Request]:
    """Spread requests of one time evenly over the gap to the next: Mooncake's times are rounded to 3 s."""
    times = sorted({one.arrived for one in load})
    gap = dict(zip(times, np.diff([*times, 2 * times[-1] - times[-2]]), strict=True))
    counts, seen, found = Counter(one.arrived for one in load), Counter(), []
    for one in load:
        share = seen[one.arrived] / counts[one.arrived]
        found.append(dataclasses.replace(one, arrived=one.arrived + float(gap[one.arrived]) * share))
        seen[one.arrived] += 1
    return found


def at_rate(load: Sequence[Request], rate: float) -> list[Request]:
    """Stretch or shorten all gaps of the same requests so that `rate` come per second."""
    by = (len(load) - 1) / (load[-1].arrived - load[0].arrived) / rate
    return [dataclasses.replace(one, arrived=one.arrived * by) for one in load]


def cell_of(line: Line) -> tuple[str, str, str]:
    return line["trace"], line["system"], line["method"]


def _add(lines: list[Line], line: Line) -> None:
    lines.append(line)
    order = cells()
    lines.sort(key=lambda one: order.index(cell_of(one)))


# --- what is shown ---------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A method: shares of a slot's bytes and of slots, loss in nats (mean, low, high), rates by cell."""

    method: str
    bytes: float
    slots: float
    nats: tuple[float, float, float]
    rates: dict[tuple[str, str], float]

    @property
    def share(self) -> float:
        """Bytes of a prompt's cache, as a share of the full cache's."""
        return self.bytes * self.slots


def rows() -> list[Row]:
    """Return every method with what the board measured of it, and its rates."""
    data = DATA.read()
    lost = {(one.method, one.budget): one.nats for one in board.losses(board.at_1024(), PROTOCOL)}
    found = []
    for method in METHODS:
        name, _, budget = method.rstrip(")").partition("(budget=")
        loss = None if method == "full" else lost[name, float(budget) if budget else None]
        nats = (0.0, 0.0, 0.0) if loss is None else (loss.mean, loss.low, loss.high)
        rates = {(x["trace"], x["system"]): x["rate"] for x in data["rates"] if x["method"] == method}
        how = data["compressions"][method]
        found.append(Row(method, how["bytes"], how["slots"], nats, rates))
    return found


def table() -> str:
    """Write requests per second of every cell, beside bytes and accuracy."""
    head = ["trace", "method", "bytes, % of bfloat16", "-log p above full"]
    head += [f"`{name}`" for name in SYSTEMS]
    lines = [head, ["---", "---", *["--:"] * (len(head) - 2)]]
    for trace, row in itertools.product(TRACES, rows()):
        rates = [f"{row.rates[trace, name]:.2f}" for name in SYSTEMS]
        lost = "0" if row.method == "full" else f"{row.nats[0]:+.2f} [{row.nats[1]:+.2f}, {row.nats[2]:+.2f}]"
        lines.append([trace, f"`{row.method}`", f"{100 * row.share:.0f}", lost, *rates])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def objectives() -> str:
    """Seconds to the first token and per token, by trace."""
    found = DATA.read()["objectives"]
    lines = ["| trace | first token, s | per token, ms |", "|---|--:|--:|"]
    lines += [f"| {name} | {one['ttft']:g} | {1e3 * one['tpot']:g} |" for name, one in found.items()]
    return "\n".join(lines)


PAGE = Page("goodput.md", {"objectives": objectives, "goodput": table})

if __name__ == "__main__":
    main()
