"""LagKV's ranks over two evictions, against its equation in float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Method, check
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Observed, View
from kvjax.grammar.when import STEP, Every
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.scores.lag import LagRank, LagRelative
from kvjax.ops.base.rope import Rope
from tests.float64.reference import Lag, Prompt, lag_ranks
from tests.float64.reference import Row as Slotwise
from tests.methods.battery import MAIN, decoder, model, positions, step
from tests.methods.rows import THETA, count

B, K, H, LAG, SINKS = 2, 2, 8, 4, 2
TRACE = LagRank(LAG, SINKS)


def view_of(lists):
    """Arrange lists [B][K] of slots in position order as a view, the empty slots last and full of garbage."""
    size = max(len(slots) for row in lists for slots in row) + 3
    k, v = np.full((2, B, K, size, H), 1e3)
    pos, rank = np.full((B, K, size), -1, np.int32), np.zeros((B, K, size))
    for b, h in np.ndindex(B, K):
        for i, slot in enumerate(lists[b][h]):
            pos[b, h, i], rank[b, h, i] = slot["pos"], slot["rank"]
            k[b, h, i], v[b, h, i] = slot["k"], slot["v"]
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return View(f32(k), f32(v), jnp.asarray(pos), None, {key_of(TRACE): f32(rank)})


def rank(slots):
    """Note in slots what the equation says of those that are not ranked yet."""
    new = [s for s in slots if s["pos"] >= SINKS and s["rank"] < 0]
    found = lag_ranks(*(np.stack([s[x] for s in new]) for x in "kv"), LAG)
    for slot, one in zip(new, found, strict=True):
        slot["rank"] = one


def seen_by(view):
    length = jnp.asarray(view.pos.max((1, 2)) + 1)
    return Observed({}, None, length, length // 2, 0, AttentionSpec(1.0, None, Rope()))


def test_every_partition_is_ranked_once_by_the_one_behind_it(rng):
    token = lambda j: dict(pos=j, rank=-1.0, k=rng.normal(size=H), v=rng.normal(size=H))  # noqa: E731
    lists = [[[token(j) for j in range(n)] for _ in range(K)] for n in (23, 17)]
    ranked = []
    for turn in range(2):
        view = view_of(lists)
        got = np.asarray(TRACE.judge(view, seen_by(view)))
        for b, h in np.ndindex(B, K):
            rank(lists[b][h])
            np.testing.assert_allclose(got[b, h, : len(lists[b][h])], [s["rank"] for s in lists[b][h]])
        ranked.append(sum(s["rank"] >= 0 for row in lists for slots in row for s in slots))
        if turn:
            break
        # Half of what was ranked leaves, another half in every head, and six tokens come.
        for row in lists:
            for h in range(K):
                end = row[h][-1]["pos"] + 1
                stays = [s for s in row[h] if s["rank"] < 0 or (s["rank"] * LAG + h) % 2]
                row[h] = stays + [token(end + i) for i in range(6)]
    assert ranked == [2 * (16 + 8), 2 * (8 + 4 + 4 + 8)]


def test_what_is_not_ranked_stands_above_and_the_newest_highest(rng):
    slots = [dict(pos=j, rank=r, k=np.ones(H), v=np.ones(H)) for j, r in enumerate((-1, 0.75, 0.25, -1, -1))]
    view = view_of([[slots] * K] * B)
    score = np.asarray(LagRelative(LAG, SINKS)(view, seen_by(view)))[0, 0, :5]
    assert score.argsort().tolist() == [2, 1, 0, 3, 4] and score[[1, 2]].tolist() == [0.75, 0.25]


def test_ranking_among_neighbours_is_refused_where_slots_have_no_order():
    keep = Keep(LagRelative(), Budget(0.5), Uniform(), when=Every(2))
    check(Method(keep))
    with pytest.raises(ValueError, match=r"Every\(tokens=1\) sees slots in any order, .* as in Every\(128\)"):
        check(Method(Keep(LagRelative(), Budget(0.5), Uniform(), when=STEP)))


@pytest.mark.rotating
def test_ranks_are_remembered_from_one_eviction_to_the_next_while_decoding():
    lag = Lag(count, THETA, lag=4, sinks=2)
    method = kvjax.method("lagkv", budget=0.5, lag=4, sinks=2)
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=32)
    prompts = [Prompt(decoder("4/2"), tokens) for tokens in MAIN.first]
    rows = [Slotwise(p, lag.kept(p), leave=lag.leave) for p in prompts]
    for token in range(24):
        _, cache = step(model("4/2"), cache, [token] * len(rows), append=True)
        for one in rows:
            one.step(token, victim=lag.victims)
        assert [[one.positions()[i] for one in rows] for i in range(2)] == positions(cache)
    # Slots of new tokens were ranked, more than once in a row.
    slots = [s for one in rows for lists in one.slots for slots in lists for s in slots]
    assert {0.5, 0.75} <= {s.get("rank", -1) for s in slots if s["pos"] > 36}
