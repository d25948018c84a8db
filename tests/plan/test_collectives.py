"""Collectives are counted as often as they run, and are as large as what a device ends up with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.plan.collectives import Collective, collectives

MESH = Mesh(np.array(jax.devices()[:8]), ("x",))


def text(f, *shapes):
    """Return what f compiles to, over arrays [shape, spec]."""
    operands = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(MESH, spec)) for s, spec in shapes
    ]
    return jax.jit(f).lower(*operands).compile().as_text()


@pytest.mark.parametrize("turns", [1, 5])
def test_a_sum_in_a_loop_counts_once_per_turn(turns):
    def f(x, w):
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ w), x)

    found = collectives(text(f, ((4, 64), P(None, "x")), ((64, 64), P("x", None))))
    sums = [one for one in found if one.kind in ("all-reduce", "reduce-scatter")]
    assert sum(one.count for one in sums) == turns


def test_a_sum_has_the_bytes_of_its_result_and_a_gather_those_of_the_whole():
    def add(x):
        return jax.lax.psum(x, "x")

    def gather(x):
        return jax.lax.all_gather(x, "x", tiled=True)

    local = dict(mesh=MESH, in_specs=P("x"), check_vma=False)
    assert collectives(text(jax.shard_map(add, out_specs=P(), **local), ((64, 3), P("x")))) == [
        Collective("all-reduce", 1, 8 * 3 * 4)
    ]
    assert collectives(text(jax.shard_map(gather, out_specs=P(), **local), ((64, 3), P("x")))) == [
        Collective("all-gather", 1, 64 * 3 * 4)
    ]


def test_loops_of_both_spellings_calls_branches_and_starts_are_followed():
    module = """HloModule m
%body (p: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %a = (f32[2,8]{1,0}, f32[16]{0}) all-reduce(%x, %y), channel_id=1, to_apply=%add
}
%cond (p: (s32[], f32[2,8])) -> pred[] {
  %c = s32[]{:T(128)} constant(78)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %l = pred[] compare(%i, %c), direction=LT
}
%inner (p: bf16[4]) -> bf16[4] {
  ROOT %g = (bf16[4]{0}, bf16[32]{0}) all-gather-start(%p), channel_id=2
}
%data (p: (s32[], s32[])) -> pred[] {
  ROOT %l = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (p: f32[2,8]) -> f32[2,8] {
  %w = (s32[], f32[2,8]) while(%t), condition=%cond, body=%body
  %v = (s32[], bf16[4]) while(%t), condition=%data, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %u = (s32[], bf16[4]) while(%t), condition=%data, body=%inner
  %b = bf16[4]{0} conditional(%k, %p, %p), branch_computations={%inner, %inner}
  ROOT %r = f32[2,8]{1,0} get-tuple-element(%w), index=1
}"""
    assert collectives(module) == [
        Collective("all-reduce", 78, 78 * (2 * 8 + 16) * 4),
        Collective("all-gather", 3 + 1 + 2, 6 * 32 * 2),
    ]


def test_what_is_sent_to_the_next_device_is_as_large_as_what_comes_where_numbers_stand_beside_it():
    module = """HloModule m
ENTRY %main (p: bf16[4,8]) -> bf16[4,8] {
  %s = (bf16[4,8]{1,0}, bf16[4,8]{1,0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p)
  ROOT %d = bf16[4,8]{1,0} collective-permute-done(%s)
}
"""
    assert collectives(module) == [Collective("collective-permute", 1, 4 * 8 * 2)]
