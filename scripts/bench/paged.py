"""A decode step over pages beside one over a dense cache: the same rows, the same loop, in turn.

    python -m scripts.bench.paged                      8 rows of the shipped model's shape
    python -m scripts.bench.paged --rows 1 8 16 --slots 128 512

Both sides are slices of the serving engine, 16 steps at a time: one over its pages, one over a cache of
`kvjax.prefill` with as many rows. Milliseconds are those of a core per step, the least of all rounds, because
other load only adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.bench.timing import pin

PAGE = 16


class Side(NamedTuple):
    """16 decode steps: `run(begin())`, of which `begin` is not timed."""

    begin: Callable[[], Any]
    run: Callable[[Any], Any]


def sides(rows: int, slots: int) -> dict[str, Side]:
    """{name: 16 decode steps of `rows` rows of `slots` slots}, which may be called again and again."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import kvjax
    from kvjax.api.step import stepping
    from kvjax.grammar import Method
    from kvjax.serve.device.arena import Arena
    from kvjax.serve.device.jobs import Prompt, job_of
    from kvjax.serve.device.lanes import LaneStep
    from kvjax.serve.device.pages import RequestPages
    from kvjax.serve.device.slice_step import gathered_slice, gathers
    from kvjax.serve.device.write import SLICE, draws_of, write_slice

    model = kvjax.load("recall-tiny")
    text = np.random.default_rng(0).integers(0, model.config.vocab, (rows, slots)).astype(np.int32)
    jobs = [job_of(model, i, Prompt(one, SLICE + 1, stop=[])) for i, one in enumerate(text)]
    active, token, draws = np.ones(rows, bool), np.zeros(rows, np.int32), draws_of(jobs, range(rows), rows)
    _, cache = kvjax.prefill(model, text, room=SLICE)
    one, params = stepping(model, Method(), None)
    blocks = -(-(slots + SLICE) // PAGE)
    pages = RequestPages(model, Arena(model, PAGE, blocks * rows), rows, blocks)
    for i, job in enumerate(jobs):
        pages.tables[job.id] = [*range(i * blocks, (i + 1) * blocks)]
        pages.read(job, 0, slots, slots)
    lists = pages._rows(jobs, rows)

    last = token, active, draws, np.int32(SLICE), 0

    def dense(state: Any) -> None:
        jax.block_until_ready(write_slice(LaneStep(one, True), params, state, *last))

    def paged(pools: Any) -> None:
        # Every call begins with the same lists, so that it writes over what the last one wrote.
        if gathers(pages.step, pools, lists):
            done = jax.block_until_ready(gathered_slice(pages.step, pages.params, pools, lists, *last))
            pages.pools = done.state
        else:
            done = jax.block_until_ready(write_slice(pages.step, pages.params, (pools, lists), *last))
            pages.pools = done.state[0]

    def copied() -> Any:
        # A slice takes its state: every round has one of its own.
        return jax.block_until_ready(jax.tree.map(jnp.copy, cache))

    return {"dense": Side(copied, dense), "paged": Side(lambda: pages.pools, paged)}


def measured(rows: int, slots: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a core per step of both sides, and their ratio."""
    from kvjax.serve.device.write import SLICE

    both = sides(rows, slots)
    for side in both.values():
        side.run(side.begin())
    found = {name: [] for name in both}
    for _ in range(rounds):
        for name, side in both.items():
            state, start = side.begin(), time.process_time()
            side.run(state)
            found[name].append(time.process_time() - start)
    least = {name: 1e3 * min(seconds) / SLICE for name, seconds in found.items()}
    return {**least, "ratio": least["paged"] / least["dense"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], metavar="N")
    parser.add_argument("--slots", type=int, nargs="+", default=[112, 240, 480], metavar="N")
    parser.add_argument("--rounds", type=int, default=40, metavar="N")
    args = parser.parse_args()
    pin(1)
    print("| rows | slots | dense, ms | paged, ms | ratio |\n|---|---|---|---|---|")
    for slots in args.slots:
        for rows in args.rows:
            one = measured(rows, slots, args.rounds)
            print(f"| {rows} | {slots} | {one['dense']:.3f} | {one['paged']:.3f} | {one['ratio']:.2f} |")


if __name__ == "__main__":
    main()
