"""A decode step over a cache in host memory: what is copied to the device layer by layer, and back.

GPUs: their compiler takes no operand in host memory ahead of time, so the program itself sends the cache
there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.cases.decoder import traced_on
from kvjax.aot.hardware import Device, Gpu
from kvjax.methods import method
from kvjax.models.config import Config
from kvjax.models.params import init, plan
from kvjax.models.placement import weight_layout
from kvjax.ops.base.memory import to_host
from kvjax.ops.base.rope import Rope
from kvjax.state.cache import Cache, host_nbytes, lies_far, nbytes
from kvjax.steps import Run, prefill
from kvjax.steps.decoding.step import step_fn

# Weights of a layer are an eighth of its keys and values, which are half a gigabyte.
CONFIG = Config(
    vocab=256, d_model=2048, layers=6, heads=16, kv_heads=8, head_dim=128, d_ff=4096, rope=Rope(theta=1e4)
)
BATCH, TOKENS, ROOM = 4, 32768 - 128, 128
# Small, since programs that pick take long to compile.
SHORT, SHORT_TOKENS = dataclasses.replace(CONFIG, d_model=1024, layers=2, d_ff=2048), 2048 - 128


class Sentence(NamedTuple):
    """A method, and whether its layers use each other's states, so that they cannot be scanned."""

    text: str
    apart: bool = False


METHODS = {
    name: Sentence(text)
    for name, text in {
        "full": "full + offloaded",
        "kivi": "kivi + offloaded",
        "adakv": "adakv(budget=0.25, page=128) + offloaded",
    }.items()
}
# The device holds a tenth of the slots.
READS = {
    "infinigen": Sentence("infinigen(budget=0.05, skip_layers=1, resident=0.1)", apart=True),
    "tailorkv": Sentence("tailorkv(budget=0.05, resident=0.1)", apart=True),
    **{
        name: Sentence(f"{name}(budget=0.05, resident=0.1)")
        for name in ("shadowkv", "hcattention", "kcache", "retroinfer")
    },
}


def far(device: Device | Gpu, sentence: Sentence, config: Config = CONFIG, bound: int = TOKENS) -> Case:
    """Return a decode step over a cache in host memory, of 4 rows of `bound` tokens, which is donated."""
    ours, stacked = method(sentence.text), device.platform == "tpu" and not sentence.apart
    groups = plan(config, stacked=stacked)
    params = jax.eval_shape(lambda key: init(config, key, jnp.bfloat16, groups=groups), jax.random.key(0))
    tokens, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((BATCH, bound), (BATCH,)))

    def fill(params: Any, tokens: Any, lengths: Any) -> Cache:
        bounds = dict(tokens_bound=bound, room=ROOM, compress=True)
        return prefill(Run(config, ours), params, tokens, lengths, None, **bounds)[1]

    with traced_on(device):
        cache = jax.eval_shape(fill, params, tokens, lengths)
    run = partial(step_fn, Run(config, ours.decode_part()))
    operands = params, cache, lengths, jax.ShapeDtypeStruct((BATCH,), jnp.bool_)
    case = Case(
        run, operands, nbytes(cache), 0, nbytes(cache), "stacked_decode", {}, profiles=False, donated=(1,),
        leaf=host_nbytes(cache) // (2 * config.layers),
    )  # fmt: skip
    if isinstance(device, Gpu):
        return case._replace(run=partial(_sent, run))
    return case._replace(layouts={0: partial(weight_layout, device.generation)})


def _sent(run: Callable[..., Any], params: Any, cache: Cache, *rest: Any) -> Any:
    there = jax.tree.map(lambda x, far: to_host(x) if far else x, cache, lies_far(cache))
    return run(params, there, *rest)


# For codes, XLA for GPUs copies within host memory what the program sends, and then refuses its own copy.
GPU_CASES: dict[str, Callable[..., Case]] = {"host-full": partial(far, sentence=METHODS["full"])}
CASES: dict[str, Callable[..., Case]] = {
    **{f"host-{name}": partial(far, sentence=one) for name, one in METHODS.items()},
    **{
        f"host-{name}": partial(far, sentence=one, config=SHORT, bound=SHORT_TOKENS)
        for name, one in READS.items()
    },
}
