"""The pure step inside a user's own loop gives what `kvjax.step` gives, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.chunks import tokens_that_fit
from kvjax.base.errors import InputError
from kvjax.compress.capacity import PLENTY
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.kinds import Score
from kvjax.keep.algebra import Pool, Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.probe import ProbeAttention, RepeatContext
from tests.methods.battery import MAIN, first_of_each_class, model
from tests.methods.table import BY_LABEL
from tests.models.conversation import model as architecture
from tests.sweep import sweep

METHODS = {
    "full": lambda: None,
    "h2o": lambda: kvjax.method("h2o", budget=0.5),
    "adakv": lambda: kvjax.method("adakv", budget=0.5, window=4, page=4),
}


# Every kind of memory that can be full, beside windows and states that cannot.
FULL = (
    "sinks",
    "mla",
    "gqkva",
    "kimi linear",
    "jamba",
    "goldfinch",
    "lckv",
    "clla",
    "svformer",
    "lisa",
    "forgetting",
    "retnet",
)

PROBE = RepeatContext()


@dataclasses.dataclass(frozen=True)
class Halved(Word):
    """A user's own word around another score."""

    inner: Score

    def __call__(self, view, seen):
        return 0.5 * self.inner(view, seen)


def pooled(x):
    """Take the maximum over three neighbours; scores of attention are no less than the zeros beside them."""
    beside = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    return np.max([beside[..., i : i + x.shape[-1]] for i in range(3)], axis=0)


@pytest.mark.rotating
def test_a_probe_is_filled_wherever_a_score_holds_it():
    m, prompt, inner = model("4/2"), [list(range(3, 19))], ProbeAttention(PROBE)

    def found(score):
        method = Method(Keep(score, Budget(0.5), Uniform(), probe=PROBE))
        return kvjax.scores(m, prompt, method, continuation=[[5]]).scores

    plain = found(inner)
    for mine, want in ((found(inner >> Pool(3)), pooled), (found(Halved(inner)), lambda x: x / 2)):
        for x, y in zip(plain, mine, strict=True):
            np.testing.assert_allclose(y, want(x), rtol=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(METHODS, "adakv"))
def test_a_scan_over_the_pure_step_is_a_loop_over_step(name):
    m, tokens = model("4/2"), jnp.asarray(MAIN.steps, jnp.int32)
    _, cache = kvjax.prefill(m, MAIN.first, method=METHODS[name](), room=len(tokens))
    static = kvjax.pure.static(m, cache.method)

    @jax.jit
    def scanned(params, cache):
        def one(cache, token):
            logits, cache = kvjax.pure.step(static, params, cache, token)
            return cache, logits

        return jax.lax.scan(one, cache, tokens)

    looped = scanned(m.params, cache)
    for i, token in enumerate(tokens):
        logits, cache = kvjax.step(m, cache, token)
        np.testing.assert_array_equal(looped[1][i], logits)
    assert jax.tree.structure(looped[0]) == jax.tree.structure(cache)
    for mine, theirs in zip(jax.tree.leaves(looped[0]), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def written(m, cache, count):
    """Logits [steps, B, V] of a scan over pure steps, and the cache after them."""
    static = kvjax.pure.static(m, cache.method)
    params, fitted = m.params, kvjax.pure.fitted(static.method)
    tokens = jax.random.randint(jax.random.key(0), (count, len(cache.next)), 0, m.config.vocab, jnp.int32)

    @jax.jit
    def scanned(params, cache):
        def one(cache, token):
            logits, cache = kvjax.pure.step(static, params, cache, token, fitted=fitted)
            return cache, logits

        return jax.lax.scan(one, cache, tokens)

    cache, logits = scanned(params, cache)
    return np.asarray(logits), cache


def check_full(m, method):
    """Rows are right as long as `kvjax.step` would take a token, after that NaN, and their slots stay."""
    first = [[token % m.config.vocab for token in row] for row in MAIN.first]
    tight, wide = (kvjax.prefill(m, first, method=method, room=room)[1] for room in (1, 64))
    run = kvjax.pure.static(m, tight.method).stepping
    free = np.asarray(tokens_that_fit(run.groups(m.params), tight).min(0))
    lasting = free >= PLENTY
    count = 3 if lasting.all() else int(free[~lasting].max()) + 1
    got, after = written(m, tight, count)
    want, _ = written(m, wide, count)
    fits = np.asarray(after.next - tight.next)
    for row, n in enumerate(fits):
        assert n >= min(free[row], count)
        np.testing.assert_allclose(got[:n, row], want[:n, row], rtol=2e-3, atol=2e-3)
        assert np.isnan(got[n:, row]).all()
    if lasting.all():
        return
    assert (fits < count).any()
    with pytest.raises(InputError, match="the cache is full"):
        kvjax.step(m, after, [1] * len(fits))


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(first_of_each_class(), "snapkv + kivi"))
def test_full_rows_give_nan(label):
    row = BY_LABEL[label]
    method = row.method()
    check_full(kvjax.prepare(model(row.model), method), method)


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(FULL, "forgetting"))
def test_full_rows_give_nan_in_architectures(name):
    check_full(architecture(name), None)


@pytest.mark.rotating
def test_rows_that_do_not_append_stay_as_they_are():
    m, token = model("4/2"), jnp.asarray(MAIN.steps[0], jnp.int32)
    _, cache = kvjax.prefill(m, MAIN.first, room=3)
    some = jnp.array([True, False, True, False])
    step = jax.jit(kvjax.pure.step, static_argnums=0)
    _, after = step(kvjax.pure.static(m), m.params, cache, token, append=some)
    assert after.next.tolist() == [n + int(stays) for n, stays in zip(cache.next, some, strict=True)]


def test_a_pure_prefill_is_a_prefill():
    m, tokens = model("4/2"), np.asarray(MAIN.first[0])[None]
    static = kvjax.pure.static(m, kvjax.method("snapkv", budget=0.5, window=4))
    logits, cache = jax.jit(kvjax.pure.prefill, static_argnames=("static", "room"))(
        static, m.params, jnp.asarray(tokens, jnp.int32), room=3
    )
    want, other = kvjax.prefill(m, tokens, method=static.method, room=3)
    np.testing.assert_array_equal(logits, want)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    assert cache.method == other.method


def test_what_is_static_is_hashable_and_shared_by_models_of_one_config():
    m = model("4/2")
    twin = kvjax.Model(m.config, jax.tree.map(lambda x: x + 1, m.params))
    assert hash(kvjax.pure.static(m, "full")) == hash(kvjax.pure.static(twin))
    assert kvjax.pure.static(m) == kvjax.pure.static(twin) != kvjax.pure.static(m, "int8")


def test_another_methods_cache_and_fitted_arrays_are_refused():
    m, token = model("4/2"), jnp.asarray(MAIN.steps[0], jnp.int32)
    _, cache = kvjax.prefill(m, MAIN.first, room=3)
    with pytest.raises(InputError, match=r"filled by 'full', the static part is of 'int8'"):
        kvjax.pure.step(kvjax.pure.static(m, "int8"), m.params, cache, token)
    with pytest.raises(InputError, match=r"fitted has scale, expected kvjax.pure.fitted\(method\)"):
        kvjax.pure.step(kvjax.pure.static(m), m.params, cache, token, fitted={"scale": token})
