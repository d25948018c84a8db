"""Kernels on a mesh: every device runs them on its own part, and the answers are those of one device."""

from functools import cache

import jax
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.grammar.fitted import with_fitted
from kvjax.mesh.on_mesh import as_mesh
from kvjax.mesh.per_device import merged_over
from kvjax.pure import decoding
from tests.mesh.test_sharded import EVERY, spread
from tests.mesh.test_split_slots import APART
from tests.methods.battery import MAIN, ROOM, first_of_each_class, model, off, talk
from tests.methods.table import BY_LABEL
from tests.methods.test_battery import same
from tests.sweep import sweep

GPU = "gpu interpret"
CASES = [
    *((name, label) for name in ("tensor", "batch") for label in first_of_each_class()),
    *(("sequence", label) for label in APART),
]


@cache
def split(of: str) -> kvjax.Model:
    """Put a model of the battery on a mesh that splits the slots of lists."""
    return kvjax.spread(model(of), as_mesh("data=2,seq=4"), "sequence")


def traced(m, method, held):
    """Trace a step; return what it is called with, and its number of kernels, or the reason for none."""
    run = decoding(m, method, GPU)
    given = with_fitted(m.params, method), bare_cache(held), MAIN.steps[0].astype(np.int32), EVERY
    try:
        return run, given, str(steps.step_keeping.trace(run, *given).jaxpr).count("pallas_call[")
    except NotImplementedError as error:
        return run, given, str(error)


@pytest.mark.rotating
@pytest.mark.parametrize("name, label", sweep(CASES, ("tensor", "full")))
def test_a_step_runs_the_kernels_that_it_runs_on_one_device(name, label):
    row, done = BY_LABEL[label], talk(label)
    method, here = row.method(), model(row.model)
    there = split(row.model) if name == "sequence" else spread(row.model, name)
    _, held = kvjax.prefill(there, MAIN.first, method=method, room=ROOM)
    want = traced(here, method, done.prompt[1])[2]
    run, given, found = traced(there, method, held)
    if isinstance(want, str):
        assert found == want
    elif isinstance(found, str):
        # A sum over queries that are merged afterwards cannot be taken by each device.
        assert name == "sequence" and "where the slots of a list lie together" in found
    else:
        assert found == want
        logits, _ = steps.step_keeping(run, *given)
        assert off(logits, done.steps[0][0]) < same(label)


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(("tensor", "batch"), "tensor"))
def test_a_prompt_is_read_by_kernels_and_leaves_what_it_leaves_on_one_device(name):
    done, there = talk("full"), spread(BY_LABEL["full"].model, name)
    # The kernel that appends wants whole tiles of slots, which only steps ask for.
    logits, held = kvjax.prefill(there, MAIN.first, room=ROOM, implementation="tpu interpret")
    assert off(logits, done.prompt[0]) < 1e-5
    for part, want in zip(jax.tree.leaves(held), jax.tree.leaves(done.prompt[1]), strict=True):
        assert part.shape == want.shape
        if part.dtype == np.int32:
            np.testing.assert_array_equal(part, want)
        else:
            assert off(part, want) < 1e-5


def test_parts_of_attention_merge_to_attention_over_all_also_where_nothing_is_seen():
    rng = np.random.default_rng(0)
    logits, v = (
        rng.normal(size=(4, 2, 3, 5)) * 3,
        rng.normal(size=(4, 2, 5, 6)),
    )  # parts, lists, queries, slots
    logits[1:, 0, 1] = -np.inf
    logits[:, 1, 2] = -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(logits)
        parts = np.nan_to_num(np.einsum("pkts,pksv->pktv", weights, v) / weights.sum(-1)[..., None])
        lses = np.log(weights.sum(-1))
        out = np.einsum("pkts,pksv->ktv", weights, v) / weights.sum((0, -1))[..., None]
        lse = np.log(weights.sum((0, -1)))
    merge = jax.vmap(lambda out, lse: merged_over(("part",), out, lse), axis_name="part")
    found, found_lse = merge(parts.astype(np.float32)[:, None], lses.astype(np.float32)[:, None])
    np.testing.assert_allclose(found[0, 0], np.nan_to_num(out), atol=1e-5)
    np.testing.assert_allclose(found_lse[0, 0], lse, atol=1e-5)
