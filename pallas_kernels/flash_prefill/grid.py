"""The grid of the prefill kernels: (sequence, KV head, outer block, step over its inner blocks)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .plan import MASKED, WHOLE, Sizes, block_kinds, plan

# More than some generations grant by default; wide heads in large groups take up to 25 MiB.
VMEM_BYTES = 2**25


class Specs:
    """The plan of a call and the block specifications of its operands.

    q [B, K, G, T, H]; rows as those of `block_kinds`.
    """

    def __init__(self, q: jax.Array, q_rows: jax.Array, k_rows: jax.Array, sizes: Sizes):
        self.sizes, self.plan = sizes, plan(block_kinds(q_rows, k_rows, sizes))
        self.b, self.heads, self.group = q.shape[:3]
        self.rows, self.lists = q_rows.shape[1], k_rows.shape[0] // self.b
        self.blocks = q_rows.shape[2] // sizes.q

    def row(self, b: Any, k: Any, x: Any) -> Any:
        """Return the plan's row of an outer block."""
        return self._list(b, k) * self.blocks + x

    def _list(self, b: Any, k: Any) -> Any:
        return b if self.lists == 1 else b * self.lists + k

    def _of_queries(self, *block: int, where: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda b, k, x, *_: where(b, k, x))

    def _of_slots(self, *block: int, where: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        def index(b: Any, k: Any, x: Any, step: Any, first: Any, count: Any) -> tuple[Any, ...]:
            return where(b, k, visit(first, count, self.row(b, k, x), step))

        return pl.BlockSpec(block, index)

    def kinds(self) -> pl.BlockSpec:
        """Blocks of the plan's [I X, 1, Y], in scalar memory."""
        return pl.BlockSpec(
            (1, 1, self.plan.kinds.shape[2]),
            lambda b, k, x, *_: (self.row(b, k, x), 0, 0),
            memory_space=pltpu.SMEM,
        )

    def q_rows(self) -> pl.BlockSpec:
        """Blocks of per-query numbers [B, C, T]."""
        return self._of_queries(1, self.rows, self.sizes.q, where=lambda b, k, n: (b, 0, n))

    def k_rows(self) -> pl.BlockSpec:
        """Blocks of per-slot numbers [I, C, S]."""
        return self._of_slots(1, self.rows, self.sizes.kv, where=lambda b, k, n: (self._list(b, k), 0, n))

    def queries(self, width: int) -> pl.BlockSpec:
        """Blocks of queries [B, K, G, T, width]."""
        block = (1, 1, self.group, self.sizes.q, width)
        return self._of_queries(*block, where=lambda b, k, n: (b, k, 0, n, 0))

    def per_query(self) -> pl.BlockSpec:
        """Blocks of numbers of a query head's queries [B, K, G, T]."""
        return self._of_queries(1, 1, self.group, self.sizes.q, where=lambda b, k, n: (b, k, 0, n))

    def slots(self, width: int) -> pl.BlockSpec:
        """Blocks of keys or values [B, K, S, width]."""
        return self._of_slots(1, 1, self.sizes.kv, width, where=lambda b, k, n: (b, k, n, 0))

    def all_slots(self, x: jax.Array) -> pl.BlockSpec:
        """Return all slots of a head at once, of [B, K, S, width]."""
        return self._of_queries(1, 1, *x.shape[2:], where=lambda b, k, n: (b, k, 0, 0))


def visit(first: Any, count: Any, row: Any, step: Any) -> Any:
    """Return the block of a step; after the last one it stays there, so that nothing more is copied."""
    return first[row] + jnp.minimum(step, jnp.maximum(count[row] - 1, 0))


def block_of(r: Any, specs: Specs) -> Any:
    """Find the block of slots of this step."""
    row = specs.row(pl.program_id(0), pl.program_id(1), pl.program_id(2))
    return visit(r.first, r.count, row, pl.program_id(3))


def by_kind(r: Any, specs: Specs, act: Callable[..., None]) -> None:
    """Call act(whole=...) unless the two blocks of this step do not see each other."""
    there = pl.program_id(3) < r.count[specs.row(pl.program_id(0), pl.program_id(1), pl.program_id(2))]
    kind = r.kinds[0, 0, block_of(r, specs)]
    pl.when(there & (kind == WHOLE))(partial(act, whole=True))
    pl.when(there & (kind == MASKED))(partial(act, whole=False))


def run(
    name: str,
    kernel: Callable[..., None],
    specs: Specs,
    inputs: list[tuple[Any, pl.BlockSpec]],
    outputs: list[tuple[Any, pl.BlockSpec]],
    scratch: list[Any],
    interpret: Any,
    *,
    sums: bool = False,
    aliases: dict[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Run the kernel with (first, count, kinds, *inputs, *outputs, *scratch).

    sums: whether blocks of queries must run in order. aliases: from operands to results.
    """
    plan = specs.plan
    inputs = [(plan.kinds, specs.kinds()), *inputs]
    found = pl.pallas_call(
        partial(kernel, specs=specs),
        out_shape=[x for x, _ in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(specs.b, specs.heads, specs.blocks, plan.width),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary" if sums else "parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=VMEM_BYTES,
        ),
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=name,
    )(plan.first, plan.count, *(x for x, _ in inputs))
    return tuple(found)
