"""Tokens taken back: what is left is what was there before them, or the call is refused."""

import dataclasses
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.rollback import rollback
from kvjax.api.verify import verify
from kvjax.base.errors import InputError
from kvjax.grammar.when import PREFILL_END
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.cache import check_alive
from tests.float64.drafts import DRAFT, UNEVEN, WIDTH, close, same, started, stepped
from tests.float64.reference import Row
from tests.methods.battery import BY_LABEL, MAIN, kept_of, model, prompt_of
from tests.models.conversation import TEXTS
from tests.models.conversation import model as architecture
from tests.sweep import sweep

# How many of the drafted tokens each row takes back.
BACK = np.array([3, 5, 0, 2])


def at_end(method):
    return dataclasses.replace(method, keep=dataclasses.replace(method.keep, when=PREFILL_END), spec=())


def with_merge(label, of):
    """Make a method whose slots leave as another one's do."""
    method, merge = BY_LABEL[label].method(), BY_LABEL[of].method().keep.merge
    return dataclasses.replace(method, keep=dataclasses.replace(method.keep, merge=merge), spec=())


METHODS = {
    "full": lambda: BY_LABEL["full"].method(),
    "snapkv": lambda: BY_LABEL["snapkv"].method(),
    "adakv": lambda: BY_LABEL["adakv"].method(),
    "kvzip": lambda: BY_LABEL["kvzip"].method(),
    "int4": lambda: BY_LABEL["int4"].method(),
    "a residue": lambda: with_merge("snapkv kvpress", "less"),
    "ranks": lambda: at_end(BY_LABEL["lagkv"].method()),
    "granules": lambda: kvjax.method("kivi", bits=4, group=4, residual=29),
    "by layer": lambda: kvjax.by_layer([BY_LABEL["adakv"].method(), BY_LABEL["int8"].method()]),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(METHODS, "granules"))
def test_what_is_left_is_what_the_other_tokens_alone_would_have_left(name):
    m = model("4/2")
    cache = started(m, METHODS[name](), room=WIDTH + 4)
    left, want = stepped(m, cache, DRAFT, UNEVEN - BACK)
    next_want, next_left = stepped(m, want, DRAFT[:, :1], [1] * 4)
    _, read = verify(m, cache, DRAFT, lengths=UNEVEN)
    back = rollback(read, BACK)
    assert back.added.tokens.tolist() == (UNEVEN - BACK).tolist()
    same(back, want)
    logits, after = kvjax.step(m, back, DRAFT[:, 0])
    close(logits, next_want[:, 0])
    same(after, next_left)


@pytest.mark.rotating
def test_a_step_behind_tokens_taken_back_is_that_of_float64():
    label, m = "snapkv", model("4/2")
    cache = started(m, BY_LABEL[label].method())
    prompts = [prompt_of("4/2", "main", b) for b in range(len(MAIN.first))]
    rows = [Row(p, kept_of(label, p)) for p in prompts]
    want = np.stack([[row.step(token) for token in DRAFT[b, :6]] for b, row in enumerate(rows)])
    got, cache = kvjax.verify(m, cache, DRAFT[:, :8])
    np.testing.assert_allclose(got[:, :6], want, rtol=0, atol=3e-5 * np.abs(want).max())
    cache = kvjax.rollback(cache, 3)
    logits, cache = kvjax.step(m, cache, DRAFT[:, 5])
    np.testing.assert_allclose(logits, want[:, 5], rtol=0, atol=3e-5 * np.abs(want).max())


@pytest.mark.parametrize("group, residual", sweep([(4, 6), (4, 0)], (4, 6)))
@pytest.mark.rotating
def test_granules_are_taken_back_where_the_same_ones_would_be_encoded_without_them(group, residual):
    m = model("4/2")
    method = kvjax.method("kivi", bits=4, group=group, residual=residual)
    prompt, read = [MAIN.first[0][:17]], 17 + WIDTH
    cache = kvjax.prefill(m, prompt, method=method, room=WIDTH + group)[1]
    encoded = lambda n: max(n - residual, 0) // group * group  # noqa: E731
    allowed = []
    for back in range(WIDTH + 1):
        _, full = verify(m, kvjax.fork(cache, 1), DRAFT[:1])
        # Granules may go whole where nothing is left that should lie in the tail.
        gone, tail = encoded(read) - encoded(read - back), read - encoded(read)
        exact = max(back - tail, 0) == gone
        if not exact:
            with pytest.raises(InputError, match=rf"kivi cannot take back \[{back}\] tokens: .*encoded some"):
                rollback(full, back)
            continue
        allowed.append(back)
        same(rollback(full, back), stepped(m, cache, DRAFT[:1, : WIDTH - back], [WIDTH])[1])
    assert allowed == ([0, 1, 2, 3] if residual else [0, 1, 5, 9])


@pytest.mark.rotating
def test_a_window_gives_tokens_back_until_it_has_lost_a_slot():
    m = model("windowed")
    window = min(w for w in m.config.windows if w is not None)
    short = [row[: window - 5] for row in MAIN.first[:2]]
    _, cache = kvjax.prefill(m, short, room=12)
    want, walked = stepped(m, cache, DRAFT[:2, :2], [2, 2])
    _, cache = verify(m, cache, DRAFT[:2, :5])
    cache = rollback(cache, 3)
    same(cache, walked)
    _, cache = kvjax.verify(m, cache, DRAFT[:2, :5])
    with pytest.raises(InputError, match="older slots of layer . have left"):
        rollback(cache, 1)


