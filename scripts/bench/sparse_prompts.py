"""Prompts of one model layer: attention to all tokens beside attention to picked blocks, selection included.

    python -m scripts.bench.sparse_prompts                 # the table of docs/benchmarks.md
    python -m scripts.bench.sparse_prompts --tokens 4096 --rounds 1

Sides alternate. Seconds are those of `kvjax.prefill` of a random model, so they have projections, the
feed-forward and the cache, too: of a core on a CPU, which other work on the machine does not lengthen, and by
the clock on a GPU or TPU, where the model is bfloat16 and picked blocks are read by a kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from scripts.bench.report import table, write_json
from scripts.bench.timing import pin

MODEL = dict(
    layers=1, vocab=256, d_model=512, heads=8, kv_heads=2, head_dim=64, d_ff=1408, max_positions=131072
)
# The first attends to a fifth of the pairs of a segment and a block that full attention does.
METHODS = (
    "critiprefill(budget=0.145, segment=128, skip_layers=0)", "xattention", "flexprefill",
    "minference(vertical=256, slash=512)",
)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of a prompt (default: 8192)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="beside full attention")
    parser.add_argument("--rounds", type=int, default=3, help="whose medians are told (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="cores of the process (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    pin(args.threads)
    rows = [row for tokens in args.tokens for row in measured(tokens, args.methods, args.rounds)]
    print(table([*rows[0]], [[str(x) for x in row.values()] for row in rows]))
    write_json(args.json, rows)


def measured(tokens: int, methods: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row per method, the full cache first."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import kvjax
    from kvjax.models.config import Config
    from kvjax.models.model import Model
    from kvjax.models.params import init

    config = Config(**MODEL)
    on_cpu = jax.default_backend() == "cpu"
    model = Model(config, init(config, jax.random.key(0), jnp.float32 if on_cpu else jnp.bfloat16))
    prompt = np.random.default_rng(0).integers(0, MODEL["vocab"], (1, tokens))

    def side(method: str) -> Any:
        return lambda: jax.block_until_ready(kvjax.prefill(model, prompt, method=method, room=0)[0])

    sides = {name: side(name) for name in ("full", *methods)}
    for call in sides.values():
        call()
    found = median_seconds(sides, rounds, time.process_time if on_cpu else time.perf_counter)
    return [
        {
            "tokens": tokens, "method": name, "blocks computed": share(name, model, prompt),
            "seconds": round(seconds, 3), "dense / sparse": round(found["full"] / seconds, 2),
        }
        for name, seconds in found.items()
    ]  # fmt: skip


def median_seconds(
    sides: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of every side, of rounds in which each is called once."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def share(name: str, model: Any, prompt: Any) -> str:
    """Compute the share of the visible pairs of a segment and a block that are attended to, in percent."""
    import jax.numpy as jnp

    import kvjax
    from kvjax.grammar.prompt_reads import PromptQueries
    from kvjax.models.layers import rms_norm
    from kvjax.ops.base.rope import angles, rotate
    from kvjax.read.prompt_blocks import visible_blocks

    read = kvjax.method(name).read_prompt
    if read is None:
        return "100%"
    c, (layer,) = model.config, model.params["layers"]
    x = rms_norm(model.params["embed"][jnp.asarray(prompt)], layer["attn_norm"][0], c.norm_eps)
    pos = jnp.arange(prompt.shape[1])[None]
    cos, sin = angles(c.rope, pos[:, None], c.head_dim, jnp.full((1, 1, 1), prompt.shape[1]))

    def heads(weights: Any, n: int) -> Any:
        y = (x @ weights[0]).reshape(1, -1, n, c.head_dim).swapaxes(1, 2)
        return rotate(y, cos, sin, c.rope.start)

    asked = PromptQueries(
        heads(layer["q"], c.heads), heads(layer["k"], c.kv_heads), pos, jnp.asarray([prompt.shape[1]]),
        c.head_dim**-0.5,
    )  # fmt: skip
    picked = read.pick(asked)[0].blocks
    seen = visible_blocks(pos, read.segment, read.block)
    seen = jnp.broadcast_to(seen, picked.shape)
    return f"{100 * float((picked & seen).sum() / seen.sum()):.3g}%"


if __name__ == "__main__":
    main()
