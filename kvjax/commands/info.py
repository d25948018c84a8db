"""`kvjax info`: describes this machine and installation, and which backends work."""

from __future__ import annotations

import argparse

HELP = "print versions, devices, memory, and which code paths will run"
EXAMPLE = "example:\n  kvjax info"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(args: argparse.Namespace) -> None:
    import jax

    from kvjax.commands.programs import kept
    from kvjax.commands.terminal import console, pairs

    platform = jax.default_backend()
    rows = [
        ("versions", _versions()),
        ("python", _python()),
        ("platform", platform),
        *(("device" if i == 0 else "", text) for i, text in enumerate(_devices())),
        ("memory", _memory()),
        ("host memory", _host_memory()),
        ("cores", _cores()),
        *(("attention" if i == 0 else "", text) for i, text in enumerate(_attention(platform))),
        ("layers", "stacked, one scan over equal layers" if platform == "tpu" else "one after another"),
        ("programs", kept()),
    ]
    console().print(pairs(rows))


def _attention(platform: str) -> list[str]:
    """Which attention kernels prompts and decode steps use here."""
    import jax

    from kvjax.ops.base.triton import unable

    plain = f"plain jax.numpy, compiled by XLA for {platform}"
    if platform == "cpu":
        return [plain, "Pallas kernels wait for a TPU or a GPU: docs/kernels.md"]
    if platform == "gpu" and (why := unable()):
        return [plain, f"no Pallas kernels: {why}"]
    prompts = "flash_prefill, attention_stats (Pallas)" if platform == "tpu" else "cuDNN or XLA"
    return [
        f"prompts: {prompts}; sparse_prompt over picked blocks (Pallas)",
        "steps: stacked_decode over dense slots and pages, grouped_decode over codes of groups (Pallas)",
        *(["over arrays that lie on one device, or within shard_map"] if jax.device_count() > 1 else []),
        f"what these cannot read: {plain}",
    ]


def _versions() -> str:
    from importlib.metadata import version

    import kvjax

    names = ("jax", "jaxlib", "numpy", "safetensors", "tokenizers")
    return ", ".join([f"kvjax {kvjax.__version__}", *(f"{name} {version(name)}" for name in names)])


def _python() -> str:
    import platform

    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _devices() -> list[str]:
    """One line per kind of device."""
    from collections import Counter

    import jax

    from kvjax.commands.terminal import size

    lines = []
    for (kind, platform), count in Counter((d.device_kind, d.platform) for d in jax.devices()).items():
        device = next(d for d in jax.local_devices() if d.device_kind == kind)
        stats = (device.memory_stats() if platform != "cpu" else None) or {}
        memory = f", {size(stats['bytes_limit'])} each" if "bytes_limit" in stats else ""
        lines.append(f"{count} x {kind}{f' ({platform})' if kind != platform else ''}{memory}")
    return lines


def _memory() -> str:
    import psutil

    from kvjax.commands.terminal import size

    memory = psutil.virtual_memory()
    return f"{size(memory.available)} available of {size(memory.total)}"


def _host_memory() -> str:
    from kvjax.ops.base.memory import KIND, offers_host

    if offers_host():
        return f"{KIND}: methods that keep slots there do (quest:resident=0.25, infllm)"
    return "none that programs can use: what a method keeps there stays in the device's memory"


def _cores() -> str:
    import os

    import psutil

    usable = (
        len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count()
    )
    return f"{usable} usable of {os.cpu_count()}"
