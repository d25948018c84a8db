"""How much of the copies from host memory a decode step hides behind its own work: for a GPU.

    python -m scripts.bench.overlap                      # on a GPU
    python -m scripts.bench.overlap --smoke              # tiny shapes, on any machine, to try every row
    python -m scripts.bench.overlap --json overlap.json

A model of Llama-8B's shape with random weights reads a prompt, and steps over a cache whose keys and values
are in host memory. The device's profile says when it copied from the host and when a kernel ran; a copy is
hidden as long as a kernel runs. Beside it: a step over the same read with all slots on the device. `specache`
picks a step ahead and `infinigen` a layer ahead, so their copies may begin early; `quest` and `moba` pick in
the layer that reads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.decode import LLAMA_8B, TINY
from scripts.bench.report import cell, table
from scripts.bench.timing import median_in_turn

BUDGET = 0.05
# The settings of every read, and what brings its slots to host memory.
READS = {
    "specache": ("newest=64", "resident=0.0"),
    "infinigen": ("newest=64, window=64", "resident=0.0"),
    "quest": ("page=16, skip_layers=1", "resident=0.0"),
    "moba": ("page=64", "resident=0.0"),
}
HEAD = ("read", "on the device, ms", "in host memory, ms", "copies, ms", "of them hidden")


class Event(NamedTuple):
    """What a stream of a GPU did from one nanosecond to another."""

    name: str
    start: float
    end: float

    @property
    def copies(self) -> bool:
        """Whether it is a copy from the host."""
        return "memcpyh2d" in self.name.lower()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65536, help="of the prompt (default: 65536)")
    parser.add_argument("--steps", type=int, default=16, help="of a round (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="whose medians are told (default: 5)")
    parser.add_argument("--reads", nargs="+", default=list(READS), choices=list(READS), metavar="READ")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    args = parser.parse_args()
    import jax

    if jax.devices()[0].platform != "gpu" and not args.smoke:
        raise SystemExit("jax sees no GPU here: run it on a machine with one, or add --smoke for tiny shapes")
    model = random_model(TINY if args.smoke else LLAMA_8B)
    tokens = 256 if args.smoke else args.tokens
    rows = {name: measured(model, name, tokens, args.steps, args.rounds) for name in args.reads}
    print(table([*HEAD], [[name, *shown(row)] for name, row in rows.items()]))
    if args.json:
        about = {"device": jax.devices()[0].device_kind, "tokens": tokens, "smoke": args.smoke}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def random_model(shape: dict[str, int]) -> Any:
    import jax
    import jax.numpy as jnp

    from kvjax.models.config import Config
    from kvjax.models.model import Model
    from kvjax.models.params import init, plan
    from scripts.bench import made_up_cache

    config = Config(head_dim=shape["d_model"] // shape["heads"], max_positions=2**18, **shape)
    like = jax.eval_shape(lambda key: init(config, key, jnp.bfloat16, plan(config)), jax.random.key(0))
    return Model(config, made_up_cache.weights(like), name="random")


def measured(model: Any, name: str, tokens: int, steps: int, rounds: int) -> dict[str, float | None]:
    """Milliseconds of a step on the device and with host memory, and of its copies; the share hidden."""
    plain, host = READS[name]
    both = {
        "device": stepping(model, f"{name}(budget={BUDGET}, {plain})", tokens, steps, rounds),
        "host": stepping(model, f"{name}(budget={BUDGET}, {plain}, {host})", tokens, steps, rounds),
    }
    for run in both.values():
        run()
    seconds = median_in_turn(both, rounds)
    found: dict[str, float | None] = {side: 1e3 * x / steps for side, x in seconds.items()}
    copied, hidden = hidden_share(events(both["host"]))
    return found | {"copies": copied / 1e6 / steps, "hidden": hidden}


def stepping(model: Any, method: str, tokens: int, steps: int, rounds: int) -> Callable[[], None]:
    """Make a function that takes `steps` steps, one after the other, over a cache that goes on."""
    import jax
    import numpy as np

    import kvjax

    ids = np.random.default_rng(0).integers(0, model.config.vocab, (1, tokens))
    room = steps * (rounds + 3)
    state = [kvjax.prefill(model, ids, method=kvjax.method(method), room=room)[1]]

    def run() -> None:
        logits = None
        for i in range(steps):
            logits, state[0] = kvjax.step(model, state[0], np.array([i + 3]))
        jax.block_until_ready(logits)

    return run


def events(run: Callable[[], None]) -> list[Event]:
    """Record what the streams of GPUs did while `run` ran; empty on other devices."""
    import jax

    found = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    for x in line.events if line.name.startswith("Stream") else ():
                        found.append(Event(x.name, x.start_ns, x.start_ns + x.duration_ns))
    return found


def hidden_share(found: Iterable[Event]) -> tuple[float, float | None]:
    """Nanoseconds in which something is copied from the host, and the share in which a kernel runs, too.

    >>> hidden_share([Event("MemcpyH2D", 0, 10), Event("fusion", 4, 6), Event("gemm", 5, 12)])
    (10.0, 0.6)
    """
    found = list(found)
    copies = joined(x for x in found if x.copies)
    kernels = joined(x for x in found if "memcpy" not in x.name.lower())
    total = float(sum(end - start for start, end in copies))
    both = sum(max(0.0, min(e, f) - max(s, t)) for s, e in copies for t, f in kernels)
    return total, both / total if total else None


def joined(found: Iterable[Event]) -> list[tuple[float, float]]:
    """Join the times at which any of these events lasts, as intervals without overlap."""
    out: list[tuple[float, float]] = []
    for x in sorted(found, key=lambda x: x.start):
        if out and x.start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], x.end)
        else:
            out.append((x.start, x.end))
    return out


def shown(row: dict[str, float | None]) -> list[str]:
    hidden = "nothing was copied" if row["hidden"] is None else f"{100 * row['hidden']:.0f} %"
    return [cell(row["device"], ".2f"), cell(row["host"], ".2f"), cell(row["copies"], ".2f"), hidden]


if __name__ == "__main__":
    main()
