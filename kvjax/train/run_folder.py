"""The folder of a training run: settings, a log and a checkpoint, so that a killed run loses nothing.

run.json            settings; a run with other ones is refused
log.jsonl           a line every few steps
checkpoint.npz      everything a step changes
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import InputError
from kvjax.files import write_atomic

CHECKPOINT, LOG, SETTINGS = "checkpoint.npz", "log.jsonl", "run.json"


def open_run(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Create the folder of a run, or check that the run in it is the one asked for.

    Raises InputError where it holds a run with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked, written = json.loads(json.dumps(settings)), folder / SETTINGS
    if resume and written.exists():
        found = json.loads(written.read_text())
        differing = [name for name in asked if found.get(name) != asked[name]]
        if differing:
            had = ", ".join(f"{name} {found.get(name)} (asked: {asked[name]})" for name in differing)
            raise InputError(
                f"{folder} holds a run with other settings: {had}. Choose another folder to keep it, "
                f"or start afresh in this one with resume=False (--no-resume)"
            )
    else:
        for stale in (CHECKPOINT, LOG):
            (folder / stale).unlink(missing_ok=True)
    write_atomic(written, (json.dumps(asked, indent=1) + "\n").encode())


def save_state(folder: Path, state: Any, step: int, seconds: Mapping[str, float]) -> None:
    """Write a pytree of arrays, the number of steps behind it and the seconds they took."""
    leaves: dict[str, Any] = {f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    file = io.BytesIO()
    np.savez(file, step=step, seconds=json.dumps(seconds), **leaves)
    write_atomic(folder / CHECKPOINT, file.getvalue())


def load_state(folder: Path, like: Any) -> tuple[Any, int, dict[str, float]]:
    """What `save_state` wrote, or (`like`, 0, {}) where nothing was written yet."""
    path = folder / CHECKPOINT
    if not path.exists():
        return like, 0, {}
    with np.load(path) as saved:
        leaves, tree = jax.tree.flatten(like)
        leaves = [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(tree, leaves), int(saved["step"]), json.loads(str(saved["seconds"]))


def trim_log(folder: Path, step: int) -> None:
    """Drop what was logged after `step`, half-written lines included: those steps are run again."""
    path, kept = folder / LOG, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    write_atomic(path, "".join(kept).encode())


def clock(before: Mapping[str, float]) -> Callable[[], dict[str, float]]:
    """Reads the wall and CPU seconds of a run over all its restarts."""
    clocks = {"seconds": time.monotonic, "cpu_seconds": time.process_time}
    started = {name: now() for name, now in clocks.items()}
    return lambda: {name: before.get(name, 0.0) + clocks[name]() - started[name] for name in clocks}
