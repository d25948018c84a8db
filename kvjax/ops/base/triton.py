"""Triton: whether the GPU kernels can run with this release of jax and this GPU."""

from __future__ import annotations

import importlib.util
import re

import jax


def unable() -> str:
    """Why no kernel can run with this jax and GPU, if there is one; empty if they can.

    Triton's compiler needs Ampere or newer.
    """
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this release of jax has no Triton lowering any more: use an older one or 'reference'"
    if jax.default_backend() != "gpu":
        return ""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    enough = re.fullmatch(r"(\d+)\.\d+", capability)
    if enough and int(enough[1]) >= 8:
        return ""
    found = f"a {device.device_kind} of {capability or 'no'} capability"
    return f"{found}, expected an NVIDIA GPU of compute capability 8.0 (Ampere) or more"
