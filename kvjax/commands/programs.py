"""Compiled programs, cached on disk between runs of commands; `import kvjax` itself caches nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Beyond this size the least recently used programs are deleted. `kvjax compare` at its defaults needs 9 MB.
MOST_BYTES = 2**30
# JAX's default is one second. Programs of small models compile faster, and a comparison has hundreds of them.
LEAST_SECONDS = 0.0


def _config() -> Any:
    import jax

    return jax.config


def folder() -> Path | None:
    """Return the folder of compiled programs: $JAX_COMPILATION_CACHE_DIR, or one in the user's cache folder.

    None if $JAX_ENABLE_COMPILATION_CACHE is false, if the former variable is empty, and without a home.
    """
    config = _config()
    given = config.jax_compilation_cache_dir
    if not config.jax_enable_compilation_cache or given == "":
        return None
    if given is not None:
        return Path(given)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return home / "kvjax" / "programs"


def keep_programs() -> None:
    """Make JAX cache compiled programs on disk, and load those that are there already.

    A folder that the user gave has no size limit. If ours is not writable, nothing is cached.
    """
    config, where = _config(), folder()
    if where is None:
        return
    if config.jax_compilation_cache_dir is None:
        try:
            where.mkdir(parents=True, exist_ok=True)
            _mend(where)
        except OSError:
            return
        config.update("jax_compilation_cache_dir", str(where))
        config.update("jax_compilation_cache_max_size", MOST_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def _mend(where: Path) -> None:
    """Remove entries that a killed command left without access times, with which JAX could store nothing."""
    for program in where.glob("*-cache"):
        if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
            program.unlink(missing_ok=True)


def kept() -> str:
    """One line for people: the folder of cached programs, how many there are, and their total size."""
    from kvjax.commands.terminal import size

    where = folder()
    if where is None:
        return "none are kept ($JAX_ENABLE_COMPILATION_CACHE, $JAX_COMPILATION_CACHE_DIR)"
    files = [program.stat().st_size for program in where.glob("*-cache")]
    return f"{where}: {len(files)} files, {size(sum(files))}"
