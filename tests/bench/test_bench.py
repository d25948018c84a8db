"""scripts/bench.py --accelerator: every row's code on tiny shapes, and what a kill leaves.

The numbers mean nothing here. That caches are made up as a prefill would leave them is checked against one.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.methods import takes_budget
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init, plan
from kvjax.state.cache import Paged, nbytes
from scripts.bench import made_up_cache, main
from scripts.bench.rows import Deadline, Rows

ROOT = Path(__file__).parents[2]
CONFIG = Config(vocab=64, d_model=64, layers=3, heads=4, kv_heads=2, head_dim=32, d_ff=64)
ROWS, TOKENS, ROOM = 2, 512, 64


def live_slots(cache):
    """Per group and segment, the live slots of every list, from fewest to most."""

    def of(segment):
        counts = segment.lengths if isinstance(segment, Paged) else (segment.pos >= 0).sum(-1)
        return np.sort(np.asarray(counts).reshape(-1))

    return [of(segment) for group in cache.groups for segment in group.parts]


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["full", "snapkv", "adakv", "kivi", "quest"])
def test_a_cache_is_made_up_as_a_prefill_leaves_it(name):
    method = kvjax.method(name, **({"budget": 0.5} if takes_budget(name) else {}))
    groups = plan(CONFIG, stacked=True)
    model = Model(CONFIG, init(CONFIG, jax.random.key(0), jnp.float32, groups))
    tokens = np.random.default_rng(0).integers(1, CONFIG.vocab, (ROWS, TOKENS))
    real = bare_cache(kvjax.prefill(model, tokens, method=method, room=ROOM)[1])
    run = steps.Run(CONFIG, method)
    like = made_up_cache.shapes(run, model.params, ROWS, TOKENS, ROOM)
    made = made_up_cache.made_up(like, run.groups(model.params), TOKENS, ROOM)
    assert jax.tree.structure(made) == jax.tree.structure(real) and nbytes(made) == nbytes(real)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(real), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
    segments = [s for group in real.groups for s in group.parts]
    for segment, got, want in zip(segments, live_slots(made), live_slots(real), strict=True):
        # Pools are dealt in whole pages: to the page the same in all, each list its own share.
        paged = isinstance(segment, Paged)
        assert abs(got.sum() - want.sum()) < 128 if paged else (got == want).all()
    run = steps.Run(CONFIG, method.decode_part())
    token, append = jnp.full((ROWS,), 3, jnp.int32), jnp.ones((ROWS,), bool)
    before = live_slots(made)[-1].sum()
    logits, new = steps.step_keeping(run, model.params, made, token, append)
    assert np.isfinite(np.asarray(logits)).all()
    assert live_slots(new)[-1].sum() == before + live_slots(new)[-1].size


def test_rows_outlive_a_kill(tmp_path, capsys):
    key = dict(part="attention", side="kvjax", name="int8", tokens=8, batch=1, device="x", smoke=True)
    rows = Rows(str(tmp_path / "rows.jsonl"))
    rows.add(**key, us=1.0)
    with rows.path.open("a") as f:
        f.write('{"part": "atten')
    again = Rows(str(rows.path))
    assert again.has(**key) and not again.has(**key | {"tokens": 16}) and len(again.rows) == 1
    again.add(**key | {"tokens": 16})
    assert [json.loads(line)["tokens"] for line in rows.path.read_text().splitlines()] == [8, 16]

    again.drop(device="x", smoke=False)
    assert len(Rows(str(rows.path)).rows) == 2
    again.drop(device="x", smoke=True)
    assert not rows.path.read_text() and not again.has(**key)

    done = []
    late = Deadline(time.time() + 5.0, first=10.0)
    late.run("first", lambda: done.append(1))
    soon = Deadline(time.time() + 5.0, first=0.0)
    soon.run("second", lambda: done.append(2))
    soon.run("third", lambda: done.append(1 // 0))
    assert done == [2] and late.left_out == ["first"] and soon.left_out == []
    assert "third failed: ZeroDivisionError" in capsys.readouterr().out


def bench(*arguments, cwd):
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "--accelerator", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=3600)


def test_without_an_accelerator_it_says_what_it_needs(tmp_path):
    done = bench(cwd=tmp_path)
    assert done.returncode and "jax sees only a CPU here: install jax[cuda13]" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--smoke", "--write", "--again"])
def test_an_option_of_the_accelerator_alone_is_refused_without_it(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", option])
    with pytest.raises(SystemExit):
        main.arguments()
    assert f"{option} was given without --accelerator: add that" in capsys.readouterr().err


@pytest.mark.slow
def test_every_row_is_measured_once(tmp_path):
    done = bench("--smoke", "--minutes", "60", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "smoke.jsonl").read_text().splitlines()]
    made = {(r["part"], r["side"], r["name"]) for r in rows}
    payloads = ["bfloat16", "int8", "int4"]
    assert {("attention", "kvjax", n) for n in payloads} | {("attention", "dense cache", "bfloat16")} <= made
    assert {("attention", side, "choice of pages") for side in ("kvjax", "plain jnp")} <= made
    assert {("decode", "kvjax", n) for n in ("none", "snapkv", "adakv", "kivi", "quest")} <= made
    assert all(r["error"] < 1e-2 for r in rows if r["part"] == "error")
    assert all(r["us"] > 0 and r["share"] > 0 for r in rows if r["part"] == "attention")
    assert all(r["tokens_per_s"] > 0 for r in rows if r["part"] == "decode")
    for word in ("| tokens | payload |", "| 128 | int4 |", "| 256 | 2 | KIVI, 2 bit |", "jax 0."):
        assert word in done.stdout
    again = bench("--smoke", cwd=tmp_path)
    assert again.returncode == 0 and (tmp_path / "smoke.jsonl").read_text().count("\n") == len(rows)


@pytest.mark.parity
@pytest.mark.slow
def test_kvpress_is_given_what_its_presses_leave():
    pytest.importorskip("kvpress")
    import torch

    from scripts.bench.decode import TINY, Kvpress

    side = Kvpress(TINY, 0.5, 2)
    tokens = torch.randint(1, TINY["vocab"], (2, TOKENS)).numpy()
    for name in ("none", "snapkv", "adakv"):
        real = side.theirs.prefill(name, tokens)
        layers = side.theirs.model.model.layers
        masked = [x.self_attn.masked_key_indices for x in layers]
        made = side.cache(name, TOKENS, 2)
        for got, want in zip(made.layers, real.layers, strict=True):
            assert got.keys.shape == want.keys.shape and got.values.dtype == want.values.dtype
        for layer, want in zip(layers, masked, strict=True):
            got = layer.self_attn.masked_key_indices
            assert (got is None) == (want is None)
            if want is not None:
                assert [x.shape for x in got] == [x.shape for x in want]
        assert side.measure(name, TOKENS, 2)["tokens_per_s"] > 0
