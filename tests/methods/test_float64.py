"""Methods where jax is told to keep float64: caches, kept tokens and answers are those of float32."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.model import Model
from tests.methods.battery import MAIN, model, positions
from tests.methods.table import BY_LABEL, ROWS
from tests.sweep import sweep

FIRST = [row[:20] for row in MAIN.first[:2]]


def answers(m, method):
    """Logits of a prompt and two steps, kept positions, and the dtypes of the cache."""
    logits, cache = kvjax.prefill(m, FIRST, method=method, room=4)
    out = [np.asarray(logits)]
    for tokens in MAIN.steps[:2]:
        logits, cache = kvjax.step(m, cache, tokens[:2])
        out.append(np.asarray(logits))
    return out, positions(cache), [x.dtype for x in jax.tree.leaves(cache)]


LABELS = [*dict.fromkeys(row.label for row in ROWS)]


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep([*LABELS, "quest in host memory"], "keepkv"))
def test_under_x64_methods_answer_as_without(label):
    row = BY_LABEL["quest" if "host" in label else label]
    method = kvjax.method("quest", budget=0.5, resident=0.5, page=4) if "host" in label else row.method()
    m = model(row.model)
    want, kept, dtypes = answers(m, method)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        twin = Model(m.config, m.params)
        got, there, wide = answers(twin, method)
    assert wide == dtypes and there == kept
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
