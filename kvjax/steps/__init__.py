"""The two pure functions every run is made of: `prefill` (many new tokens) and `step` (one).

Both are jitted with static (config, method) and take parameters and cache as plain pytrees. They know
segments, allocations and evictions, but no method by name.
"""

from kvjax.steps.decode import step, step_fn, step_keeping
from kvjax.steps.prompt import Prompt, needs_of, observe, prefill, probed, scored, settle, settled
from kvjax.steps.run import Run

__all__ = [
    "Prompt",
    "Run",
    "needs_of",
    "observe",
    "prefill",
    "probed",
    "scored",
    "settle",
    "settled",
    "step",
    "step_fn",
    "step_keeping",
]
