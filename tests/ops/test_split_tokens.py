"""Attention of tokens that lie on several devices is attention: against loops in float64, in every way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.mesh.on_mesh import OnMesh, as_mesh
from kvjax.mesh.rules import Rules
from kvjax.ops.attention import split_tokens, ways
from kvjax.ops.attention.split_tokens import split_attention
from kvjax.ops.attention.union import Keys, Reduction
from kvjax.ops.attention.ways import GATHER, HELPED, KEYS, QUERIES, TransferBytes, Way
from tests.sweep import sweep

B, N, K, T, H, S, PARTS = 2, 4, 2, 16, 8, 24, 4
MASS = (
    Reduction("sum"),
    Reduction("max"),
    Reduction("squares"),
    Reduction("count", threshold=0.1),
    Reduction("sum", fade=0.7),
)
OVER = {
    "one axis": ("seq=4", Rules(tokens="seq", slots="seq")),
    "heads and rows, too": (
        "data=2,model=2,seq=2",
        Rules(batch="data", heads="model", kv_heads="model", tokens="seq", slots="seq"),
    ),
    "two axes": ("a=2,b=2", Rules(tokens=("a", "b"), slots=("a", "b"))),
    "a past that is whole": ("seq=4", Rules(tokens="seq")),
}
WAYS = {
    "gather": (Way(GATHER), Way(GATHER)),
    "ring": (Way(KEYS, PARTS - 1), Way(KEYS, PARTS - 1)),
    "helped": (Way(HELPED, PARTS - 1), Way(KEYS, PARTS - 1)),
    "queries go round": (Way(KEYS, PARTS - 1), Way(QUERIES)),
    "gather, and queries go round": (Way(GATHER), Way(QUERIES)),
}


def reference(q, sets, q_pos, *, scale, window=None, softcap=None, clip=None):
    """(out, lse, masses of every set) by loops over rows, heads and queries."""
    out, lse = np.zeros((B, N, T, H)), np.full((B, N, T), -np.inf)
    masses = [[np.zeros((B, K, s["k"].shape[2])) for _ in MASS] for s in sets]
    for b, n, t in np.ndindex(B, N, T):
        if q_pos[b, t] < 0:
            continue
        newer, logits = int((q_pos[b, t + 1 :] >= 0).sum()), []
        for s in sets:
            head = n * s["k"].shape[1] // N
            z = s["k"][b, head] @ q[b, n, t] * scale
            z = z if softcap is None else softcap * np.tanh(z / softcap)
            z = z + (0 if s["bias"] is None else s["bias"][b, head])
            if s["pos"] is not None:
                pos = s["pos"][b, head if s["pos"].shape[1] > 1 else 0]
                seen = (pos >= 0) & (pos <= q_pos[b, t])
                seen &= window is None or pos > q_pos[b, t] - window
                z = np.where(seen, z, -np.inf)
            logits.append(z)
        z = np.concatenate(logits)
        if not np.isfinite(z).any():
            continue
        lse[b, n, t] = np.log(np.exp(z - z.max()).sum()) + z.max()
        p = np.exp(z - lse[b, n, t])
        p = p if clip is None else np.clip((clip[1] - clip[0]) * p + clip[0], 0, 1)
        ends = np.cumsum([len(x) for x in logits])[:-1]
        for s, mine, found in zip(sets, np.split(p, ends), masses, strict=True):
            out[b, n, t] += mine @ s["v"][b, n * s["k"].shape[1] // N]
            if s["pos"] is None:
                continue
            head = n * K // N
            for i, r in enumerate(MASS):
                at = found[i][b, head]
                each = {"sum": mine * r.fade**newer, "squares": mine**2, "count": mine > r.threshold}
                at[:] = np.maximum(at, mine) if r.kind == "max" else at + each[r.kind]
    return out, lse, masses


def drawn(rng):
    """Draw queries, their positions, the new keys, a past with empty slots in any order, and a sink."""
    q_pos = np.full((B, T), -1)
    for b, (start, count) in enumerate(((S, T), (9, 11))):
        q_pos[b, :count] = start + np.arange(count)
    past = np.full((B, K, S), -1)
    for b, k in np.ndindex(B, K):
        held = rng.permutation(q_pos[b, 0])[: [20, 6][b] + k]
        past[b, k, rng.permutation(S)[: len(held)]] = held

    def keys(heads, slots, pos, bias):
        k, v = rng.normal(size=(2, B, heads, slots, H))
        return dict(k=k, v=v, pos=pos, bias=rng.normal(size=(B, heads, slots)) if bias else None)

    new = keys(K, T, q_pos[:, None], False)
    sink = keys(N, 1, None, True)
    return rng.normal(size=(B, N, T, H)) * 2, q_pos, new, keys(K, S, past, True), sink


def as_keys(s):
    put = lambda x: None if x is None else jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32)  # noqa: E731
    return Keys(*(put(s[name]) for name in ("k", "v", "pos", "bias")))


def close(found, want):
    np.testing.assert_allclose(np.asarray(found, np.float64), want, atol=2e-5, rtol=2e-5)


CASES = [(over, way, window) for over in OVER for way in WAYS for window in (None, 3, 7)]


@pytest.mark.rotating
@pytest.mark.parametrize("over, way, window", sweep(CASES, ("heads and rows, too", "ring", None)))
def test_it_is_attention_over_all_keys_and_counts_what_they_receive(over, way, window, rng, monkeypatch):
    mesh, rules = OVER[over]
    on = OnMesh(as_mesh(mesh), rules)
    parts = on.devices("tokens")
    new_way, past_way = (w._replace(hops=w.hops and parts - 1) for w in WAYS[way])
    if window is not None and new_way.kind in (KEYS, HELPED):
        new_way = Way(KEYS, min(parts - 1, -(-(window - 1) // (T // parts))))
    monkeypatch.setattr(TransferBytes, "of_new", lambda *_: new_way)
    monkeypatch.setattr(TransferBytes, "of_past", lambda *_: past_way)
    q, q_pos, new, past, sink = drawn(rng)
    options = dict(scale=0.3, window=window, softcap=5.0)
    want = reference(q, [past, new, sink], q_pos, **options)
    given = jnp.asarray(q, jnp.float32), as_keys(new), [as_keys(past)], jnp.asarray(q_pos, jnp.int32)
    call = jax.jit(lambda *x: split_attention(*x, on=on, extra=[as_keys(sink)], mass=MASS, **options))
    out, lse, masses = call(*given)
    close(out, want[0])
    close(jnp.where(jnp.isneginf(lse), 0.0, lse), np.where(np.isneginf(want[1]), 0.0, want[1]))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
    for found, of_set in zip(masses, want[2], strict=False):
        for one, other in zip(found, of_set, strict=True):
            close(one, other)


def test_a_clipped_softmax_brings_all_keys_together(rng):
    q, q_pos, new, past, sink = drawn(rng)
    on, clip = OnMesh(as_mesh("seq=4"), Rules(tokens="seq", slots="seq")), (-0.1, 1.1)
    want = reference(q, [past, new, sink], q_pos, scale=0.3, clip=clip)
    given = jnp.asarray(q, jnp.float32), as_keys(new), [as_keys(past)], jnp.asarray(q_pos, jnp.int32)
    options = dict(on=on, extra=[as_keys(sink)], mass=MASS, clip=clip, scale=0.3)
    out, _, masses = jax.jit(lambda *x: split_attention(*x, **options))(*given)
    close(out, want[0])
    close(masses[1][0], want[2][1][0])


def test_the_way_is_the_one_of_the_fewest_bytes():
    """Two query heads to a list, two devices: keys and values are as large as queries and outputs of one."""
    few, many = TransferBytes(2, 100, 100, 100), TransferBytes(4, 50, 100, 100)
    assert few.of_new(64, None) == Way(GATHER) and many.of_new(64, None) == Way(KEYS, 3)
    # A window of 17 tokens reaches one device of 16 tokens back, 18 two.
    assert [many.of_new(64, w).hops for w in (1, 2, 17, 18, 64)] == [0, 1, 1, 2, 3]
    assert few.of_new(64, 1) == Way(KEYS, 0)
    # Devices help each other where there are more than two, blocks are large and no window ends the round.
    long = 4 * ways.HELP_FROM
    assert many.of_new(long, None) == Way(HELPED, 3) and many.of_new(long - 4, None) == Way(KEYS, 3)
    assert many.of_new(long, 9).kind == few._replace(asked=50).of_new(long, None).kind == KEYS
    long = few._replace(stored=201)
    assert long.of_past() == Way(QUERIES) and long._replace(stored=200).of_past() == Way(GATHER)
    assert many.of_past() == Way(KEYS, 3)
    assert ways.WHOLE not in {way.kind for way in (few.of_past(), many.of_past())}


@pytest.mark.rotating
@pytest.mark.parametrize("parts, way, most", [(4, KEYS, 4), (4, HELPED, 3), (8, KEYS, 8), (8, HELPED, 5)])
def test_devices_that_help_each_other_have_less_to_do(parts, way, most, rng, monkeypatch):
    """How often each device attends to the keys of one: its own, and those of the devices before it."""
    done, over = np.zeros(parts, int), split_tokens.attention_over

    def counted(*args, **options):
        def add(device):
            done[device] += 1

        jax.debug.callback(add, jax.lax.axis_index("seq"))
        return over(*args, **options)

    monkeypatch.setattr(split_tokens, "attention_over", counted)
    monkeypatch.setattr(TransferBytes, "of_new", lambda *_: Way(way, parts - 1))
    x, pos = jnp.asarray(rng.normal(size=(1, 2, T, H)), jnp.float32), jnp.arange(T)[None]
    on = OnMesh(as_mesh(f"seq={parts}"), Rules(tokens="seq"))
    jax.jit(lambda x: split_attention(x, Keys(x, x, pos[:, None]), (), pos, on=on, scale=1.0)[0])(x)
    jax.effects_barrier()
    assert done.sum() == parts * (parts + 1) // 2 and done.max() == most
