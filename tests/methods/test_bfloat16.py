"""Methods on a model in bfloat16, as it runs on accelerators: what is kept and said is that of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.model import Model
from kvjax.state.cache import Slots, kept_positions
from tests.methods.battery import MAIN, model
from tests.methods.table import BY_LABEL, ROWS
from tests.sweep import sweep

FIRST = MAIN.first[:2]
# bfloat16 has 8 bits: a logit of this model, of at most 2, is off by so much without any method.
ERROR = 0.3


def rounded(m, dtype):
    """The model with weights that bfloat16 can say, computed in `dtype`."""
    return Model(m.config, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), m.params))


def answers(m, method):
    logits, cache = kvjax.prefill(m, FIRST, method=method, room=4)
    out = [np.asarray(logits)]
    for tokens in MAIN.steps[:2]:
        logits, cache = kvjax.step(m, cache, tokens[:2])
        out.append(np.asarray(logits, np.float32))
    kept = [{(b, h, int(p)) for (b, h, _), p in np.ndenumerate(x) if p >= 0} for x in kept_positions(cache)]
    return np.stack(out), kept, cache


@pytest.mark.parametrize("label", sweep([*dict.fromkeys(row.label for row in ROWS)], "ape", "kvquant"))
def test_in_bfloat16_methods_keep_and_say_what_they_do_in_float32(label):
    row = BY_LABEL[label]
    m, method = model(row.model), row.method()
    want, kept, wide = answers(rounded(m, jnp.float32), method)
    got, there, cache = answers(rounded(m, jnp.bfloat16), method)
    shared, of = sum(len(a & b) for a, b in zip(kept, there, strict=True)), sum(map(len, kept))
    # Scores that nearly tie may rank the other way.
    assert shared >= 0.9 * of
    if kept == there:
        np.testing.assert_allclose(got, want, atol=ERROR)
    assert np.isfinite(got).all() and kvjax.nbytes(cache) <= kvjax.nbytes(wide)
    for group, full in zip(cache.groups, wide.groups, strict=True):
        for part, whole in zip(group.parts, full.parts, strict=True):
            if isinstance(part, Slots) and getattr(whole.k, "dtype", None) == jnp.float32:
                assert part.k.dtype == jnp.bfloat16
