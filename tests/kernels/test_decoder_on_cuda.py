"""The decoder's step, lowered for CUDA on a CPU: its layers one by one, around the kernels of a GPU."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.methods import takes_budget
from kvjax.models import layers
from kvjax.models.config import Config
from kvjax.models.params import init, plan
from kvjax.steps.decoding.step import step_fn
from tests.kernels.cuda import lowered_for_cuda
from tests.sweep import sweep

CONFIG = Config(vocab=64, d_model=64, layers=4, heads=4, kv_heads=2, head_dim=32, d_ff=64)
ROWS, TOKENS, ROOM = 2, 256, 32


def prompt_and_step(name):
    """(prefill, its shapes), (step, its shapes) of a method, in bfloat16."""
    method = kvjax.method(name, **({"budget": 0.5} if takes_budget(name) else {}))
    run = steps.Run(CONFIG, method)
    groups = plan(CONFIG)
    params = jax.eval_shape(lambda key: init(CONFIG, key, jnp.bfloat16, groups), jax.random.key(0))
    ids, one = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((ROWS, TOKENS), (ROWS,)))

    def prefill(params, ids, lengths):
        how = dict(tokens_bound=TOKENS, room=ROOM, compress=True)
        return steps.prefill(run, params, ids, lengths, None, **how)

    cache = jax.eval_shape(prefill, params, ids, one)[1]
    append = jax.ShapeDtypeStruct((ROWS,), bool)
    step = partial(step_fn, steps.Run(CONFIG, method.decode_part()))
    return (prefill, (params, ids, one)), (step, (params, cache, one, append))


KERNELS = {
    "full": {"stacked_decode": 4},
    "snapkv": {"stacked_decode": 4},
    "adakv": {"stacked_decode": 8},
    "h2o": {"stacked_decode": 4},
    "int8": {"stacked_decode": 4},
    # Body and tail of every layer.
    "kivi": {"grouped_decode": 4, "stacked_decode": 4},
    # The first two layers are read whole.
    "quest": {"stacked_decode": 6, "page_scores": 2, "best_pages": 2},
}
# One loop flushes all tails: any other, and every conditional, would make a GPU wait for the host.
LOOPS = {"full": 0, "quest": 1, "kivi": 1}


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(KERNELS, "quest"))
def test_a_step_is_lowered_for_cuda_with_its_kernels(name):
    _, (step, shapes) = prompt_and_step(name)
    text = lowered_for_cuda(step, *shapes)
    found = Counter(re.findall(r'name = "(\w+_decode|page_scores|best_pages)"', text))
    assert found == KERNELS[name] and text.count("@__gpu$xla.gpu.triton") == found.total()
    if name in LOOPS:
        outside = re.findall(r"^ {4}\S.*stablehlo\.(?:while|case|if)", text, re.MULTILINE)
        assert len(outside) == LOOPS[name], outside


@pytest.mark.rotating
def test_a_prefill_is_lowered_for_cuda():
    (prefill, shapes), _ = prompt_and_step("snapkv")
    assert "stablehlo.dot_general" in lowered_for_cuda(prefill, *shapes)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_single_row_is_a_matrix_product_of_two(rows, monkeypatch):
    rng = np.random.default_rng(0)
    p = {"w": jnp.asarray(rng.normal(size=(8, 4))), "w_bias": jnp.asarray(rng.normal(size=4))}
    x = jnp.asarray(rng.normal(size=(rows, 1, 8)))
    want = layers.linear(p, "w", x)
    monkeypatch.setattr(layers, "platform", lambda: "gpu")
    np.testing.assert_allclose(layers.linear(p, "w", x), want, rtol=1e-6)
    program = str(jax.make_jaxpr(lambda x: layers.linear(p, "w", x))(x))
    assert ("f32[2,4] = dot_general" in program) == (rows == 1)
