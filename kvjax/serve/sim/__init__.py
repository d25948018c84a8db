"""The loop's effects as seconds: simulates a system on a device that is not present. Nothing is measured."""

from __future__ import annotations

from kvjax.serve.sim.calendar import Outcome
from kvjax.serve.sim.compression import Compression
from kvjax.serve.sim.costs import Costs, read_costs
from kvjax.serve.sim.serving import simulate

__all__ = ["Compression", "Costs", "Outcome", "read_costs", "simulate"]
