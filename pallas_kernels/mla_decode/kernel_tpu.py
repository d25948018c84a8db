"""The TPU kernel of decoding over latents: a page is copied once, and serves as keys and as values.

One grid step is one sequence, with all its query heads as rows. Pages are copied by manual DMA, many per
step; in the last step only those within the length. `ops.decode.mla_decode` defines the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels import streaming
from kvjax.pallas_kernels.streaming import LANES, NEG_INF, Running


class Sizes(NamedTuple):
    """Static arguments: pages per step, sequences per core, channels of the latent, scale of logits."""

    step: int
    sequences: int
    rank: int
    scale: float


def _kernel(
    layer: Any, lengths: Any, table: Any, next_table: Any, q: Any, pages: Any, out: Any, lse: Any,
    buffer: Any, turn: Any, arrived: Any, top: Any, total: Any, acc: Any, *, sizes: Sizes,
) -> None:  # fmt: skip
    j = pl.program_id(1)
    mine, more = pl.program_id(0) * sizes.sequences + j, j + 1 < sizes.sequences
    at = (mine, jnp.where(more, mine + 1, mine))
    length = [lengths[i] for i in at]
    page, width = buffer.shape[2:]
    tokens = sizes.step * page

    def copies(ahead: Any, s: Any, slot: Any, act: Any) -> None:
        def one(n: Any) -> None:
            source = streaming.pick(ahead, *(x[0, 0, s * sizes.step + n] for x in (table, next_table)))
            act(pltpu.make_async_copy(pages.at[layer[0], source], buffer.at[slot, n], arrived.at[slot]))

        def all_pages() -> None:
            for n in range(sizes.step):
                one(n)

        live = jnp.clip(pl.cdiv(streaming.pick(ahead, *length) - s * tokens, page), 0, sizes.step)
        streaming.each(live, sizes.step, all_pages, one)

    running = Running(top, total, acc)
    streaming.clear(running)

    def visit(s: Any, slot: Any) -> None:
        live = length[0] - s * tokens
        streaming.blank(lambda n: buffer.at[slot, n], page, sizes.step, live)
        asked = q[0]
        kind = jnp.float32 if asked.dtype == jnp.float32 else jnp.bfloat16
        rows = buffer[slot].reshape(tokens, width).astype(kind)
        z = streaming.product(asked.astype(kind), rows, 1) * sizes.scale
        seen = jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1) < live
        streaming.fold(running, jnp.where(seen, z, NEG_INF), rows[:, : sizes.rank])

    streaming.stream(turn, (0, pl.cdiv(length[0], tokens)), 0, more, copies, visit)
    streaming.finish(running, out, lse)


def mla_decode(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    *,
    sizes: Sizes,
    cores: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, R, sizes.rank], lse [B, R, 128]).

    q [B, R, W] with R a multiple of 8, zeros where rows of pages [L, P, page, W] are padding; table
    [B, 1, M] with M a multiple of the pages per step; lengths [B]; layer [1]. W and the rank are multiples
    of 128.
    """
    sequences, count, width = q.shape
    of, smem = partial(streaming.spec_of_list, sequences, sizes.sequences), pltpu.SMEM
    made = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        out_shape=[
            jax.ShapeDtypeStruct((sequences, count, sizes.rank), q.dtype),
            jax.ShapeDtypeStruct((sequences, count, LANES), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, sizes.sequences),
            in_specs=[
                of(1, table.shape[2], memory_space=smem),
                of(1, table.shape[2], ahead=1, memory_space=smem),
                of(count, width),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[of(count, sizes.rank), of(count, LANES)],
            scratch_shapes=[
                pltpu.VMEM((2, sizes.step, *pages.shape[2:]), pages.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((count, LANES), jnp.float32),
                pltpu.VMEM((count, LANES), jnp.float32),
                pltpu.VMEM((count, sizes.rank), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="mla_decode",
    )(layer, lengths, table, table, q, pages)
    return made[0], made[1]
