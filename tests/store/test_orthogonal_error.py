"""Codes whose error lies where queries are small, by the authors' form, and what rows learn for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar.keys import key_of
from kvjax.state.codes import LEARNT, bind
from kvjax.store.affine import Affine
from kvjax.store.orthogonal_error import OrthogonalError, QueryProducts
from tests.float64.codes import affine
from tests.methods.battery import MAIN, model, prompt_of

KIVI = Affine(2, axis="channel", group=8)


def by_covariances(x, q, word):
    """Do what the authors' code does: with P the inverse of A, channels r move by P_rf (P_ff)^-1 (0, d)."""
    _, s, turn = np.linalg.svd(q, full_matrices=False)
    near = s[: word.rank, None] * turn[: word.rank]
    p, x = np.linalg.inv(np.eye(x.shape[-1]) + word.weight * near.T @ near), x.copy()
    for end in range(word.run, x.shape[-1], word.run):
        error = np.zeros((len(x), end))
        own = x[:, end - word.run : end]
        error[:, -word.run :] = affine(2, 8, channel=True)(own) - own
        x[:, end:] += error @ np.linalg.inv(p[:end, :end]) @ p[:end, end:]
    runs = np.split(x, range(word.run, x.shape[-1], word.run), 1)
    return np.concatenate([affine(2, 8, channel=True)(run) for run in runs], 1)


def test_runs_move_as_the_authors_code_moves_them_and_queries_feel_less_of_the_error(rng):
    word = OrthogonalError(run=8, rank=4, weight=0.1)
    q, x = rng.normal(size=(40, 4)) @ rng.normal(size=(4, 32)), rng.normal(size=(8, 32))
    arrays = {key_of(QueryProducts()): {LEARNT: jnp.asarray(q.T @ q, jnp.float32)[None, None]}}
    codec = bind(word >> KIVI, arrays)
    low = x.astype(np.float32)
    through = lambda codec, x: jax.jit(lambda x: codec.decode(codec.encode(x), 32, jnp.float32))(x)  # noqa: E731
    back = through(codec, low[None, None])
    np.testing.assert_allclose(back[0, 0], by_covariances(x, q, word), atol=2e-3)
    plain = np.asarray(through(KIVI, low))
    felt = [np.square((y - x) @ q.T).sum() for y in (np.asarray(back)[0, 0], plain)]
    assert felt[0] < 0.8 * felt[1]


@pytest.mark.rotating
def test_rows_learn_of_all_their_prompts_and_of_no_step():
    method = kvjax.method("squat", group=8, residual=4, run=8)
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=12)
    for token in MAIN.steps[:2]:
        _, cache = kvjax.step(model("4/2"), cache, token)
    for b, tokens in enumerate(MAIN.first):
        q = prompt_of("4/2", "main", b).q
        for layer, group in enumerate(cache.groups):
            want = np.stack([x.reshape(-1, 16).T @ x.reshape(-1, 16) for x in np.split(q[layer], 2)])
            got = np.asarray(group.rows[key_of(QueryProducts())])[0, b]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
        assert len(tokens) == q[0].shape[1]
    cache = kvjax.rollback(cache, 1)
    with pytest.raises(InputError, match="since its codecs learnt from a prompt"):
        kvjax.rollback(cache, 2)


def test_what_cannot_be_moved_is_refused():
    with pytest.raises(ValueError, match=r"Affine\(bits=4, .* encodes channels together: use Affine"):
        OrthogonalError() >> Affine(4)
    with pytest.raises(ValueError, match="run and rank are at least 1 and weight is at least 0"):
        OrthogonalError(rank=0)
    own = kvjax.method("snapkv", budget=0.5, window=4, variant="paper")
    with pytest.raises(InputError, match="codes learn what the queries of a KV head ask for"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.chain(own, kvjax.method("squat", group=8)))
