"""A whole decode step of the library's own decoder: XLA must not copy the cache around the kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device, Gpu
from kvjax.grammar import Method
from kvjax.methods import method as build
from kvjax.models.config import Config
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.log_linear import LogLinearDelta
from kvjax.models.mixers.recurrent import GatedDelta
from kvjax.models.params import init, plan
from kvjax.models.placement import weight_layout
from kvjax.ops.base.rope import Rope
from kvjax.ops.decode.stacked_decode import slots_per_step
from kvjax.ops.recurrent.gated_delta import STEP_NUMBERS, SUBLANES
from kvjax.ops.recurrent.log_linear_levels import levels_for
from kvjax.pallas_kernels.block_sizes import GENERATIONS
from kvjax.state.cache import Cache, Paged, Slots, nbytes
from kvjax.state.codes import Codes
from kvjax.steps import Run, prefill
from kvjax.steps.decoding.step import step_fn

# Half of Llama 3 8B, so that weights and cache fit the smallest device.
CONFIG = Config(
    vocab=32000, d_model=4096, layers=16, heads=32, kv_heads=8, head_dim=128, d_ff=14336, rope=Rope(theta=5e5)
)
# The sizes of Llama 3.2 1B: heads of 64.
SMALL = Config(
    vocab=32000, d_model=2048, layers=16, heads=32, kv_heads=8, head_dim=64, d_ff=8192, rope=Rope(theta=5e5)
)
# The sizes of DeepSeek V2 Lite: latents of 512 + 64, its layers dense.
LATENT = Config(
    vocab=32000, d_model=2048, layers=16, heads=16, kv_heads=16, head_dim=192, d_ff=10944,
    rope=Rope(theta=1e4), mixers=(Latent(512, 64, 128, 128),) * 16,
)  # fmt: skip
BATCH, SLOTS = 4, 8192
# The sizes of Gated DeltaNet 1.3B, and its log-linear form. The states of 128 rows exceed a TPU's VMEM.
DELTA = GatedDelta(heads=16, key_dim=128, value_dim=128)
LEVELS = LogLinearDelta(heads=16, key_dim=128, value_dim=128, levels=levels_for(SLOTS))
RECURRENT = Config(
    vocab=32000, d_model=2048, layers=16, heads=16, kv_heads=16, head_dim=128, d_ff=5632,
    rope=Rope(theta=1e4), mixers=(DELTA,) * 16,
)  # fmt: skip


def decoder(device: Device | Gpu, method: Method, config: Config = CONFIG, batch: int = BATCH) -> Case:
    """One token per row over a cache of 8192 tokens, which the step may reuse."""
    groups = plan(config, stacked=device.platform == "tpu")
    dtype = jnp.bfloat16
    params = jax.eval_shape(lambda key: init(config, key, dtype, groups=groups), jax.random.key(0))
    run = Run(config, method)
    tokens = jax.ShapeDtypeStruct((batch, SLOTS - 128), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    fill = partial(prefill, run, tokens_bound=SLOTS - 128, room=128, compress=True)
    with traced_on(device):
        _, cache = jax.eval_shape(lambda p, t, n: fill(p, t, n, None), params, tokens, lengths)
    operands = (params, cache, lengths, jax.ShapeDtypeStruct((batch,), jnp.bool_))
    weights = sum(int(np.prod(x.shape)) * 2 for x in jax.tree.leaves(params))
    slotted = any(mixer.slots(config) for mixer in (mixer_of(config, i) for i in range(config.layers)))
    attended = 4 * config.layers * config.heads * SLOTS * config.head_dim if slotted else 0
    case = Case(
        partial(step_fn, run), operands, weights + _moved(cache), batch * (weights + attended), nbytes(cache),
        "stacked_decode", {}, profiles=False, donated=(1,),
    )  # fmt: skip
    if isinstance(device, Gpu):
        return case._replace(kernel="_decode")
    case = case._replace(layouts={0: partial(weight_layout, device.generation)}, relaid=_narrow(params))
    if not slotted:
        return case._replace(**_steps(cache))
    return case._replace(trips=_trips(device, cache))


def _narrow(params: Any) -> int:
    """Bytes of stacked matrices of few columns, which the compiler copies into another layout on v5p."""
    matrices = (x.shape for x in jax.tree.leaves(params) if x.ndim == 3)
    return sum(2 * int(np.prod(shape)) for shape in matrices if 8 * shape[2] < shape[1])


def _moved(cache: Cache) -> int:
    """Bytes that a step moves: it reads slots, and reads and writes states; of L levels, L / 2 + 1 states."""

    def visited(name: str, x: Any) -> int:
        return nbytes(x) * (x.shape[2] // 2 + 1) // x.shape[2] if name == "levels" else nbytes(x)

    states = [group.state.data for group in cache.groups if group.state is not None]
    if not states:
        return nbytes(cache)
    return sum(2 * visited(*item) for data in states for item in data.items())


def _steps(cache: Cache) -> dict[str, Any]:
    """Return the kernel that steps a state by a token and how often its body runs per layer; RWKV-7: none."""
    state = cache.groups[0].state
    assert state is not None
    states, *others = (x for name, x in state.data.items() if name != "tail")
    if others:
        return dict(kernel="", trips={})
    assert not isinstance(states, Codes)
    if "levels" in state.data:
        _, rows, count, heads, *_ = states.shape
        return dict(kernel="log_linear_step", trips={"1": rows * heads // SUBLANES * (count // 2 + 1)})
    return dict(kernel="gated_delta_step", trips={"1": int(np.prod(states.shape[1:])) // STEP_NUMBERS})


def _trips(device: Device, cache: Cache) -> dict[str, int]:
    """Trips of the average call. There is one call per segment of a group, and every slot is full."""
    segments = [segment for group in cache.groups for segment in group.parts]
    # Layers that read others' slots, or have no mixer, hold none.
    segments = [one for one in segments if isinstance(one, Paged) or one.pos.size]
    lists = steps = 0
    for one in segments:
        if isinstance(one, Paged):
            pool = cache.pools[one.pool]
            rows, slots, shape = [pool.k, pool.v], one.most * pool.page_tokens, one.lengths.shape
        else:
            assert isinstance(one, Slots)
            rows, slots, shape = [x for x in (one.k, one.v) if x is not None], one.capacity, one.pos.shape
        rows = [max(jax.tree.leaves(x), key=lambda leaf: leaf.size) for x in rows]
        mine = int(np.prod(shape[:3]))
        lists += mine
        steps += mine * -(-slots // slots_per_step(*rows, generation=device.generation))
    return {"1": lists // len(segments), "2": steps // len(segments)}


def traced_on(device: Device | Gpu | None) -> Any:
    """Traces as on a device of that generation, on which the capacity of caches depends; None: as here."""
    if device is None:
        return contextlib.nullcontext()
    kind = device.generation
    if device.platform == "tpu":
        kind = next(kind for kind, name in GENERATIONS.items() if name == device.generation)
    chip = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=device.platform)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=chip)
    return jax.sharding.use_abstract_mesh(mesh)


METHODS: dict[str, dict[str, float | str]] = {
    "snapkv": dict(budget=0.25, variant="paper"),
    "adakv": dict(budget=0.25, page=128),
    "h2o": dict(budget=0.25),
    "int8": {},
    "quest": dict(budget=1024),
}
CASES: dict[str, Callable[[Device], Case]] = {
    "decoder-full": partial(decoder, method=Method()),
    "decoder-full-h64": partial(decoder, method=Method(), config=SMALL),
    "decoder-full-mla": partial(decoder, method=Method(), config=LATENT),
    "decoder-delta": partial(decoder, method=Method(), config=RECURRENT, batch=128),
    "decoder-levels": partial(
        decoder, method=Method(), config=dataclasses.replace(RECURRENT, mixers=(LEVELS,) * 16)
    ),
    **{f"decoder-{name}": partial(decoder, method=build(name, **hyper)) for name, hyper in METHODS.items()},
    "decoder-kivi": partial(decoder, method=build("kivi")),
}
