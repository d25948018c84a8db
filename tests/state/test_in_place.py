"""A step of every class of layout, as it is compiled for CPUs: it writes into its cache and copies no layer.

What it cannot leave where it lies is named in `tests/aot/known.py`, with what TPUs and GPUs cannot
(`tests/aot/test_layouts.py`); `scripts/layouts.py` writes the record of all.
"""

import dataclasses
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

from kvjax import steps
from kvjax.aot import reading
from kvjax.aot.cases import layouts
from kvjax.aot.probe import on_cpu
from kvjax.api.decode_loop import Draws, write_slice
from kvjax.api.sampling import Sampler
from kvjax.api.step import OneStep
from kvjax.grammar import Method
from kvjax.models.params import init
from kvjax.state.cache import nbytes
from kvjax.steps import Run
from tests.aot.known import LOOPS, assert_as_recorded, assert_in_place
from tests.compilation import optimised
from tests.models.architectures import MLA, SMALL, TABLE, TPA, with_layers
from tests.sweep import sweep

# Where XLA for CPUs once made copies: slots that move to a second tier, and pages that a step reads, too.
ALWAYS = ("quest",)
# As users compile; tests do without, as long as there is a choice.
USUAL = {"xla_cpu_use_fusion_emitters": True} if version("jaxlib").startswith("0.10.") else {}


@pytest.mark.parametrize("name", sweep(layouts.SENTENCES, *ALWAYS))
def test_a_step_writes_into_its_cache_and_copies_no_layer_of_it(name):
    with optimised(True):
        found = on_cpu(f"layout-{name}", USUAL)
    assert_in_place("cpu", name, found)
    assert_as_recorded("cpu", name, found)


@pytest.mark.parametrize("name", sweep(layouts.SENTENCES))
def test_a_loop_of_steps_carries_its_cache_where_it_lies(name):
    run, params, cache = layouts.step_of(None, name)
    rows, one = (layouts.BATCH,), jax.ShapeDtypeStruct((), jnp.int32)
    shape = jax.ShapeDtypeStruct
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), layouts.BATCH))
    draws = Draws(Sampler().settings, keys, shape((8,), jnp.int32), shape(rows, jnp.int32))
    given = shape((*rows, run.config.vocab), jnp.float32), shape(rows, jnp.bool_), draws, one, one
    with optimised(True):
        compiled = write_slice.lower(OneStep(run), params, cache, *given).compile(USUAL)
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(cache)
    moved = reading.largest_move(compiled.as_text())
    assert (moved >= layouts.leaf_bytes(cache)) == (name in LOOPS)


# One row of an array is written by a step: caches of one row whose layers have one list, or their own slots.
ONE_LIST = {
    "mqa": dataclasses.replace(SMALL, kv_heads=1),
    "mla": with_layers(MLA, MLA),
    "tpa": with_layers(TPA, TPA),
    "forgetting": TABLE["forgetting"].config,
    "pod": TABLE["pod"].config,
}


@pytest.mark.parametrize("name", sweep(ONE_LIST, "mqa"))
def test_a_step_of_one_row_copies_no_layer_where_one_slot_is_written(name):
    run, params = Run(ONE_LIST[name], Method()), init(ONE_LIST[name], jax.random.key(0))
    tokens, lengths = jnp.zeros((1, 2000), jnp.int32), jnp.full((1,), 2000, jnp.int32)
    prefill = partial(steps.prefill, run, tokens_bound=2000, room=48, compress=True)
    cache = jax.eval_shape(lambda: prefill(params, tokens, lengths, None)[1])
    step = jax.jit(partial(steps.step, run), donate_argnums=1)
    with optimised(True):
        compiled = step.lower(params, cache, lengths, jnp.ones(1, bool)).compile(USUAL)
    keys = max(nbytes(x) for x in jax.tree.leaves(cache))
    assert reading.largest_move(compiled.as_text()) < keys
