"""Dispatch: which implementation of an operation runs: the reference, or a kernel if one can."""

from __future__ import annotations

import jax
from jax.sharding import AxisType
from jaxtyping import PyTree

INTERPRET = " interpret"


def platform() -> str:
    """Return the platform traced for, "cpu", "gpu" or "tpu": that of the current mesh, else jax's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def alone(*operands: PyTree) -> bool:
    """Whether one device holds the operands whole, since the compiler does not split kernels over devices.

    Their types say so, inside `jit` too: arrays on a mesh, and everything computed from them, carry that
    mesh. The current mesh counts, too; an axis of one device, or of `shard_map`, splits nothing.
    """
    meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)}
    return all(
        size == 1 or kind == AxisType.Manual
        for mesh in meshes | {jax.sharding.get_abstract_mesh()}
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def kernels_may_run(implementation: str | None) -> bool:
    """Whether any kernel can be chosen, so that operands must be looked at; `implementation` as of `form`."""
    return implementation != "reference" and (implementation is not None or platform() != "cpu")


def form(operation: str, implementation: str | None, *operands: PyTree, **refusals: str) -> str:
    """Choose the implementation to run: "reference", a platform whose kernel runs, or "<platform> interpret".

    operands: what the kernel would read. refusals: for every platform with a kernel, why the kernel cannot
    take them; empty if it can. With implementation None a kernel runs if the platform is its own, it can take
    the operands, and they are `alone`.
    Raises NotImplementedError for a forced implementation that cannot run.

    >>> form("attention", None, tpu=""), form("attention", "tpu interpret", tpu="")
    ('reference', 'tpu interpret')
    """
    here = platform()
    if implementation is None:
        return here if refusals.get(here) == "" and alone(*operands) else "reference"
    if implementation == "reference":
        return implementation
    wanted = implementation.removesuffix(INTERPRET)
    if wanted not in refusals:
        forms = ", ".join(f"{name}, {name}{INTERPRET}" for name in refusals)
        why = [f"there is no such form, expected reference, {forms}, or None to choose"]
    else:
        # Both reasons are given, or a user would fix the shapes before learning that the device is wrong.
        elsewhere = wanted == implementation and wanted != here
        why = [refusals[wanted], f"this runs on {here}" if elsewhere else ""]
    if any(why):
        raise NotImplementedError(
            f"{operation} cannot run as {implementation!r}: {'; '.join(filter(None, why))}"
        )
    return implementation
