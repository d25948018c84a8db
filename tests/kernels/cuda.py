"""Programs as they are lowered for an NVIDIA GPU, on a machine that has none."""

import warnings

import jax


def as_on_a_gpu():
    """The mesh says what is lowered for."""
    kind = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), automatic, abstract_device=kind)
    )


def lowered_for_cuda(call, *shapes):
    """The text of the program of call(*shapes); nothing is compiled."""
    with as_on_a_gpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
