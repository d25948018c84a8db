"""A step of every class of layout, as it is compiled for CPUs: it writes into its cache and copies no layer.

What it cannot leave where it lies is named in `tests/aot/known.py`, with what TPUs and GPUs cannot
(`tests/aot/test_layouts.py`); `scripts/layouts.py` writes the record of all.
"""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

from kvjax.aot import reading
from kvjax.aot.cases import layouts
from kvjax.aot.probe import on_cpu
from kvjax.cache import nbytes
from kvjax.samples import Draws, write_slice
from kvjax.sampling import Sampler
from kvjax.stepping import OneStep
from tests.aot.known import KNOWN, assert_as_recorded, assert_in_place
from tests.compilation import optimised
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
    assert (moved >= layouts.leaf_bytes(cache)) == (name in KNOWN["cpu"])
