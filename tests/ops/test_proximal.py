"""Attention with own keys near and shared keys far away, however it is cut: against one softmax in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.proximal import proximal_attention
from tests.ops.oracles import rms
from tests.sweep import sweep

B, T, N, H, K, V = 2, 29, 4, 2, 6, 5
REAL = np.array([T, 17])  # tokens of each row; the rest is padding on its right


def by_hand(x, sinks, recent):
    out = np.zeros((B, T, N, V))
    for b, t, n in np.ndindex(B, T, N):
        s = np.arange(t + 1)
        own = (s < sinks) | (t - s < recent)
        keys = np.where(own[:, None], x["k"][b, : t + 1, n // 2], x["shared"][b, : t + 1, n // 2])
        p = np.exp(keys @ x["q"][b, t, n] / np.sqrt(K))
        out[b, t, n] = p / p.sum() @ x["v"][b, : t + 1, n // 2]
    return out


@pytest.fixture
def tokens(rng):
    widths = {"q": (N, K), "k": (H, K), "v": (H, V), "shared": (H, K)}
    return {n: rng.normal(size=(B, T, *w)) for n, w in widths.items()}


@pytest.mark.parametrize("sinks, recent", sweep([(2, 4), (0, 1), (3, 40)], (2, 4)))
def test_pieces_of_any_size_are_one_softmax(tokens, sinks, recent):
    want = by_hand(tokens, sinks, recent)
    with jax.enable_x64(True):
        x = {n: jnp.asarray(y) for n, y in tokens.items()}
        state, at = None, 0
        run = jax.jit(proximal_attention, static_argnames=("sinks", "recent"))
        for size in (11, 11, *[1] * (T - 22)):
            piece = {n: y[:, at : at + size] for n, y in x.items() if n != "shared"}
            mask = jnp.asarray(np.arange(at, at + size) < REAL[:, None])
            if state is not None and at == 11:
                state = state._replace(v=jnp.pad(state.v, ((0, 0), (0, T - 11), (0, 0), (0, 0))))
            slots = size if state is None else T
            # Slots that hold no token yet are empty.
            shared = jnp.where(jnp.arange(slots)[:, None, None] < at + size, x["shared"][:, :slots], 0.0)
            out, state = run(
                **piece, shared=shared, sinks=sinks, recent=recent, initial_state=state, mask=mask
            )
            for b in range(B):
                live = slice(0, max(0, min(size, REAL[b] - at)))
                if live.stop:
                    assert rms(out[b, live], want[b, at : at + size][live]) < 1e-10
            at += size
    assert state.count.tolist() == REAL.tolist() and state.k.shape[1] == sinks + recent
