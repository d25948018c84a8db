"""Which form of an operation runs: its plain definition, or a kernel where one can."""

from __future__ import annotations

import jax
from jax.sharding import AxisType

INTERPRET = " interpret"


def platform() -> str:
    """What is being traced for, "cpu", "gpu" or "tpu": the device of the mesh that is set, else jax's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def alone() -> bool:
    """Whether one device sees whole arrays: the compiler does not split a kernel over devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def form(operation: str, implementation: str | None, **refusals: str) -> str:
    """The form to run: "reference", a platform whose kernel runs there, or "<platform> interpret".

    refusals: for every platform with a kernel, why that cannot take the operands; empty where it can. With
    implementation None a kernel is taken where it is at home, takes the operands and has a device to itself.
    Raises NotImplementedError for a forced form that cannot run.

    >>> form("attention", None, tpu=""), form("attention", "tpu interpret", tpu="")
    ('reference', 'tpu interpret')
    """
    here = platform()
    if implementation is None:
        return here if refusals.get(here) == "" and alone() else "reference"
    if implementation == "reference":
        return implementation
    wanted = implementation.removesuffix(INTERPRET)
    why = refusals.get(wanted, "there is no such form")
    if not why and wanted == implementation and wanted != here:
        why = f"this runs on {here}"
    if why:
        raise NotImplementedError(f"{operation} cannot run as {implementation!r}: {why}")
    return implementation
