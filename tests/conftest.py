"""The environment of tests: a CPU with eight devices, no silent dtype or rank promotion, checked annotations.

Warnings are errors by pyproject.toml. kvjax must not be imported here: the hook reaches later imports only.
"""

import ctypes
import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

# `JAX_PLATFORMS=tpu pytest -m tpu` runs on the hardware instead, `JAX_PLATFORMS=cuda,cpu pytest -k gpu` on
# that of a GPU.
# These are inherited by the commands that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Tests run a program a few times, so mostly the speed of the compiler counts;
    # `tests.compilation.optimised` is for those that look at what it makes.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# One thread compiles a program. Many take half as much work again, and every core has a test of its own.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    # This flag halves the compiler's work; later releases no longer accept it.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Source locations of operations are not recorded: no test reads them, and they take a twentieth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Commands that tests start would keep compiled programs in the user's folder.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

import jax
import numpy as np
import pytest

from tests import bytecode, kept_contexts, kept_programs
from tests.small_programs import lighten

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
lighten()
kept_contexts.keep()
bytecode.keep()
sys.meta_path.insert(0, bytecode.Finder)
# Tracing makes many long-lived objects: Python's default garbage collection takes a tenth of the time.
gc.set_threshold(100_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    kept_programs.keep(config)
    bytecode.compile_share(config)


def pytest_collection_finish() -> None:
    """Keep what was imported and collected to the end, so no search for cycles looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a file in one process, whose tests share compiled programs, unless a test names another group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# A process may map 65530 regions of memory, and every compiled program takes several: a few thousand of them
# end in a crash of the compiler. And a laptop with 8 cores runs 8 processes side by side. So each forgets its
# programs when it holds 2.35 GB. What it still holds then is not theirs, so it may grow by GROWTH before it
# forgets again: forgetting after every test would compile everything anew. Counting the regions takes as long
# as a test does, so they are counted after every LOOK-th one.
MOST_MAPPINGS, LOOK = 30_000, 64
MOST_MEMORY, GROWTH = 2_350_000_000, 300_000_000
_most_memory, _done = MOST_MEMORY, 0


def _give_back() -> None:
    """Give free memory back to the system, if the C library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def forgotten_programs():
    """Drop compiled programs before a process maps more regions, or holds more memory, than it may."""
    global _most_memory, _done
    yield
    _done += 1
    if not Path("/proc/self/statm").exists():
        return
    crowded = _done % LOOK == 0 and Path("/proc/self/maps").read_bytes().count(b"\n") > MOST_MAPPINGS
    if crowded or _resident() > _most_memory:
        jax.clear_caches()
        gc.collect()
        _give_back()
        _most_memory = max(MOST_MEMORY, _resident() + GROWTH)
