"""Compiles a decode step, or a chunk of a prefill, for the devices of a topology, and reads its costs."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh

from kvjax.aot import gpu_reading
from kvjax.aot.hardware import Gpu
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.layers import Params
from kvjax.models.placement import weight_layout
from kvjax.plan.collectives import collectives
from kvjax.plan.job import CompileJob
from kvjax.plan.roofline import roofline
from kvjax.plan.sizes import cache_shapes, placed_cache, placed_weights, tree_bytes, weights
from kvjax.plan.topologies import Topology
from kvjax.steps import Run, prefill
from kvjax.steps.decoding.step import step_fn

# The words by which compilers report that a program does not fit.
_OUT = re.compile(r"Ran out of memory|RESOURCE_EXHAUSTED|Out of memory", re.I)
# "HLO temporaries" are all memory that the program uses there, operands included.
_USED = re.compile(r"(?:Used (?:at least )?|HLO temporaries \()([\d.]+)([KMGT]?)\)? (?:of|exceeds)", re.I)
# The names of Pallas kernels in programs for TPUs and GPUs.
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)"')
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compiled(job: CompileJob) -> dict[str, Any]:
    """Bytes on one device, collectives, seconds and its roofline; "error" if it fails.

    weights, cache: bytes of the operands. arguments, temporaries, outputs, aliases: as the compiler counts
    them, with the padding of tiles. needs: all memory in use at once. collectives: [kind, count, bytes].
    kernels: the number of Pallas calls in the program. prompt_seconds: for all chunks of a prompt.
    """
    mesh = mesh_of(job)
    on = OnMesh(mesh, job.rules)
    run = Run(job.config, job.method, None, on if mesh.size > 1 else None)
    with jax.set_mesh(mesh):
        start = time.perf_counter()
        bare = weights(job.config, job.topology, job.dtype)
        params = placed_weights(job.config, bare, job.topology, on)
        cache = placed_cache(cache_shapes(run, bare, job.batch, job.context, mesh.abstract_mesh), on)
        found: dict[str, Any] = {"weights": tree_bytes(params), "cache": tree_bytes(cache)}
        operands = (_laid_out(params, job.topology), cache, *_rows(job, on))
        lowered = _program(job, run).lower(*operands)
        middle = time.perf_counter()
        try:
            program = lowered.compile()
        except Exception as error:
            seconds = round(time.perf_counter() - middle, 1)
            return found | refused(str(error)) | {"compile_seconds": seconds}
        found["trace_seconds"] = round(middle - start, 1)
        found["compile_seconds"] = round(time.perf_counter() - middle, 1)
    text = program.as_text() or ""
    sent = collectives(text)
    found["kernels"] = len(_KERNEL.findall(text))
    found |= _memory(program) | {"collectives": [list(one) for one in sent]}
    tokens = max(job.chunk, 1)
    least = roofline(job.config, params, cache, job.topology, on, sent, tokens)
    found["roofline"] = None if least is None else least._asdict() | {"ms": least.ms}
    # Over a whole prompt, chunks attend to half of it on average.
    mean = roofline(job.config, params, cache, job.topology, on, sent, tokens, 0.5)
    if job.chunk and mean is not None:
        found["prompt_seconds"] = -(-job.context // job.chunk) * mean.ms / 1e3
    return found


def mesh_of(job: CompileJob) -> Mesh:
    """Build the job's mesh, of devices of its topology, which need not be present."""
    sizes = tuple(job.mesh.values())
    devices = _devices(job.topology)[: int(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), tuple(job.mesh), axis_types=(AxisType.Auto,) * len(sizes))


def _devices(topology: Topology) -> Any:
    if topology.platform == "cpu":
        return jax.devices("cpu")
    if isinstance(topology.device, Gpu):
        target = gpu_reading.target(topology.device)
        shape = f"1x1x{topology.count}"
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices


def _laid_out(params: Params, topology: Topology) -> Params:
    """Weights in the tiles in which `kvjax.load` puts them.

    For split arrays the compiler accepts only the default tiles ("Unexpected XLA layout override").
    """
    split = any(x.sharding.mesh.size > 1 for x in jax.tree.leaves(params))
    if topology.platform != "tpu" or topology.device is None or split:
        return params
    generation = topology.device.generation

    def one(x: Any) -> Any:
        layout = weight_layout(generation, x)
        return (
            x
            if layout is None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(layout, x.sharding))
        )

    return jax.tree.map(one, params)


def _rows(job: CompileJob, on: OnMesh) -> tuple[Any, Any]:
    """Build operands beside weights and cache: a step's tokens and append flags, or a chunk and lengths."""
    b = job.batch
    shapes = ((b, job.chunk), jnp.int32), ((b,), jnp.int32)
    if not job.chunk:
        shapes = ((b,), jnp.int32), ((b,), jnp.bool_)
    put = [jax.ShapeDtypeStruct(s, d, sharding=on.sharding(("batch", None)[: len(s)], s)) for s, d in shapes]
    return put[0], put[1]


def _program(job: CompileJob, run: Run) -> Any:
    if not job.chunk:
        step = run._replace(method=run.method.decode_part())
        return jax.jit(partial(step_fn, step), donate_argnums=(1,))
    room = min(128, job.context // 2)

    def chunk(params: Params, cache: Any, tokens: Any, lengths: Any) -> Any:
        sizes = dict(tokens_bound=job.context - room, room=room, compress=True)
        return prefill(run, params, tokens, lengths, cache, **sizes)

    return jax.jit(chunk, donate_argnums=(1,))


def _memory(program: Any) -> dict[str, int]:
    taken = program.memory_analysis()
    arguments, aliases = taken.argument_size_in_bytes, taken.alias_size_in_bytes
    temporaries, outputs = taken.temp_size_in_bytes, taken.output_size_in_bytes
    return {
        "arguments": arguments,
        "temporaries": temporaries,
        "outputs": outputs,
        "aliases": aliases,
        "needs": arguments + temporaries + outputs - aliases,
    }


def refused(text: str) -> dict[str, Any]:
    """Why a program was not compiled. needs: the bytes it needs, if it is too large and the compiler says so.

    >>> refused("RESOURCE_EXHAUSTED: Ran out of memory on HBM. Used 18.0G of 15.75G hbm.")["needs"] / 2**30
    18.0
    """
    found: dict[str, Any] = {"error": " ".join(text.split())[:300]}
    if not _OUT.search(text):
        return found
    needs = _USED.search(text)
    count = None if needs is None else round(float(needs[1]) * _UNITS[needs[2].upper()])
    return found | {"too_large": True, "needs": count}
