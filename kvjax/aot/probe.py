"""Compiles a case for a TPU or a GPU in a child process, and computes lower bounds of its time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from kvjax.aot import cases, reading
from kvjax.aot.case import Case
from kvjax.aot.cases import gpu as gpu_cases
from kvjax.aot.cases import host, layouts
from kvjax.aot.hardware import Device, Gpu, device_of
from kvjax.aot.reading import largest
from kvjax.base.errors import InputError

SECONDS = 900
# Lets the compiler run without a device. The other two keep a caller's settings from changing the result.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
}
# A line of the compiler's log: F, date, time, thread, place in its source.
FATAL = re.compile(r"^F\d{4} \S+ +\d+ \S+?:\d+\] (.*)", re.M)
RAISED = re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.M)


def available(platform: str = "tpu") -> str:
    """Why nothing can be compiled for TPUs, or GPUs, here; empty if it can."""
    if platform == "gpu" and find_spec("jax_cuda13_plugin") is None:
        return (
            "the CUDA compiler is not installed: pip install 'kvjax[cuda-aot]' (700 MB; no GPU is needed), "
            "or 'kvjax[cuda]' where there is a GPU"
        )
    if platform == "tpu" and find_spec("libtpu") is None:
        return (
            "the TPU compiler is not installed: pip install 'kvjax[tpu]' (libtpu, 690 MB; no TPU is needed)"
        )
    return ""


def probe(topology: str, name: str, **options: Any) -> dict[str, Any]:
    """Return the compiler's figures for case `name` on a `topology` device, with bounds in microseconds.

    options: override those of the case.
    hbm_us, mxu_us: bytes and operations at the device's rates; of a TPU bundles_us, issue cycles of the
    schedule, and model_us, the compiler's simulated cycles (None if it has no estimate); bound_us: the
    largest, and bound its name. Only "error" if it does not compile.

    Raises InputError for unknown cases, ValueError for unknown topologies.
    """
    device = device_of(topology)
    known = cases_of(device)
    if name not in known:
        raise InputError(f"unknown case {name!r} for {topology}: see `kvjax aot --list`")
    case = partial(known[name], **options)(device)
    if isinstance(device, Gpu):
        found = _on_gpu(device, case, topology, name, **options)
    else:
        found = _on_tpu(device, case, topology, name, **options)
    sizes = {"cache": case.cache, "relaid": case.relaid} | ({"leaf": case.leaf} if case.leaf else {})
    return found if "error" in found else found | sizes


def on_cpu(name: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the figures of XLA for CPUs for a class of layout, `layout-...`, compiled in this process.

    options: of the compiler, instead of the process's.
    """
    import jax

    case = layouts.CASES[name](None)
    compiled = jax.jit(case.run, donate_argnums=case.donated).lower(*case.operands).compile(options)
    return reading.memory(compiled, case.leaf) | {"cache": case.cache, "leaf": case.leaf}


def cases_of(device: Device | Gpu) -> dict[str, Callable[..., Case]]:
    """Return the cases that can be compiled for a device, by name."""
    if isinstance(device, Gpu):
        return gpu_cases.CASES | layouts.CASES | host.GPU_CASES
    return cases.CASES | layouts.CASES | host.CASES


def _on_gpu(gpu: Gpu, case: Case, topology: str, name: str, **options: Any) -> dict[str, Any]:
    found = _child("kvjax.aot.gpu_child", topology, name, **options)
    return found if "error" in found else found | _bounds({}, case, gpu)


def _on_tpu(device: Device, case: Case, topology: str, name: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"error": ""}
    # The profiler may abort; everything else of the dump comes without it.
    for how in ("profile", "plain") if device.profiles and case.profiles else ("plain",):
        if "error" in found:
            found = _child("kvjax.aot.child", topology, name, how, **options)
    if "error" in found:
        return found
    cycles = sum(case.trips.get(depth, 1) * n for depth, n in found["bundles"].items())
    for size, runs in zip(largest(found["branches"], len(case.branches)), case.branches, strict=False):
        cycles -= (case.trips["1"] - runs) * size
    cycles /= device.cores
    schedule = {"bundles": cycles / device.clock, "model": (found["cycles"] or 0) / device.clock}
    times = _bounds(schedule, case, device)
    times["model_us"] = times["model_us"] if found["cycles"] else None
    return found | times


def _bounds(schedule: dict[str, float], case: Case, device: Device | Gpu) -> dict[str, Any]:
    bounds = schedule | {"hbm": case.bytes / device.hbm, "mxu": case.flops / device.bf16}
    times = {f"{n}_us": round(t * 1e6, 1) for n, t in bounds.items()}
    bound = max(bounds, key=lambda n: bounds[n])
    return times | {"bound": bound, "bound_us": times[f"{bound}_us"]}


def _child(module: str, topology: str, name: str, *how: str, **options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, topology, name, folder, *how, json.dumps(options)]
        env = os.environ | ENVIRONMENT
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env)
        except subprocess.TimeoutExpired:
            return {"error": f"not compiled within {SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith("AOT "):
            return json.loads(line[4:])
    return {"error": reason(done.stderr)}


def reason(stderr: str) -> str:
    r"""Why a child process failed: the compiler's abort message, or the last exception.

    >>> reason("F1122 07:13:48.1 5018 dumper.cc:1585] failed: INVALID\n    @ 0x7f  absl::log_internal()")
    'failed: INVALID'
    """
    found = FATAL.findall(stderr)[:1] or RAISED.findall(stderr)[-1:] or stderr.splitlines()[-1:]
    return (found or ["the compiler aborted"])[0][:300]
