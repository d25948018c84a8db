"""The TPU kernel of the gradient, which processes spans of chunks from the last to the first, each twice.

Only the state before a span is stored by the forward pass. The first pass over a span recomputes its other
states and inverses, in VMEM; the second differentiates its chunks in reverse, by what JAX derives from
`chunk.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .chunk import HeadChunk, chunk, take_turns
from .kernel_tpu import Sizes, chunks, rows_of, saved_spec, specs, state_spec, take

# More than a kernel gets by default; the smallest VMEM has 64 MiB.
VMEM_BYTES = 48 * 2**20


def _kernel(*refs: Any, sizes: Sizes, erases: bool) -> None:
    absent = () if erases else (None,)
    count, given = 5 - len(absent), list(refs)
    tokens, (saved, dout, dlast) = HeadChunk(*given[:count], *absent), given[count : count + 3]
    dtokens = HeadChunk(*given[count + 3 : 2 * count + 3], *absent)
    dstate, states, *inverses = given[2 * count + 3 :]
    heads, n = range(sizes.together), sizes.span
    step = pl.program_id(3)
    span = pl.num_programs(2) - 1 - pl.program_id(2)
    local = jnp.where(step < n, step, 2 * n - 1 - step)
    at = span * n + local
    real = at < chunks(sizes)

    @pl.when((pl.program_id(2) == 0) & (step == 0))
    def _() -> None:
        dstate[...] = dlast[...]

    @pl.when(step == 0)
    def _() -> None:
        states[0] = saved[0, :, 0]

    @pl.when(real & (step < n))
    def _() -> None:
        steps = (
            chunk(take(tokens, h, at * sizes.chunk, sizes), states[local, h], exact=sizes.exact)
            for h in heads
        )
        for h, (_, new, inverse) in enumerate(take_turns(steps)):
            states[jnp.minimum(local + 1, n - 1), h] = jnp.where(local + 1 < n, new, states[local, h])
            if inverses:
                inverses[0][local, h] = inverse

    @pl.when(real & (step >= n))
    def _() -> None:
        _differentiate(tokens, dtokens, dout, dstate, states, inverses, local, at, sizes)


def _differentiate(
    tokens: HeadChunk, dtokens: HeadChunk, dout: Any, dstate: Any, states: Any, inverses: list[Any],
    local: Any, at: Any, sizes: Sizes,
) -> None:  # fmt: skip
    heads = range(sizes.together)
    given = [take(tokens, h, at * sizes.chunk, sizes) for h in heads]
    known = [inverses[0][local, h] if inverses else None for h in heads]

    def outputs(given: list[HeadChunk], entering: list[Any]) -> list[Any]:
        steps = zip(given, entering, known, strict=True)
        return [x[:2] for x in take_turns(chunk(c, s, exact=sizes.exact, inverted=x) for c, s, x in steps)]

    _, pull = jax.vjp(outputs, given, [states[local, h] for h in heads])
    do = [rows_of(dout, h, at * sizes.chunk, sizes).astype(jnp.float32) for h in heads]
    dgiven, dentering = pull([(x, dstate[0, h]) for h, x in enumerate(do)])
    for h in heads:
        dstate[0, h] = dentering[h]
        for ref, x in zip(dtokens, dgiven[h], strict=True):
            if x is None:
                continue
            if len(ref.shape) == 5:
                ref[0, h, 0] = x
            else:
                ref[0, :, h * x.shape[1] : (h + 1) * x.shape[1]] = x


def backward(
    tokens: HeadChunk,
    saved: jax.Array,
    dout: jax.Array,
    dstate: jax.Array,
    *,
    sizes: Sizes,
    interpret: Any = False,
) -> tuple[HeadChunk, jax.Array]:
    """Compute the gradients of the tokens and of the initial state of `kernel_tpu.forward`.

    dout, dstate: the gradients of its outputs and of its final state. saved: the states before every span.
    """
    given = [x for x in tokens if x is not None]
    n, count = sizes.span, chunks(sizes)
    spans = pl.cdiv(count, n)

    def place(early: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """Find the chunk at a step of a span; in the first n steps, the one given by `early`."""
        return lambda j, s: jnp.minimum(
            (spans - 1 - j) * n + jnp.where(s < n, early(s), 2 * n - 1 - s), count - 1
        )

    # Operands that only the second pass needs stay at its first chunk.
    both, second = specs(tokens, sizes, place(lambda s: s)), specs(tokens, sizes, place(lambda s: n - 1))
    present = lambda c: [x for x in c if x is not None]  # noqa: E731
    whole = state_spec(dstate, sizes)
    k, v = dstate.shape[2:]
    scratch = [pltpu.VMEM((n, sizes.together, k, v), jnp.float32)]
    if tokens.p is not None:
        scratch.append(pltpu.VMEM((n, sizes.together, sizes.chunk, sizes.chunk), jnp.float32))
    found = pl.pallas_call(
        partial(_kernel, sizes=sizes, erases=tokens.p is not None),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*given, dstate)],
        grid=(dstate.shape[0], sizes.heads // sizes.together, spans, 2 * n),
        in_specs=[
            *present(both._replace(q=second.q)), saved_spec(dstate, sizes, lambda j, s: spans - 1 - j),
            second.v, whole,
        ],
        out_specs=[*present(second), whole],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=interpret,
        name="gated_delta_gradient",
    )(*given, saved, dout, dstate)  # fmt: skip
    return HeadChunk(*found[:-1], *(None,) * (5 - len(given))), found[-1]
