"""What a device of each TPU generation can do at most, per device as the compiler lists them."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """generation: its name. clock: cycles per second; hbm: bytes per second; bf16: operations per second.

    cores: TensorCores that a kernel may split its outermost grid axis over. profiles: whether the compiler's
    cycle estimate exists (it aborts on tpu7x). tile: rows of the tiles that bfloat16 weights are multiplied
    in; weights of a layer scan that come in others are laid out anew, all of them, at every call.
    """

    generation: str
    clock: float
    hbm: float
    bf16: float
    cores: int = 1
    profiles: bool = True
    tile: int = 8


# HBM and peaks: Google Cloud's TPU pages. Clocks follow from peak and width of the matrix units; v6e's is not
# certain, and tpu7x's is assumed. A tpu7x device is one of two cores of a chip, a v5p device both.
DEVICES = {
    "v5e": Device("v5e", 1.5e9, 819e9, 197e12),
    "v5p": Device("v5p", 1.75e9, 2765e9, 459e12, cores=2),
    "v6e": Device("v6e", 1.75e9, 1640e9, 918e12),
    "tpu7x": Device("tpu7x", 1.9e9, 3690e9, 1153e12, profiles=False, tile=16),
}
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def device_of(topology: str) -> Device:
    """The device of a topology such as "v5e:2x2"; ValueError for unknown generations."""
    name = topology.split(":")[0]
    if name not in DEVICES or ":" not in topology:
        raise ValueError(
            f"unknown topology {topology!r}: expected a generation and a shape, such as "
            f"{', '.join(TOPOLOGIES)}"
        )
    return DEVICES[name]
