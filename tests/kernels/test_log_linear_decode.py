"""One token over levels of states on TPUs: the kernel against the plain form, at all positions.

Levels that must not be read hold no numbers here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.log_linear import log_linear
from kvjax.ops.recurrent.log_linear_decode import log_linear_decode, visits_of
from kvjax.ops.recurrent.log_linear_levels import LevelState, level
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, StackedState
from tests.ops.oracles import rms
from tests.sweep import sweep

B, H, K, V = 4, 2, 8, 128
kernel = jax.jit(partial(log_linear_decode, implementation="tpu interpret"))
plain = jax.jit(partial(log_linear_decode, implementation="reference"))


def draw(seed, following, count, *, vector=True, erase=True, dtype="float32"):
    """(state, token, level scales, mask); the last row's token is left out."""
    rng = np.random.default_rng(seed)
    b = len(following)
    q, k = rng.normal(size=(2, b, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(b, H, V)), 2 * rng.random((b, H, 1))
    g = jnp.asarray(-rng.random((b, H, K if vector else 1)), jnp.float32)
    q, k, v, p = (jnp.asarray(x, dtype) for x in (q, k, v, beta * k))
    used = [[n > 0 and holds(n - 1, x, count) for x in range(count)] for n in following]
    levels = rng.normal(size=(b, count, H, K, V)) * np.asarray(used)[..., None, None, None]
    state = LevelState(jnp.asarray(levels, jnp.float32), jnp.asarray(following, jnp.int32))
    scales = jnp.asarray(2 * rng.random((b, H, count)), jnp.float32)
    return state, RecurrenceInputs(q, k, v, g, p if erase else None), scales, jnp.arange(b) < b - 1


def holds(last, x, count):
    """Whether a token before position last + 1 is on level x, of those that are kept."""
    return any(min((last ^ s).bit_length(), count - 1) == x for s in range(last + 1))


def check(got, want, bar=2e-6):
    assert rms(got[0], want[0]) < bar
    assert rms(got[1].levels, want[1].levels) < bar
    np.testing.assert_array_equal(got[1].next, want[1].next)


KINDS = [(many, many, dtype) for many in (False, True) for dtype in ("float32", "bfloat16")]


@pytest.mark.rotating
@pytest.mark.parametrize("vector, erase, dtype", sweep(KINDS, KINDS[0], KINDS[3]))
def test_rows_at_different_positions(vector, erase, dtype):
    inputs = draw(0, [0, 1, 7, 12], 5, vector=vector, erase=erase, dtype=dtype)
    check(kernel(*inputs), plain(*inputs), 2e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("count", sweep([1, 2, 4], 4))
def test_the_topmost_level_absorbs_what_is_further_away(count):
    for first in (0, 4, 8, 28):
        inputs = draw(1, range(first, first + B), count)
        check(kernel(*inputs), plain(*inputs))


def test_a_sequence_of_steps_is_that_of_the_plain_form():
    got = want = LevelState(jnp.zeros((1, 4, H, K, V)), jnp.zeros(1, jnp.int32))
    for t in range(9):
        _, token, scales, _ = draw(t, [t], 4)
        (a, got), (b, want) = kernel(got, token, scales), plain(want, token, scales)
        check((a, got), (b, want))


@pytest.mark.rotating
def test_empty_levels_are_not_read():
    state, token, scales, mask = draw(2, [5, 6, 8, 12], 6)
    want = plain(state, token, scales, mask)
    visits, counts, _ = visits_of(state.next, mask, 6)
    visited = np.zeros((B, 6), bool)
    for b in range(B):
        visited[b, np.asarray(visits)[b, : int(counts[b])]] = True
    assert visited.sum(1).tolist() == [3, 4, 5, 4]
    seen = visited[..., None, None, None]
    poisoned = state._replace(levels=jnp.where(seen, state.levels, jnp.nan))
    out, new = kernel(poisoned, token, scales, mask)
    check((out, new._replace(levels=jnp.where(seen, new.levels, 0.0))), want)


@pytest.mark.rotating
@pytest.mark.parametrize("step", sweep([kernel, plain], kernel), ids=["kernel", "plain"])
def test_a_step_over_stacked_levels_changes_its_layer_alone(step):
    state, token, scales, mask = draw(3, [5, 6, 8, 12], 6)
    out, new = step(state, token, scales, mask)
    others = jnp.full((3, *state.levels.shape), jnp.nan).at[1].set(state.levels)
    found, held = step(state._replace(levels=StackedState(others, jnp.asarray(1))), token, scales, mask)
    np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(held.levels.layers, others.at[1].set(new.levels))
    np.testing.assert_array_equal(held.next, new.next)


@pytest.mark.rotating
def test_one_token_goes_through_the_step_and_more_say_why_not():
    state, token, scales, mask = draw(4, [5, 6, 8, 12], 6)
    one = jax.tree.map(lambda x: x[:, None], (token, scales, mask))
    call = partial(log_linear, state=state, implementation="tpu interpret")
    out, new = call(*one[:2], mask=one[2])
    want, held = kernel(state, token, scales, mask)
    check((out[:, 0], new), (want, held))
    twice = jax.tree.map(lambda x: jnp.repeat(x, 2, 1), one)
    with pytest.raises(NotImplementedError, match="2 tokens have neither kernels nor"):
        call(*twice[:2], mask=twice[2])


@pytest.mark.rotating
def test_positions_say_which_levels_are_visited():
    following = jnp.arange(70, dtype=jnp.int32)
    visits, counts, targets = visits_of(following, jnp.ones(70, bool), 5)
    for t in range(1, 70):
        used = {x for x in range(5) if holds(t - 1, x, 5)}
        target = min(int(level(jnp.asarray(t), jnp.asarray(t - 1))), 4)
        assert int(targets[t]) == target
        assert visits[t, : int(counts[t])].tolist() == sorted(used | {0, target})


def test_what_cannot_run_says_why():
    state, token, scales, _ = draw(0, [3], 3)
    with pytest.raises(NotImplementedError, match="states of 8 x 64 would be copied"):
        thin = state._replace(levels=state.levels[..., :64])
        log_linear_decode(thin, token._replace(v=token.v[..., :64]), scales, implementation="tpu")
