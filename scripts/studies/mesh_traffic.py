"""Communication of devices in a step and in a prefill of a small decoder, from compiled programs.

It uses eight virtual CPU devices; the collectives and their sizes are those that XLA's partitioner chose. It
writes the tables of docs/scaling.md:

    python -m scripts.studies.mesh_traffic --write
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.feed_forward import MoE
from kvjax.models.mixers.latent import Latent
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.plan.collectives import collectives as program_collectives
from kvjax.plan.sizes import placed_cache
from kvjax.pure import decoding
from kvjax.steps import Run
from scripts.studies.runner import Page, parser

LAYERS, ROWS, TOKENS = 4, 8, 4064
SIZES = dict(vocab=512, d_model=256, layers=LAYERS, heads=16, kv_heads=8, head_dim=32, d_ff=384)
SIZES |= dict(max_positions=2**14)
MODELS = {
    "8 KV heads": Config(**SIZES),
    "2 KV heads": Config(**SIZES | dict(kv_heads=2)),
    "latents": Config(**SIZES, mixers=(Latent(rank=64, rope_dim=16, nope_dim=32, value_dim=32),) * LAYERS),
    "8 experts": Config(**SIZES, mlps=(MoE(experts=8, top=2, width=128),) * LAYERS),
}
CASES = (
    ("batch", "data=8", "8 KV heads"),
    ("tensor", "model=8", "8 KV heads"),
    ("tensor", "data=2,model=4", "8 KV heads"),
    ("tensor", "model=8", "2 KV heads"),
    ("tensor", "model=8", "latents"),
    ("sequence", "seq=8", "8 KV heads"),
    ("tensor+sequence", "model=2,seq=4", "8 KV heads"),
    ("expert", "expert=8", "8 experts"),
    ("fsdp", "data=8", "8 KV heads"),
)
# (devices that share a prompt, its rules, the model, slots that are filled already)
PROMPT = 8192
PROMPTS = (
    ("seq=1", "sequence", "2 KV heads", 0),
    ("seq=2", "sequence", "2 KV heads", 0),
    ("seq=4", "sequence", "2 KV heads", 0),
    ("seq=8", "sequence", "2 KV heads", 0),
    ("seq=8", "sequence", "8 KV heads", 0),
    ("seq=8", "sequence", "latents", 0),
    ("model=2,seq=4", "tensor+sequence", "8 KV heads", 0),
    ("seq=8", "sequence", "2 KV heads", 2**17),
)
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u8": 1, "s8": 1, "pred": 1}
_NAMES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def collectives(hlo: str) -> list[tuple[str, int]]:
    """Return (name, bytes of the result) of every collective of a program, per device."""
    found = []
    for shapes, name in re.findall(rf"= (\(?\w+\[.*?) ({_NAMES})(?:-start)?\(", hlo):
        parts = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        size = sum(
            _BYTES[kind] * int(np.prod([int(n) for n in dims.split(",") if n])) for kind, dims in parts
        )
        found.append((name, size))
    return found


def measured(rules: str, mesh: str, name: str) -> str:
    """One row of the table."""
    config = MODELS[name]
    model = kvjax.spread(Model(config, init(config, jax.random.key(0))), mesh, rules)
    tokens = np.zeros((ROWS, 32), np.int32)
    _, cache = kvjax.prefill(model, tokens, room=TOKENS)
    given = model.params, bare_cache(cache), jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, bool)
    program = steps.step.lower(decoding(model, cache.method, None), *given).compile()
    sent = collectives(program.as_text())
    rows = ROWS // model.on_mesh.devices("batch")  # type: ignore[union-attr]
    counts = Counter(what for what, _ in sent)
    words = ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items()) or "nothing"
    weights = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(model.params))
    whole = sum(x.nbytes for x in jax.tree.leaves(model.params))
    share = kvjax.shardings(cache)
    total = sum(part.nbytes for part in share.parts)
    largest = max((size for _, size in sent), default=0)
    cells = (
        f"`{rules}`", f"`{mesh}`", name, f"{weights / whole:.0%}", f"{share.per_device / total:.0%}", words,
        f"{sum(size for _, size in sent) / rows:,.0f}", f"{largest / rows:,.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Write the table: rules, mesh, model, shares of weights and cache per device, bytes sent in a step."""
    head = (
        "| rules | mesh | model | weights on a device | cache on a device | collectives of a step "
        "| bytes per row | largest |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    return "\n".join([head, *(measured(*case) for case in CASES)])


def compiled_prompt(mesh: str, rules: str, name: str, past: int) -> Any:
    """Compile the program that reads a prompt of one row, over so many filled slots."""
    config = dataclasses.replace(MODELS[name], max_positions=2**20)
    model = kvjax.spread(Model(config, init(config, jax.random.key(0))), mesh, rules)
    run = Run(model.config, Method(), None, model.on_mesh)
    ids, one = jax.ShapeDtypeStruct((1, PROMPT), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def read(params: Any, ids: Any, lengths: Any, cache: Any, room: int = 0) -> Any:
        bound = ids.shape[1] + (past if cache is not None else 0)
        sizes = dict(tokens_bound=bound, room=room, compress=True)
        return steps.prefill(run, params, ids, lengths, cache, **sizes)

    cache = None
    if past:
        before = jax.ShapeDtypeStruct((1, past), jnp.int32)
        cache = jax.eval_shape(lambda *x: read(*x, None, room=PROMPT)[1], model.params, before, one)
        cache = placed_cache(cache, model.on_mesh)
    return jax.jit(read, donate_argnums=(3,)).lower(model.params, ids, one, cache).compile()


def read_prompt(mesh: str, rules: str, name: str, past: int) -> str:
    """One row of the table of prompts."""
    program = compiled_prompt(mesh, rules, name, past)
    sent = program_collectives(program.as_text())
    words = ", ".join(f"{one.count} {one.kind}{'s' if one.count > 1 else ''}" for one in sent) or "nothing"
    temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
    size = sum(one.bytes for one in sent) / LAYERS / 2**20
    before = f"{past:,} tokens" if past else "nothing"
    return f"| `{rules}` | `{mesh}` | {name} | {before} | {temporaries:.1f} MiB | {words} | {size:.2f} MiB |"


def prompts() -> str:
    """Write the table of prompts: tokens read, temporaries per device, and bytes received per layer."""
    head = (
        "| rules | mesh | model | tokens in the cache | temporaries on a device | collectives "
        "| sent per layer |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    return "\n".join([head, *(read_prompt(*case) for case in PROMPTS)])


PAGE = Page("scaling.md", {"traffic": table, "prompts": prompts})

if __name__ == "__main__":
    PAGE.show(parser(__doc__).parse_args())
