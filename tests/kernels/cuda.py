"""Kernels of an NVIDIA GPU: run if there is one, otherwise interpreted or lowered."""

import os

import jax

ON_GPU = "cuda" in os.environ["JAX_PLATFORMS"]
FORM = "gpu" if ON_GPU else "gpu interpret"


def as_on_a_gpu():
    """Make a mesh under which programs are lowered for a GPU."""
    kind = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), automatic, abstract_device=kind)
    )


def lowered_for_cuda(call, *shapes):
    """Lower the program of call(*shapes) to text; nothing is compiled."""
    with as_on_a_gpu():
        return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
