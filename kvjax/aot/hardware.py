"""The peak figures of the target devices: TPUs as the compiler describes them, and GPUs."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """generation: its name. clock: cycles per second; hbm: bytes per second; bf16: operations per second.

    cores: TensorCores that a kernel may split its outermost grid axis over. profiles: whether the compiler's
    cycle estimate exists (it aborts on tpu7x).
    """

    generation: str
    clock: float
    hbm: float
    bf16: float
    cores: int = 1
    profiles: bool = True
    platform: str = "tpu"


class Gpu(NamedTuple):
    """Peak figures of a GPU.

    generation: its name, kind: jax's name. capability: CUDA's. clock, hbm, bf16: as in `Device`, without
    sparsity. processors: the multiprocessors, each with `registers`, `shared` bytes of shared memory and
    `threads`. most_shared: the limit per program. cache: bytes of L2; memory: bytes of HBM.
    """

    generation: str
    kind: str
    capability: tuple[int, int]
    clock: float
    hbm: float
    bf16: float
    processors: int
    shared: int
    most_shared: int
    cache: int
    memory: int
    threads: int = 2048
    registers: int = 65536
    platform: str = "gpu"


# HBM and peaks: Google Cloud's TPU pages. Clocks follow from peak and width of the matrix units; v6e's is not
# certain, and tpu7x's is assumed. A tpu7x device is one of two cores of a chip, a v5p device both.
DEVICES = {
    "v5e": Device("v5e", 1.5e9, 819e9, 197e12),
    "v5p": Device("v5p", 1.75e9, 2765e9, 459e12, cores=2),
    "v6e": Device("v6e", 1.75e9, 1640e9, 918e12),
    "tpu7x": Device("tpu7x", 1.9e9, 3690e9, 1153e12, profiles=False),
}
# NVIDIA's data sheets and the CUDA C++ Programming Guide's table of capabilities.
GPUS = {
    "a100": Gpu(
        "a100", "NVIDIA A100-SXM4-80GB", (8, 0), 1.41e9, 2039e9, 312e12, 108, 164 * 1024, 163 * 1024,
        40 * 2**20, 80 * 2**30,
    ),
    "l4": Gpu(
        "l4", "NVIDIA L4", (8, 9), 2.04e9, 300e9, 121e12, 58, 100 * 1024, 99 * 1024, 48 * 2**20, 24 * 2**30,
        threads=1536,
    ),
    "h100": Gpu(
        "h100", "NVIDIA H100 80GB HBM3", (9, 0), 1.98e9, 3350e9, 989e12, 132, 228 * 1024, 227 * 1024,
        50 * 2**20, 80 * 2**30,
    ),
    "b200": Gpu(
        "b200", "NVIDIA B200", (10, 0), 1.97e9, 8000e9, 2250e12, 148, 228 * 1024, 227 * 1024,
        126 * 2**20, 180 * 2**30,
    ),
}  # fmt: skip
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def device_of(topology: str) -> Device | Gpu:
    """Return the device of a topology like "v5e:2x2", or the GPU of a name; ValueError for unknown ones."""
    if topology in GPUS:
        return GPUS[topology]
    name = topology.split(":")[0]
    if name not in DEVICES or ":" not in topology:
        raise ValueError(
            f"unknown topology {topology!r}: expected a generation and a shape, such as "
            f"{', '.join(TOPOLOGIES)}, or a GPU: {', '.join(GPUS)}"
        )
    return DEVICES[name]
