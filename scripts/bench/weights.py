"""A decode step whose weights are in host memory or on a disk, beside Accelerate's, in one run.

    python -m scripts.bench.weights             the table of docs/benchmarks.md
    python -m scripts.bench.weights --rows 4 --layers 2

Both libraries have the weights of one random Llama in float32, sides take turns, and all must write the same
tokens. Milliseconds are those of a core per step, the least of all rounds, because other load only adds.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.timing import pin

PROMPT, STEPS = 64, 16
SIZES = dict(
    vocab_size=512, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4,
    max_position_embeddings=1024, tie_word_embeddings=False,
)  # fmt: skip


class Side(NamedTuple):
    """`STEPS` decode steps: `run(begin())`, which returns the tokens [rows, STEPS]; `begin` is not timed."""

    begin: Callable[[], Any]
    run: Callable[[Any], np.ndarray]


def torch_side(theirs: Any, text: np.ndarray) -> Side:
    """Make the loop of transformers over a model, wherever Accelerate keeps its weights."""
    import torch

    with torch.no_grad():
        read = theirs(torch.tensor(text), use_cache=True)
    first = read.logits[:, -1].argmax(-1)

    def run(cache: Any) -> np.ndarray:
        token, found = first, []
        with torch.no_grad():
            for _ in range(STEPS):
                logits = theirs(token[:, None], past_key_values=cache, use_cache=True).logits
                token = logits[:, -1].argmax(-1)
                found.append(token.numpy())
        return np.stack(found, 1)

    return Side(lambda: copy.deepcopy(read.past_key_values), run)


def our_sides(model: Any, text: np.ndarray) -> dict[str, Side]:
    """Make the serving engine's steps of rows in lanes, with weights in every memory of the backend."""
    import jax
    import jax.numpy as jnp

    import kvjax
    from kvjax.api.step import stepping
    from kvjax.grammar import Method
    from kvjax.ops.base.memory import offers_host, to_device, to_host
    from kvjax.serve.device.jobs import Prompt, job_of
    from kvjax.serve.device.lanes import LaneStep
    from kvjax.serve.device.write import draws_of, write_slice

    rows = len(text)
    logits, cache = kvjax.prefill(model, text, room=STEPS)
    first = np.asarray(logits.argmax(-1), np.int32)
    one, params = stepping(model, Method(), None)
    step, active = LaneStep(one, True), np.ones(rows, bool)
    jobs = [job_of(model, i, Prompt(x, STEPS, stop=[])) for i, x in enumerate(text)]
    draws = draws_of(jobs, range(rows), rows)

    def side(brought: Callable[[], Any], each: int) -> Side:
        """Make steps that bring their weights once for every `each` of them."""

        def run(state: Any) -> np.ndarray:
            token, found = first, []
            for _ in range(0, STEPS, each):
                done = write_slice(step, brought(), state, token, active, draws, np.int32(each), 0)
                token, state = done.token, done.state
                found.append(np.asarray(done.found[0])[:, :each])
            return np.concatenate(found, 1)

        # A slice takes its state: every round has one of its own.
        return Side(lambda: jax.block_until_ready(jax.tree.map(jnp.copy, cache)), run)

    host, pinned = jax.device_get(params), to_host(params)
    sides = {
        "kvjax, on the device": side(lambda: params, 1),
        "kvjax, in host memory (`hf_accelerate`)": side(lambda: host, 1),
    }
    if offers_host():
        far = lambda: to_device(pinned)  # noqa: E731
        sides["kvjax, in `pinned_host`, copied for every step"] = side(far, 1)
        sides[f"kvjax, in `pinned_host`, copied for {STEPS} steps"] = side(far, STEPS)
    return sides


def all_sides(rows: int, layers: int, folder: str) -> tuple[dict[str, Side], int]:
    """Return every side, and the bytes of the weights."""
    import accelerate
    import torch
    import transformers

    import kvjax

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=layers, **SIZES)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    text = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (rows, PROMPT))
    sides = {"transformers, on the device": torch_side(theirs, text)}
    for name, offloaded in (
        ("Accelerate, `cpu_offload`", lambda one: accelerate.cpu_offload(one, execution_device="cpu")),
        ("Accelerate, `disk_offload`", lambda one: accelerate.disk_offload(one, f"{folder}/far", "cpu")),
    ):
        sides[name] = torch_side(offloaded(copy.deepcopy(theirs)), text)
    sides |= our_sides(kvjax.load(folder), text.astype(np.int32))
    return sides, sum(x.numel() * x.element_size() for x in theirs.parameters())


def measured(sides: dict[str, Side], rounds: int) -> dict[str, float]:
    """Milliseconds of a core per step of each side. AssertionError if the sides write different tokens."""
    texts = {name: side.run(side.begin()) for name, side in sides.items()}
    want = next(iter(texts.values()))
    for name, text in texts.items():
        assert (text == want).all(), f"{name} writes other tokens than {next(iter(texts))}"
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            state, start = side.begin(), time.process_time()
            side.run(state)
            found[name].append(time.process_time() - start)
    return {name: 1e3 * min(seconds) / STEPS for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--layers", type=int, default=8, metavar="N")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    args = parser.parse_args()
    pin(1)
    columns = []
    for rows in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            sides, size = all_sides(rows, args.layers, folder)
            columns.append(measured(sides, args.rounds))
    print(f"{size / 2**20:.0f} MiB of weights; milliseconds of a core per step")
    print("| weights | " + " | ".join(f"{n} row{'s' * (n > 1)}" for n in args.rows) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{one[name]:.1f}" for one in columns) + " |")


if __name__ == "__main__":
    main()
