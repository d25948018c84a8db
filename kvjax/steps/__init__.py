"""Steps: the pure functions of a run: `prefill` (many new tokens), `step` (one token) and `verify` (some).

They are jitted with static (config, method) and take parameters and cache as plain pytrees. They know
segments, allocations and evictions, but no method by name.
"""

from kvjax.steps.decoding.step import step, step_fn, step_hidden, step_keeping
from kvjax.steps.prefilling.observe import observe
from kvjax.steps.prefilling.probe import probed
from kvjax.steps.prefilling.read import PrefillOutputs, needs_of, read_tokens
from kvjax.steps.prefilling.scored import scored
from kvjax.steps.prefilling.settle import prefill, settle, settled
from kvjax.steps.prefilling.two_programs import chooses, compress, prefill_apart, read, reading
from kvjax.steps.prefilling.verify import until_flush, verify
from kvjax.steps.shared.run import Run

__all__ = [
    "PrefillOutputs",
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
