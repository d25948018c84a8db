"""The pure functions every run is made of: `prefill` (many new tokens), `step` (one) and `verify` (some).

They are jitted with static (config, method) and take parameters and cache as plain pytrees. They know
segments, allocations and evictions, but no method by name.
"""

from kvjax.steps.apart import chooses, compress, prefill_apart, read, reading
from kvjax.steps.decode import step, step_fn, step_hidden, step_keeping
from kvjax.steps.forward import Prompt, needs_of, read_tokens
from kvjax.steps.observing import observe
from kvjax.steps.probing import probed
from kvjax.steps.prompt import prefill, scored, settle, settled
from kvjax.steps.run import Run
from kvjax.steps.verify import until_flush, verify

__all__ = [
    "Prompt",
    "Run",
    "chooses",
    "compress",
    "needs_of",
    "observe",
    "prefill",
    "prefill_apart",
    "probed",
    "read",
    "read_tokens",
    "reading",
    "scored",
    "settle",
    "settled",
    "step",
    "step_fn",
    "step_hidden",
    "step_keeping",
    "until_flush",
    "verify",
]
