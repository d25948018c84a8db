"""Rows of methods that read blocks of a prompt; see `table.py`. The cache keeps every token."""

from __future__ import annotations

from tests.float64 import prompt_blocks as by_hand
from tests.methods.rows import count, dense, everything, row

# Prompts have 16 to 32 tokens: the first 30 columns, or the nearest 100 diagonals, are all of them.
PROMPTS = [
    row(
        "critiprefill", dense(everything), hyper=dict(segment=8, block=4, skip_layers=0),
        hides=by_hand.critiprefill(count, 8, 4, 0.25), stacks=False,
    ),
    row("minference", dense(everything), hyper=dict(block=4)),
    row(
        "xattention", dense(everything), hyper=dict(covered=0.6, stride=2, block=4),
        hides=by_hand.xattention(0.6, 2, 4), whole=(("xattention", dict(covered=1.0, stride=2, block=4)),),
    ),
    row(
        "flexprefill", dense(everything), hyper=dict(covered=0.5, divergence=0.17, least=4, block=4),
        hides=by_hand.flexprefill(0.5, 0.17, 4, 4),
        whole=(("flexprefill", dict(covered=1.0, least=4, block=4)),),
    ),
]  # fmt: skip