@pytest.mark.rotating
def test_everything_may_be_taken_back_where_nothing_is_chosen():
    m = model("4/2")
    cache = rollback(started(m, "full"), [len(row) for row in MAIN.first])
    assert cache.next.tolist() == [0] * 4
    assert all((pos == -1).all() for pos in kvjax.kept_positions(cache))
    logits, _ = kvjax.step(m, cache, DRAFT[:, 0])
    close(logits, kvjax.prefill(m, DRAFT[:, :1], room=1)[0])


@pytest.mark.rotating
def test_taken_and_copied_rows_know_what_they_have_added():
    m = model("4/2")
    _, cache = kvjax.verify(m, started(m, BY_LABEL["snapkv"].method()), DRAFT, lengths=UNEVEN)
    taken = kvjax.take_rows(cache, [3, 1])
    assert kvjax.rollback(kvjax.fork(taken, 2), [9, 9, 5, 5]).next.tolist() == [16, 16, 27, 27]
    with pytest.raises(InputError, match=r"\[9, 5\] were surely added"):
        kvjax.rollback(taken, [9, 6])


@pytest.mark.rotating
def test_what_was_stored_without_compressing_may_be_taken_back():
    m = model("4/2")
    cache = started(m, BY_LABEL["snapkv"].method())
    _, stored = kvjax.prefill(m, DRAFT[:, :4].tolist(), cache=cache, room=8, compress=False)
    assert kvjax.rollback(stored, 4).next.tolist() == cache.next.tolist()
    _, pressed = kvjax.prefill(m, DRAFT[:, :4].tolist(), cache=cache, room=8)
    with pytest.raises(InputError, match=r"\[0, 0, 0, 0\] were surely added"):
        kvjax.rollback(pressed, 1)


@pytest.mark.rotating
def test_a_context_stays_as_it_is():
    plain = Config(vocab=64, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    config = dataclasses.replace(plain, mixers=(Attention(), CrossAttention(width=16)))
    encoder, m = (Model(c, init(c, jax.random.key(0))) for c in (plain, config))
    cache = kvjax.encode_context(m, encoder, [[1, 2, 3, 4, 5, 6], [7]])
    want, walked = stepped(m, cache, DRAFT[:2, :3], [3, 3])
    got, cache = kvjax.verify(m, cache, DRAFT[:2, :5])
    close(got[:, :3], want)
    cache = kvjax.rollback(cache, 2)
    assert cache.next.tolist() == [3, 3]
    same(cache, walked)


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("label", "why"),
    [
        pytest.param(
            "h2o",
            r"layer 0 has a trace of its slots \(AccumulatedMass.*which includes their queries",
            marks=pytest.mark.rotating,
        ),
        ("r-kv", "the rows of layer 0 carry statistics"),
        ("sink-recent", "older slots of layer 0 were evicted"),
        pytest.param("kvzap", "older slots of layer 0 were evicted", marks=pytest.mark.rotating),
    ],
)
def test_what_tokens_have_changed_elsewhere_is_not_undone(label, why):
    m = model("4/2")
    _, cache = kvjax.step(m, started(m, BY_LABEL[label].method()), DRAFT[:, 0])
    with pytest.raises(
        InputError, match=rf"{label} cannot take back \[1, 1, 1, 1\] tokens: {why}.*kvjax.fork"
    ):
        rollback(cache, 1)
    check_alive(cache)


def test_sums_of_a_body_are_not_undone():
    m, method = model("4/2"), kvjax.method("sparq", budget=0.5, channels=4, newest=4)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=WIDTH)
    with pytest.raises(InputError, match="layer 0 has sums over the slots of its body"):
        rollback(cache, [len(row) for row in MAIN.first])


@pytest.mark.rotating
def test_a_state_is_not_undone():
    m = architecture("kimi linear")
    _, cache = kvjax.prefill(m, TEXTS[:2, :6], room=8)
    _, cache = kvjax.verify(m, cache, TEXTS[:2, 6:9])
    with pytest.raises(InputError, match="layer 0 has a recurrent state, which includes them"):
        kvjax.rollback(cache, [0, 1])
    assert kvjax.rollback(cache, 0) is cache


def test_wrong_numbers_and_unknown_caches_are_refused():
    m = model("4/2")
    cache = started(m, "full")
    for n in (1.5, [1, 2], np.ones((4, 1), int), True):
        with pytest.raises(InputError, match=r"n is .*, expected a whole number or int\[4\]"):
            unwrap(kvjax.rollback)(cache, n)
    for n in (-1, 17, [33, 0, 0, 0]):
        with pytest.raises(
            InputError, match=r"n is .*, expected at least 0 and at most the \[32, 27, 20, 16\]"
        ):
            kvjax.rollback(cache, n)
    with pytest.raises(InputError, match="nothing is known of how this cache came to be"):
        kvjax.rollback(jax.tree.map(lambda x: x, cache), 1)
    kvjax.rollback(cache, 1)
    with pytest.raises(InputError, match="was consumed by"):
        kvjax.rollback(cache, 1)


@pytest.mark.rotating
def test_values_that_are_no_numbers_go_with_their_tokens():
    m = model("4/2")
    cache = started(m, "full")
    want, _ = kvjax.step(m, kvjax.fork(cache, 1), DRAFT[:, 0])
    _, read = kvjax.verify(m, cache, DRAFT)

    def broken(group):
        late = group.tail.pos >= 16
        v = jnp.where(late[..., None], jnp.nan, group.tail.v)
        return group.with_tail(dataclasses.replace(group.tail, v=v))

    row = kvjax.take_rows(read, [3])
    row = dataclasses.replace(row, groups=tuple(map(broken, row.groups)))
    logits, _ = kvjax.step(m, kvjax.rollback(row, WIDTH), DRAFT[3:, 0])
    close(logits, want[3:])
