"""A compilation job for a child process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvjax.grammar import Method
from kvjax.mesh.rules import Rules
from kvjax.models.config import Config
from kvjax.plan.topologies import Topology


class CompileJob(NamedTuple):
    """A program to compile: a decode step, or a prefill's chunk.

    mesh: the sizes of its axes. chunk: tokens of the prefill's chunk, 0 for a decode step.
    """

    config: Config
    method: Method
    topology: Topology
    mesh: Mapping[str, int]
    rules: Rules
    batch: int
    context: int
    dtype: str
    chunk: int = 0
