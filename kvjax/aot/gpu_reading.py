"""The description of an absent GPU for the CUDA compiler, and the parsing of its dumps."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kvjax.aot.hardware import Gpu

ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
LAUNCH = re.compile(
    r"(\w+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), \d+, \d+\]\s+shared_memory: (\d+) bytes"
)
# Shared memory reserved per program, and the most programs per multiprocessor.
RESERVED, MOST = 1024, 32


def target(gpu: Gpu) -> str:
    """XLA's description of a GPU, a text of its `GpuTargetConfigProto`."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.most_shared}
  shared_memory_per_core: {gpu.shared} core_count: {gpu.processors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.hbm:.0f} l2_cache_size: {gpu.cache} clock_rate_ghz: {gpu.clock / 1e9}
  device_memory_size: {gpu.memory} registers_per_core_limit: {gpu.registers}
  registers_per_block_limit: {gpu.registers}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.kind}"
"""


def programs(folder: str, kernel: str, gpu: Gpu) -> dict[str, Any]:
    """Take each figure's worst value over kernels whose names end with `kernel`; None if nothing is known.

    registers: per thread. spills: bytes that a thread stores and loads for lack of registers. shared: bytes
    per program. resident: programs that fit on one multiprocessor. waves: how many rounds it takes to run all
    programs.
    """
    made = [own for own in _launches(folder) if own[0].endswith(kernel)]
    used = {name: _assembled(path, gpu) for name, path in _texts(folder) if name.endswith(kernel)}
    found: dict[str, Any] = dict.fromkeys(("registers", "spills", "shared", "resident", "waves"))
    if not made:
        return found
    found["shared"] = max(shared for *_, shared in made)
    sizes = [own for own in used.values() if own is not None]
    if sizes:
        found["registers"], found["spills"] = (max(own[i] for own in sizes) for i in (0, 1))
        most = [(fit(gpu, threads, found["registers"], shared), count) for _, count, threads, shared in made]
        found["resident"] = min(n for n, _ in most)
        found["waves"] = round(max(count / (n * gpu.processors) for n, count in most), 2)
    return found


def fit(gpu: Gpu, threads: int, registers: int, shared: int) -> int:
    """How many programs of so many threads one multiprocessor holds at once.

    >>> from kvjax.aot.hardware import GPUS
    >>> fit(GPUS["h100"], 128, 72, 38144), fit(GPUS["h100"], 128, 150, 12544)
    (5, 3)
    """
    by_registers = gpu.registers // (threads * -(-registers // 8) * 8)
    return min(by_registers, gpu.shared // (shared + RESERVED), gpu.threads // threads, MOST)


def kernels(module: str) -> int:
    """Count the calls of Triton's kernels in a compiled module's text."""
    return module.count('custom_call_target="__gpu$xla.gpu.triton"')


def _launches(folder: str) -> list[tuple[str, int, int, int]]:
    """Return (name, programs, threads of one, bytes of shared memory) of every kernel that is launched."""
    text = "".join(path.read_text() for path in Path(folder).glob("*thunk_sequence.txt"))
    return [
        (name, int(x) * int(y) * int(z), int(threads), int(shared))
        for name, x, y, z, threads, shared in LAUNCH.findall(text)
    ]


def _texts(folder: str) -> list[tuple[str, Path]]:
    """(name of its kernel, file) of the assembly texts."""
    found = []
    for path in sorted(Path(folder).glob("*.ptx")):
        if (entry := ENTRY.search(path.read_text())) is not None:
            found.append((entry[1], path))
    return found


def _assembled(path: Path, gpu: Gpu) -> tuple[int, int] | None:
    """Return (registers of a thread, bytes spilled) as ptxas reports them; None if it is not installed."""
    if (tool := assembler()) is None:
        return None
    text = path.read_text()
    arch = re.search(r"\.target (\w+)", text)
    command = [tool, "-v", f"-arch={arch[1] if arch else 'sm_80'}", str(path), "-o", f"{path}.cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    used = re.search(r"Used (\d+) registers", told)
    spilled = re.findall(r"(\d+) bytes spill", told)
    return None if used is None else (int(used[1]), sum(map(int, spilled)))


def assembler() -> str | None:
    """Find the path of ptxas: in the package nvidia-cuda-nvcc, or on the PATH."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    for place in places:
        if (tool := Path(place) / "cu13" / "bin" / "ptxas").exists():
            return str(tool)
    return shutil.which("ptxas")
