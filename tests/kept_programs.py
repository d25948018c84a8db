"""Compiled programs, kept in pytest's cache: a second run of the suite compiles only changed ones."""

import functools
import zlib

import jax
from jax._src import compilation_cache

# Programs of old code stay in the cache. A whole run stores 0.12 GB.
MOST_BYTES = 2**30


def keep(config):
    """Keep the programs of a run in pytest's cache."""
    if jax.config.jax_platforms != "cpu" or getattr(config, "cache", None) is None:
        return
    folder = config.cache.mkdir("programs")
    if not hasattr(config, "workerinput"):
        _thin(folder)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # zlib's usual level takes three times as long for files a fifth smaller. Other packers are left alone.
    if not (getattr(compilation_cache, "zstd", True) or getattr(compilation_cache, "zstandard", True)):
        compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)
    # A program that another process is about to write, or that a killed one left half written, is compiled.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")


def _thin(folder):
    """Remove all programs if there are too many, since those of old code cannot be told from the others."""
    programs = list(folder.glob("*-cache"))
    if sum(program.stat().st_size for program in programs) > MOST_BYTES:
        for program in programs:
            program.unlink(missing_ok=True)
