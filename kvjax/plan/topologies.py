"""Topologies by name: which devices, how many, how much memory programs may use, and their links."""

from __future__ import annotations

import difflib
import math
import re
from typing import NamedTuple

from kvjax.aot.hardware import DEVICES, GPUS, Device, Gpu
from kvjax.base.errors import InputError
from kvjax.pallas_kernels.block_sizes import GENERATIONS

KNOWN = ("v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v6e:4x4", "tpu7x:2x2x1", "h100:8")
GIB = 2**30
# GiB of a device's memory that programs may use: of a TPU as its compiler reports when one does not fit, of a
# GPU as its driver reports, of which jax takes all only with XLA_PYTHON_CLIENT_MEM_FRACTION=1.
MEMORY = {
    "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75,
    "a100": 79.25, "l4": 22.49, "h100": 79.64, "b200": 178.35,
}  # fmt: skip
# Bytes per second that a device sends to all its neighbours together, in one direction: from Google Cloud's
# TPU pages (of a tpu7x half a chip's) and NVIDIA's data sheets. An L4 has only PCIe.
LINKS = {
    "v5e": 200e9, "v5p": 600e9, "v6e": 448e9, "tpu7x": 600e9,
    "a100": 300e9, "l4": 32e9, "h100": 450e9, "b200": 900e9,
}  # fmt: skip
# The number of axes of a generation's torus.
_AXES = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
# Devices per chip, if not one.
_PER_CHIP = {"tpu7x": 2}


class Topology(NamedTuple):
    """The devices of a plan.

    count: how many. memory: bytes of one that programs may use, None if not known. device: its peak speeds,
    None for this machine's CPU. links: bytes per second that one sends, 0 for CPUs.
    """

    name: str
    count: int
    device: Device | Gpu | None
    memory: int | None
    links: float

    @property
    def platform(self) -> str:
        return "cpu" if self.device is None else self.device.platform

    @property
    def stacked(self) -> bool:
        """Whether equal layers are stacked and scanned there, as `kvjax.models.params.plan` does."""
        return self.platform == "tpu"

    @property
    def kind(self) -> str:
        """What jax calls one of the devices."""
        if self.device is None:
            return "cpu"
        if isinstance(self.device, Gpu):
            return self.device.kind
        return next(kind for kind, name in GENERATIONS.items() if name == self.device.generation)


def topology_of(name: str) -> Topology:
    """Return the devices of "v5p:4x4x4" (a TPU's shape), "h100:8" (a number of GPUs), or "cpu:8" (for tests).

    Raises InputError, with the nearest name, for others.

    >>> topology_of("tpu7x:2x2x1").count, topology_of("h100:8").platform
    (8, 'gpu')
    """
    family, _, shape = name.partition(":")
    if family in DEVICES:
        return _of_tpus(name, family, shape)
    if family not in (*GPUS, "cpu"):
        near = difflib.get_close_matches(name, KNOWN, 1, 0.5) or difflib.get_close_matches(
            family, KNOWN, 1, 0.3
        )
        hint = f"did you mean {near[0]}?" if near else f"expected one such as {', '.join(KNOWN)}"
        raise InputError(f"unknown topology {name!r}: {hint}")
    if not re.fullmatch(r"[1-9]\d*", shape):
        raise InputError(
            f"topology {name!r} has no number of devices, expected one after the colon: did you mean "
            f"{family}:8?"
        )
    if family == "cpu":
        return Topology(name, int(shape), None, None, 0.0)
    return Topology(name, int(shape), GPUS[family], round(MEMORY[family] * GIB), LINKS[family])


def _of_tpus(name: str, family: str, shape: str) -> Topology:
    sizes = [int(n) for n in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if len(sizes) != _AXES[family]:
        near = next(known for known in KNOWN if known.startswith(f"{family}:"))
        axes = "x".join("ABC"[: _AXES[family]])
        raise InputError(
            f"topology {name!r} has no shape of a {family}, expected {family}:{axes}: did you mean {near}?"
        )
    count = math.prod(sizes) * _PER_CHIP.get(family, 1)
    return Topology(name, count, DEVICES[family], round(MEMORY[family] * GIB), LINKS[family])
