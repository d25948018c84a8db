"""Methods on a model in bfloat16, as it runs on accelerators: what is kept and said is that of float32."""

from functools import cache as once

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


@once
def rounded(name, dtype):
    """Build a model with weights that bfloat16 can say, computed in `dtype`."""
    m = model(name)
    return Model(m.config, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), m.params))


def answers(m, method):
    logits, cache = kvjax.prefill(m, FIRST, method=method, room=4)
    out = [np.asarray(logits)]
    for tokens in MAIN.steps[:2]:
        logits, cache = kvjax.step(m, cache, tokens[:2])
        out.append(np.asarray(logits))
    kept = [{(b, h, int(p)) for (b, h, _), p in np.ndenumerate(x) if p >= 0} for x in kept_positions(cache)]
    return np.stack(out), kept, cache


@once
def whole(name, dtype):
    return answers(rounded(name, dtype), None)[0]


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep([*dict.fromkeys(row.label for row in ROWS)], "kvquant"))
def test_in_bfloat16_methods_keep_and_lose_what_they_do_in_float32(label):
    row = BY_LABEL[label]
    method = row.method()
    found = {dtype: answers(rounded(row.model, dtype), method) for dtype in (jnp.float32, jnp.bfloat16)}
    (want, kept, wide), (got, there, cache) = found.values()
    # Scores that nearly tie may rank the other way.
    assert sum(len(a & b) for a, b in zip(kept, there, strict=True)) >= 0.9 * sum(map(len, kept))
    # To the full cache of the same model, in steps and prompts. Where the same slots stay and nothing is
    # encoded, merged or picked, the two differ by the rounding of bfloat16 alone.
    lost = {dtype: abs(x[0] - whole(row.model, dtype)).mean() for dtype, x in found.items()}
    assert np.isfinite(got).all() and lost[jnp.bfloat16] < 1.4 * lost[jnp.float32] + 0.03
    plain = method.store is None and method.read is None and getattr(method.keep, "merge", None) is None
    if kept == there and plain:
        np.testing.assert_allclose(got, want, atol=0.3)
    assert kvjax.nbytes(cache) <= kvjax.nbytes(wide)
    for group, full in zip(cache.groups, wide.groups, strict=True):
        for part, other in zip(group.parts, full.parts, strict=True):
            if isinstance(part, Slots) and getattr(other.k, "dtype", None) == jnp.float32:
                assert part.k.dtype == jnp.bfloat16
