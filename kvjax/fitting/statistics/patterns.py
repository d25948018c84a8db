"""Which pattern of attention each query head reads prompts by (MInference, arXiv:2407.02490)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.compress.select import ComputedTokens
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation
from kvjax.grammar.prompt_reads import PromptQueries
from kvjax.models.model import Model
from kvjax.ops.attention.block_sparse import Picks, block_attention
from kvjax.ops.attention.union import Keys
from kvjax.read.head_patterns import HeadPatterns
from kvjax.read.prompt_blocks import lengthened
from kvjax.steps import Run


@dataclasses.dataclass(frozen=True)
class PatternErrors(Observation):
    """The squared error [P, N] of every head's output under each pattern of a read, summed over tokens.

    It is relative to the sum of the squared outputs of full attention.
    """

    read: HeadPatterns
    scale: float
    softcap: float | None

    def __call__(self, inputs: Inputs) -> Float[Array, "P N"]:
        assert inputs.k is not None and inputs.v is not None
        size, length = self.read.block, (inputs.pos >= 0).sum(-1, dtype=jnp.int32)
        q, k, v = (lengthened(x, size, 2) for x in (inputs.q, inputs.k, inputs.v))
        pos = lengthened(inputs.pos, size, 1, -1)
        prompt = PromptQueries(q, k, pos, length, self.scale)

        def attended(picks: Picks) -> Float[Array, "B N T V"]:
            keys, options = Keys(k, v, pos[:, None]), dict(scale=self.scale, softcap=self.softcap)
            return block_attention(q, keys, pos, picks, **options)[0].astype(jnp.float32)  # type: ignore[arg-type]

        blocks = pos.shape[1] // size
        full = attended(Picks(jnp.ones((q.shape[0], q.shape[1], blocks, blocks), bool)))
        alone = (dataclasses.replace(self.read, patterns=(p,), fitted=None) for p in self.read.patterns)
        each = [jnp.square(attended(one.pick(prompt)[0]) - full).sum((0, 2, 3)) for one in alone]
        return jnp.stack(each) / jnp.maximum(jnp.square(full).sum((0, 2, 3)), 1e-30)[None]


def fit_patterns(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the pattern [L, N] with the least error of every query head, in one pass over the texts.

    Raises InputError for texts of at most one block of tokens, and a model whose layers differ in what they
    keep or store latents.
    """
    check_whole(model, "patterns of heads")
    read = method.read_prompt
    assert isinstance(read, HeadPatterns)
    run, total = Run(model.config, Method()), None
    spec = run.attention_spec(0)
    asked = PatternErrors(read, spec.scale, spec.softcap)
    for rows in progress(batches):
        rows = [row for row in rows if len(row) > read.block]
        if rows:
            given = padded(model, rows, None)
            found = _errors(run, asked, model.params, jnp.asarray(given.tokens), jnp.asarray(given.lengths))
            found = np.asarray(found, np.float64)
            total = found if total is None else total + found
    if total is None:
        raise InputError(f"no text has more than a block of {read.block} tokens: give longer texts")
    return Fitted({"pattern": total.argmin(1).astype(np.int32)}, "HeadPatterns", model.signature)


@partial(jax.jit, static_argnames=("run", "asked"))
def _errors(
    run: Run, asked: PatternErrors, params: Any, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, "L P N"]:
    prompt = steps.observe(run, params, tokens, lengths, None, frozenset({asked}))
    return jnp.concatenate([f.observed[key_of(asked)] for f in prompt.fresh if isinstance(f, ComputedTokens)])
