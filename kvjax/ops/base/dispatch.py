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
    implementation None a kernel runs where the platform is its own, it takes the operands, and `alone()`.
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
    if wanted not in refusals:
        forms = ", ".join(f"{name}, {name}{INTERPRET}" for name in refusals)
        why = [f"there is no such form, expected reference, {forms}, or None to choose"]
    else:
        # Both reasons are given, or a user would mend the shapes before learning that the device is wrong.
        elsewhere = wanted == implementation and wanted != here
        why = [refusals[wanted], f"this runs on {here}" if elsewhere else ""]
    if any(why):
        raise NotImplementedError(
            f"{operation} cannot run as {implementation!r}: {'; '.join(filter(None, why))}"
        )
    return implementation
