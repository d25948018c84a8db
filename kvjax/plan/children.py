"""Runs a job in a child process, so that a compiler that aborts ends only that process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvjax.aot.probe import ENVIRONMENT, available, reason
from kvjax.plan.job import CompileJob
from kvjax.plan.topologies import Topology

SECONDS = 900


def missing(topology: Topology) -> str:
    """Say what to install to compile for a topology; empty if nothing is missing."""
    return "" if topology.platform == "cpu" else available(topology.platform)


def in_child(job: CompileJob) -> dict[str, Any]:
    """Run `kvjax.plan.compiling.compiled` in a child; only "error" if that aborts or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job"
        file.write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", "kvjax.plan.child", str(file)]
        env = os.environ | ENVIRONMENT
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env)
        except subprocess.TimeoutExpired:
            return {"error": f"not compiled within {SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith("PLAN "):
            return json.loads(line[5:])
    return {"error": reason(done.stderr)}
