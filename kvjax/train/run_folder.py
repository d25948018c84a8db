"""The folder of a training run: its settings, and a log of which a restart keeps what it goes on from.

run.json            settings; a run with other ones is refused
log.jsonl           a line every few steps
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import InputError
from kvjax.files import write_atomic

LOG, SETTINGS = "log.jsonl", "run.json"


def open_run(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Create the folder of a run, or check that the run in it is the one asked for.

    Raises InputError where it holds a run with other settings, or any without `resume`.
    """
    if not resume and (folder / SETTINGS).exists():
        raise InputError(f"{folder} holds a run: go on with it by --resume, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    asked, written = json.loads(json.dumps(settings)), folder / SETTINGS
    if resume and written.exists():
        found = json.loads(written.read_text())
        differing = [name for name in asked if found.get(name) != asked[name]]
        if differing:
            had = ", ".join(f"{name} {found.get(name)} (asked: {asked[name]})" for name in differing)
            raise InputError(
                f"{folder} holds a run with other settings: {had}. Give those that it has, or another folder"
            )
    else:
        (folder / LOG).unlink(missing_ok=True)
    write_atomic(written, (json.dumps(asked, indent=1) + "\n").encode())


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
