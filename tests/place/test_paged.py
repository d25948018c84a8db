"""Pages: attention over any split of slots into pages equals dense attention over the same slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar.kinds import View
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.place import paged
from kvjax.place.paged import build_pages, pool_pages, take_pages
from kvjax.state.cache import Cache, GroupState, Paged, kept_positions, nbytes
from kvjax.state.codes import dense, encode
from kvjax.state.page_gather import gather_pages
from kvjax.steps import Run, step_keeping
from kvjax.store.affine import Affine
from tests.sweep import sweep

B, N, K, S, H, T = 3, 4, 2, 23, 8, 2
GROUPS = (2, 1)  # layers of each group
LAYERS = ((0, 1), (1, 0))  # those that attend: (group, layer in it)
SCALE, CAP = 0.3, 2.0
Q_POS = np.array([[30, 31], [25, 26], [11, 12]], np.int32)


def make_views(rng, bias=True, slots=S, width=H):
    """Slots of two groups of layers, with unordered positions."""
    views = []
    for layers in GROUPS:
        shape = (layers, B, K, slots)
        k, v = (jnp.asarray(rng.normal(size=(*shape, width)), jnp.float32) for _ in range(2))
        pos = jnp.asarray(rng.integers(0, 30, shape), jnp.int32)
        extra = jnp.asarray(rng.normal(size=shape), jnp.float32) if bias else None
        views.append(View(k, v, pos, extra, {}))
    return tuple(views)


def make_kept(rng, share=0.4, slots=S):
    """Unequal lengths per head; one head keeps nothing, one everything."""
    kept = [
        rng.random((layers, B, K, slots)) < rng.uniform(0, 2 * share, (layers, B, K, 1)) for layers in GROUPS
    ]
    kept[0][1, 0, 1], kept[0][1, 2, 0], kept[1][0, 1, 0] = False, True, False
    return tuple(jnp.asarray(k) for k in kept)


def build(kept, views, page, codec=None, spare=0, shared=None):
    total = sum(int(k.sum()) for k in kept)
    pages = pool_pages(total, sum(GROUPS) * B * K, page) + spare
    make = jax.jit(build_pages, static_argnames=("page", "pages", "codecs", "number", "shared"))
    return make(kept, views, page=page, pages=pages, codecs=(codec, codec), number=0, shared=shared)


def attend(q, tables, pool, q_pos=Q_POS, implementation=None, layers=LAYERS):
    """(out, lse) of `layers`, over pages."""
    options = dict(scale=SCALE, softcap=CAP, implementation=implementation)

    @jax.jit
    def run(q, tables, pool, q_pos):
        return [paged.attend_pages(q, tables[g].layer(i), i, pool, q_pos, **options) for g, i in layers]

    return run(q, tables, pool, jnp.asarray(q_pos))


def attend_dense(q, views, kept, q_pos=Q_POS):
    """(out, lse) of LAYERS in float64, slot by slot."""
    found = []
    for g, i in LAYERS:
        k, v, pos = (np.asarray(x, np.float64)[i] for x in views[g][:3])
        s = np.einsum("bkgth,bksh->bkgts", np.asarray(q, np.float64).reshape(B, K, N // K, T, -1), k)
        s = CAP * np.tanh(s * SCALE / CAP)
        if views[g].bias is not None:
            s = s + np.asarray(views[g].bias, np.float64)[i][:, :, None, None]
        seen = np.asarray(kept[g])[i][:, :, None] & (pos[:, :, None] <= q_pos[:, None, :, None])
        w = np.where(seen[:, :, None], np.exp(s), 0)
        total = w.sum(-1)
        out = np.einsum("bkgts,bksh->bkgth", w, v) / np.where(total == 0, 1, total)[..., None]
        with np.errstate(divide="ignore"):
            found.append((out.reshape(B, N, T, -1), np.log(total).reshape(B, N, T)))
    return found


def close(got, want, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), got, want)


@pytest.fixture
def q(rng):
    return jnp.asarray(rng.normal(size=(B, N, T, H)), jnp.float32)


@pytest.mark.rotating
@pytest.mark.parametrize("page, spare", sweep([(1, 0), (3, 5), (16, 2)], (3, 5)))
def test_attention_over_pages_equals_dense_attention(rng, q, page, spare):
    views, kept = make_views(rng), make_kept(rng)
    got = attend(q, *build(kept, views, page, spare=spare))
    close(got, attend_dense(q, views, kept))
    # The heads that hold nothing: row 0, head 1 of the first layer, row 1, head 0 of the second.
    assert (got[0][0][0, N // K :] == 0).all() and (got[0][1][0, N // K :] == -jnp.inf).all()
    assert (got[1][1][1, : N // K] == -jnp.inf).all()


@pytest.mark.rotating
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_layer_may_be_walked_in_blocks_of_any_size(rng, q, monkeypatch, tokens):
    views, kept = make_views(rng), make_kept(rng)
    monkeypatch.setattr(paged, "WALK_TOKENS", tokens)
    close(attend(q, *build(kept, views, 3, spare=5)), attend_dense(q, views, kept))


@pytest.mark.rotating
def test_a_pool_of_one_layer_is_read_at_once(rng, q, monkeypatch):
    views, kept = make_views(rng, bias=False), make_kept(rng)
    pages = pool_pages(int(kept[1].sum()), B * K, 3) + 1
    (table,), pool = build_pages(kept[1:], views[1:], page=3, pages=pages, codecs=(None, None), number=0)
    monkeypatch.setattr(paged, "_walk", None)
    one = jax.jit(lambda q, table, pool: paged.attend_pages(
        q, table.layer(0), 0, pool, jnp.asarray(Q_POS), scale=SCALE, softcap=CAP
    ))  # fmt: skip
    close([one(q, table, pool)], attend_dense(q, views, kept)[1:])


@pytest.mark.rotating
def test_pages_may_hold_codes(rng, q):
    views, kept, codec = make_views(rng), make_kept(rng), Affine(8)
    tables, pool = build(kept, views, 3, codec)
    rounded = tuple(v._replace(k=dense(encode(v.k, codec)), v=dense(encode(v.v, codec))) for v in views)
    close(attend(q, tables, pool), attend_dense(q, rounded, kept))
    # Eight channels of one byte, a float16 scale and zero per token.
    assert nbytes((pool.k, pool.v)) == 2 * pool.pos.size * (H + 4)


def test_nothing_in_free_pages_or_dead_slots_reaches_an_output(rng, q):
    views, kept = make_views(rng), make_kept(rng)
    tables, pool = build(kept, views, 3, spare=5)
    empty, owned = pool.pos < 0, pool.owner >= 0
    assert empty[owned].any() and (~owned).sum() >= 5
    poisoned = {"k": jnp.where(empty[..., None], jnp.nan, pool.k)}
    poisoned["v"] = jnp.where(empty[..., None], 1e30, pool.v)
    poisoned["bias"] = jnp.where(empty, jnp.nan, pool.bias)
    close(attend(q, tables, dataclasses.replace(pool, **poisoned)), attend_dense(q, views, kept))


def test_pages_lie_in_the_order_of_their_owners_and_hold_the_kept_slots_in_slot_order(rng):
    views, kept = make_views(rng), make_kept(rng)
    tables, pool = build(kept, views, 3, spare=5)
    gathered = jax.jit(
        lambda tables, pool: [[gather_pages(t.layer(i), pool) for i in range(len(t.lengths))] for t in tables]
    )(tables, pool)
    kept, views, tables, pool, gathered = jax.device_get((kept, views, tables, pool, gathered))
    used = pool.owner[pool.owner >= 0]
    assert (np.diff(used) >= 0).all() and (pool.owner[len(used) :] == -1).all()
    for table, layers, view, keep in zip(tables, gathered, views, kept, strict=True):
        np.testing.assert_array_equal(table.lengths, keep.sum(-1))
        for layer, b, h in np.ndindex(keep.shape[:3]):
            mine = pool.owner == ((table.first_layer + layer) * B + b) * K + h
            pos, stay = pool.pos[mine].reshape(-1), keep[layer, b, h]
            np.testing.assert_array_equal(pos[pos >= 0], view.pos[layer, b, h][stay])
            assert mine.sum() == -(-stay.sum() // 3)
            keys = layers[layer]
            np.testing.assert_array_equal(keys.k[b, h, : stay.sum()], view.k[layer, b, h][stay])
            assert (keys.pos[b, h, stay.sum() :] == -1).all()


def test_bytes_follow_the_slots_that_are_kept(rng):
    views, kept, page = make_views(rng, bias=False), make_kept(rng, share=0.2), 3
    tables, pool = build(kept, views, page)
    lists, slots = sum(GROUPS) * B * K, sum(int(k.sum()) for k in kept)
    most = (slots + lists * (page - 1)) // page
    assert pool.owner.shape[0] == most
    # Keys, values and a position per slot, an owner per page; a first page and a length per list.
    assert nbytes(pool) == most * (page * (2 * H * 4 + 4) + 4)
    assert nbytes(tables) == lists * (4 + 4)


@pytest.mark.rotating
def test_forked_rows_attend_as_the_row_they_come_from(rng, q):
    views, kept, copies = make_views(rng), make_kept(rng), 3
    tables, pool = build(kept, views, 3, spare=5)
    forked, many = jax.jit(take_pages)(tables, pool, jnp.repeat(jnp.arange(B), copies))
    used = np.asarray(many.owner)[np.asarray(many.owner) >= 0]
    assert (np.diff(used) >= 0).all() and len(used) == copies * (np.asarray(pool.owner) >= 0).sum()
    got = attend(jnp.repeat(q, copies, axis=0), forked, many, np.repeat(Q_POS, copies, axis=0))
    want = attend_dense(q, views, kept)
    close(got, [tuple(np.repeat(x, copies, axis=0) for x in pair) for pair in want])
    cache = Cache(tuple(GroupState((t,)) for t in forked), jnp.zeros(B * copies, jnp.int32), (many,))
    base = Cache(tuple(GroupState((t,)) for t in tables), jnp.zeros(B, jnp.int32), (pool,))
    for mine, original in zip(kept_positions(cache), kept_positions(base), strict=True):
        np.testing.assert_array_equal(mine, np.repeat(original, copies, axis=0))


@pytest.mark.rotating
def test_a_row_with_more_than_its_share_is_taken_whole_where_the_data_sized_the_pool(rng):
    kept = tuple(jnp.zeros((n, B, K, S), bool).at[:, 0].set(True) for n in GROUPS)
    tables, pool = build(kept, make_views(rng), 3)
    groups, method = tuple(GroupState((t,)) for t in tables), kvjax.method("simlayerkv")
    cache = Cache(groups, jnp.full(B, 30, jnp.int32), (pool,), method=method)
    for index in ([0], [1, 0], [2]):
        taken = kvjax.take_rows(cache, index)
        for mine, all_of_them in zip(kept_positions(taken), kept_positions(cache), strict=True):
            np.testing.assert_array_equal(mine, all_of_them[index])


def test_a_lists_own_pages_are_neighbours_after_a_fork_too(rng):
    tables, pool = build(make_kept(rng), make_views(rng), 3, spare=5)
    forked, many = jax.jit(take_pages)(tables, pool, jnp.repeat(jnp.arange(B), 3))
    for segment, pages in [(t, pool) for t in tables] + [(t, many) for t in forked]:
        table, used = np.asarray(pages.table(segment)), -(-np.asarray(segment.lengths) // 3)
        rows = table.shape[1]
        assert used.max() > 1
        for layer, b, h in np.ndindex(used.shape):
            mine = table[layer, b, h, : used[layer, b, h]]
            np.testing.assert_array_equal(mine, mine[:1] + np.arange(len(mine)))
            owner = ((segment.first_layer + layer) * rows + b) * K + h
            assert (np.asarray(pages.owner)[mine] == owner).all()


# --- the kernel: rows of 128 numbers, and queries after every slot --------------------------------------

LATE = np.array([[30, 31], [40, 40], [29, 33]], np.int32)
ONE = dict(implementation="tpu interpret", layers=LAYERS[:1])  # a kernel takes as long to compile as a layer
KERNEL = {
    "pages of 8": dict(page=8),
    "biases": dict(page=128, bias=True),
    "biases over several pages": dict(page=128, bias=True, slots=300),
    "latents": dict(page=8, width=256, shared=128),
}


@pytest.mark.parametrize("case", sweep(KERNEL, "biases over several pages"))
@pytest.mark.rotating
def test_the_kernel_reads_what_the_walk_reads_and_nothing_that_is_free(rng, case):
    page, bias, slots, width, shared = (
        KERNEL[case].get(n, d) for n, d in dict(page=8, bias=False, slots=S, width=128, shared=None).items()
    )
    views, kept = make_views(rng, bias, slots, width), make_kept(rng, slots=slots)
    q = jnp.asarray(rng.normal(size=(B, N, T, width)), jnp.float32) / 4
    tables, pool = build(kept, views, page, spare=5, shared=shared)
    if shared:
        views = tuple(v._replace(v=v.k[..., :shared]) for v in views)
    dead = pool.pos < 0
    assert dead[pool.owner >= 0].any() and (pool.owner < 0).any()
    spoilt = {
        n: jnp.where(dead[..., None], jnp.nan, getattr(pool, n)) for n in "kv" if n == "k" or not shared
    }
    spoilt |= {"bias": jnp.where(dead, jnp.nan, pool.bias)} if bias else {}
    got = attend(q, tables, dataclasses.replace(pool, **spoilt), LATE, **ONE)
    close(got, attend_dense(q, views, kept, LATE)[:1])
    # The head that holds nothing.
    assert (got[0][0][0, N // K :] == 0).all() and (got[0][1][0, N // K :] == -jnp.inf).all()


@pytest.mark.rotating
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.rotating), True])
def test_the_kernel_reads_codes_as_the_walk_does(rng, bias):
    views, kept = make_views(rng, bias, 300, 128), make_kept(rng, slots=300)
    q = jnp.asarray(rng.normal(size=(B, N, T, 128)), jnp.float32) / 4
    tables, pool = build(kept, views, 128, Affine(8), spare=5)
    walked = attend(q, tables, pool, LATE, layers=LAYERS[:1])
    free = (pool.owner < 0)[:, None]
    data = {
        n: x.data | {"scale_zero": jnp.where(free, jnp.uint32(0x7E007E00), x.data["scale_zero"])}
        for n, x in {"k": pool.k, "v": pool.v}.items()
    }
    spoilt = {n: dataclasses.replace(getattr(pool, n), data=x) for n, x in data.items()}
    close(attend(q, tables, dataclasses.replace(pool, **spoilt), LATE, **ONE), walked)


@pytest.mark.rotating
def test_the_kernel_reads_forked_rows(rng):
    views, kept, copies = make_views(rng, False, width=128), make_kept(rng), 2
    q = jnp.asarray(rng.normal(size=(B, N, T, 128)), jnp.float32) / 4
    forked, many = take_pages(*build(kept, views, 8, spare=5), jnp.repeat(jnp.arange(B), copies))
    got = attend(jnp.repeat(q, copies, 0), forked, many, np.repeat(LATE, copies, 0), **ONE)
    want = attend_dense(q, views, kept, LATE)[:1]
    close(got, [tuple(np.repeat(x, copies, axis=0) for x in pair) for pair in want])


@pytest.mark.rotating
def test_pages_that_the_kernel_cannot_read_say_why(rng, q):
    views, kept = make_views(rng), make_kept(rng)
    (table, _), pool = build(kept, views, 8)
    (_, _), codes = build(kept, views, 8, Affine(4))
    wide = jnp.zeros((B, N, T, 128))
    one, at = table.layer(0), jnp.asarray(LATE)
    for pages, asked, how, why in [
        (pool, q, "tpu", "rows are 8 wide, expected a multiple of 128"),
        (codes, q, "tpu", "they hold such codes, expected float32, bfloat16 or 8 bits"),
        (pool, q, "cuda", "as 'cuda': there is no such form"),
        (
            build(kept, make_views(rng, width=128), 8)[1],
            wide,
            "tpu",
            "1 biases or scales of 2 heads x 24 slots",
        ),
        (build(kept, make_views(rng, False, width=128), 3)[1], wide, "tpu", "multiples of 3 rows, expected"),
    ]:
        with pytest.raises(NotImplementedError, match=why):
            paged.attend_pages(asked, one, 0, pages, at, scale=SCALE, implementation=how)


@pytest.mark.rotating
@pytest.mark.parametrize("id", [pytest.param("adakv", marks=pytest.mark.rotating), "kvzip"])
def test_a_decode_step_over_pages_gives_the_same_by_kernel_and_by_walk(id):
    config = Config(vocab=64, d_model=32, layers=1, heads=4, kv_heads=2, head_dim=128, d_ff=48)
    model = Model(config, init(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    method = kvjax.method(id, budget=0.5, page=8, **(dict(window=2) if id == "adakv" else {}))
    prompts = [rng.integers(0, 64, n).tolist() for n in (40, 21)]
    _, cache = kvjax.prefill(model, prompts, method=method, room=128)
    counts = np.concatenate(
        [s.lengths.reshape(-1) for g in cache.groups for s in g.bodies if isinstance(s, Paged)]
    )
    assert len(set(counts.tolist())) > 2
    token, append = jnp.asarray([3, 5]), jnp.asarray([True, False])
    bare = dataclasses.replace(cache, method=None, model="")
    found = []
    for how in ("reference", "tpu interpret"):
        run = Run(config, cache.method.decode_part(), how)
        logits, after = step_keeping(run, model.params, bare, token, append)
        again, _ = step_keeping(run, model.params, after, token, append)
        found.append((logits, again))
    close(*found)
    assert np.abs(found[0][0] - found[0][1]).max() > 1e-3
