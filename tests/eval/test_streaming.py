"""The likelihood of a text: the full cache's is the model's own; every method is measured as it decodes."""

import dataclasses
import functools
import json
from io import StringIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from scipy.special import rel_entr

import kvjax
from kvjax import pure
from kvjax.base.errors import InputError
from kvjax.eval.report import distances
from kvjax.eval.report.export import text_records
from kvjax.eval.report.text_page import text_html
from kvjax.eval.run import perplexity as streaming
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.perplexity import compare_text, divergence, print_stream, read_windows, stream_text
from kvjax.eval.tasks import recall
from kvjax.grammar import Method
from kvjax.io.load import load
from kvjax.keep.patterns import Recent
from tests.eval.test_words import CORPUS, TOKENIZERS, hf_folder

# One process makes the run that all tests look at.
pytestmark = pytest.mark.xdist_group("streaming")
LENGTH, STEPS, WINDOWS = 32, 12, 3
SIZES = {"length": LENGTH, "steps": STEPS, "windows": WINDOWS, "seed": 1}


def write_recall_text(path, contexts: int = 3):
    """Return a text in the shipped model's own words, one context per line."""
    made = (recall.make_context(np.random.default_rng(i), 200) for i in range(contexts))
    path.write_text("\n".join(" ".join(recall.WORDS[t] for t in c.tokens) for c in made))
    return path


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    order = np.random.default_rng(0).permutation(CORPUS * 6)
    path.write_text("\n".join(order))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = hf_folder(tmp_path_factory.mktemp("hf") / "model", TOKENIZERS["byte level"], layers=1)
    return load(folder, progress=False)


def entry(id: str, budget=None, **hyper) -> PlannedCell:
    return PlannedCell(
        id, budget, kvjax.method(id, **({} if budget is None else {"budget": budget}), **hyper)
    )


FULL, HALF = PlannedCell("full", None, Method()), entry("snapkv", 0.5, window=4, kernel=3)
SAME = entry("adakv", 1.0, window=4, kernel=3, page=8)
H2O, INT8 = entry("h2o", 0.5), entry("int8")


@pytest.fixture(scope="module")
def two_rows(model, book):
    return {(r["method"], r["budget"]): r for r in stream_text(model, [FULL, HALF], book, **SIZES)}


@pytest.fixture(scope="module")
def rows(model, book):
    found = stream_text(model, [FULL, HALF, SAME, H2O, INT8], book, **SIZES)
    return {(r["method"], r["budget"]): r for r in found}


# --- what is measured ------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_the_full_caches_likelihood_is_the_models_own(model, book, rows):
    tokens = read_windows(model, book, **SIZES).tokens
    behind = log_softmax(model(tokens))[:, LENGTH:-1]
    expected = -np.take_along_axis(behind, tokens[:, LENGTH + 1 :, None], 2).mean()
    assert rows["full", None]["nll"] == pytest.approx(expected, abs=1e-5)
    full = rows["full", None]
    assert full["kl"] == 0.0 and full["top1"] == 1.0 and full["delta_nll"] == 0.0
    assert full["tokens"] == WINDOWS * STEPS and full["kept_bytes"] == full["full_bytes"]


@pytest.mark.rotating
def test_a_method_that_keeps_everything_changes_nothing(rows):
    row = rows[SAME.label, 1.0]
    assert row["kl"] < 1e-9 and row["top1"] == 1.0 and abs(row["delta_nll"]) < 1e-6


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def walk(model, tokens, method):
    """Logits [W, F, V] after every token of a window, by the public calls."""
    prompt, behind = tokens[:, :LENGTH], tokens[:, LENGTH:-1]
    _, cache = kvjax.prefill(model, prompt, method=method.protecting(Recent(1)), room=STEPS)
    out = []
    for token in behind.T:
        logits, cache = kvjax.step(model, cache, token)
        out.append(np.asarray(logits, np.float64))
    return np.stack(out, 1)


@pytest.mark.rotating
@pytest.mark.parametrize("one", [HALF, H2O, INT8], ids=lambda e: e.label)
def test_a_method_is_measured_as_it_decodes(model, book, rows, one):
    tokens = read_windows(model, book, **SIZES).tokens
    here, full = (walk(model, tokens, m) for m in (one.method, Method()))
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (full, here))
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    row = rows[one.label, one.budget]
    nll = -np.log(np.take_along_axis(q, tokens[:, LENGTH + 1 :, None], 2)).mean()
    assert row["nll"] == pytest.approx(nll, abs=1e-5)
    assert row["kl"] == pytest.approx(rel_entr(p, q).sum(-1).mean(), rel=1e-3, abs=1e-9)
    assert row["top1"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert row["kl"] > 1e-9 and row["kept_bytes"] <= row["full_bytes"]


def test_distances_count_the_tokens_since_the_compression(model, book, two_rows, monkeypatch):
    """Pieces of 4 and 8 tokens, against logits of the public calls."""
    monkeypatch.setattr(distances, "FIRST", 4)
    (row,) = stream_text(model, [HALF], book, **SIZES)
    tokens = read_windows(model, book, **SIZES).tokens
    here, full = (log_softmax(walk(model, tokens, m)) for m in (HALF.method, Method()))
    kl = rel_entr(np.exp(full), np.exp(here)).sum(-1)
    lost = [-np.take_along_axis(x, tokens[:, LENGTH + 1 :, None], 2)[..., 0] for x in (here, full)]
    same = here.argmax(-1) == full.argmax(-1)
    for one, piece in zip(row["distances"], (slice(0, 4), slice(4, 8), slice(8, 12)), strict=True):
        assert (one["first"], one["last"]) == (piece.start + 1, piece.stop)
        assert one["kl"] == pytest.approx(kl[:, piece].mean(), rel=1e-3, abs=1e-9)
        assert one["delta_nll"] == pytest.approx((lost[0] - lost[1])[:, piece].mean(), abs=1e-5)
        assert one["top1"] == pytest.approx(same[:, piece].mean())
        windows = kl[:, piece].mean(1)
        assert windows.min() * 0.999 <= one["kl_low"] <= one["kl"] <= one["kl_high"] <= windows.max() * 1.001
    assert row["kl"] == pytest.approx(np.mean([one["kl"] for one in row["distances"]]), rel=1e-5)
    assert row["kl"] == pytest.approx(two_rows["snapkv", 0.5]["kl"], rel=1e-5)


@pytest.mark.rotating
def test_the_report_draws_and_exports_distances(rows):
    found = list(rows.values())
    page = text_html({"model": "tiny"}, found)
    assert "By the distance from the compression" in page and "<th>1–12</th>" in page
    assert page.count('<tr><td class="text">') == len(found) - 1  # without the full cache
    records = {(one["method"], one["budget"]): one for one in text_records(found)}
    [piece] = rows["h2o", 0.5]["distances"]
    assert records["h2o", 0.5]["kl_1_12"] == piece["kl"] and "distances" not in records["h2o", 0.5]
    old = [{name: x for name, x in row.items() if name != "distances"} for row in found]
    assert "By the distance" not in text_html({"model": "tiny"}, old)
    assert "kl_1_12" not in text_records(old)[1]


@pytest.mark.rotating
def test_methods_that_rewrite_weights_are_measured_on_the_model_that_they_make(model, book):
    parts = (HALF, entry("kvzip", 0.5, page=8), INT8)
    made = [kvjax.chain(kvjax.method("palu", rank=0.5), one.method) for one in parts]
    bound = [pure.bind(m, kvjax.prepare(model, m)) for m in made]
    rows = stream_text(model, [PlannedCell(m.id, None, m) for m in bound], book, **SIZES)
    tokens = read_windows(model, book, **SIZES).tokens
    for method, row in zip(made, rows, strict=True):
        nll = -np.take_along_axis(
            log_softmax(walk(model, tokens, method)), tokens[:, LENGTH + 1 :, None], 2
        ).mean()
        assert row["nll"] == pytest.approx(nll, abs=1e-5) and row["kept_bytes"] < row["full_bytes"] / 2


@pytest.mark.rotating
def test_compressing_again_after_every_chunk_is_what_prefill_does(model, book):
    (row,) = stream_text(model, [HALF], book, **SIZES, chunk=6)
    tokens, nll = read_windows(model, book, **SIZES).tokens, []
    _, cache = kvjax.prefill(model, tokens[:, :LENGTH], method=HALF.method.protecting(Recent(1)), room=STEPS)
    for start in range(LENGTH, LENGTH + STEPS, 6):
        state = jax.tree.map(jnp.copy, cache)
        for i in range(start, start + 6):
            logits, state = kvjax.step(model, state, tokens[:, i])
            nll.append(-np.take_along_axis(log_softmax(logits), tokens[:, i + 1, None], 1))
        _, cache = kvjax.prefill(model, tokens[:, start : start + 6], cache=cache, room=STEPS)
    assert row["nll"] == pytest.approx(np.mean(nll), abs=1e-5)
    with pytest.raises(InputError, match="chunk must be"):
        stream_text(model, [HALF], book, **SIZES, chunk=0)


def test_divergence_is_kl_near_and_far(rng):
    logits = rng.normal(size=(4, 50)) * 8
    for scale in (0.0, 1e-3, 1.0, 30.0):
        other = logits + scale * rng.normal(size=logits.shape)
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, other))
        found = divergence(*(jnp.asarray(np.log(x), jnp.float32) for x in (p, q)))
        np.testing.assert_allclose(found, rel_entr(p, q).sum(-1), rtol=2e-3, atol=1e-12)
        assert (np.asarray(found) >= 0).all()


@pytest.mark.rotating
def test_batches_of_windows_give_what_one_batch_gives(model, book, rows, monkeypatch):
    monkeypatch.setattr(streaming, "BATCH_ROWS", 2)
    (half,) = stream_text(model, [HALF], book, **SIZES)
    assert half["nll"] == pytest.approx(rows["snapkv", 0.5]["nll"], abs=1e-6)
    assert half["kl"] == pytest.approx(rows["snapkv", 0.5]["kl"], rel=1e-4) and half["windows"] == WINDOWS


# --- windows ---------------------------------------------------------------------------------------------


def test_windows_are_disjoint_pieces_behind_bos(model, book):
    text = model.tokenizer.encode(book.read_text()).ids[1:]
    found = read_windows(model, book, **SIZES)
    span = LENGTH + STEPS + 1
    assert found.tokens.shape == (WINDOWS, span) and (found.tokens[:, 0] == 0).all()
    for start, tokens in zip(found.starts, found.tokens, strict=True):
        assert tokens[1:].tolist() == text[start : start + span - 1]
    assert (np.diff(found.starts) >= span - 1).all()
    again = read_windows(model, book, **SIZES)
    other = read_windows(model, book, **{**SIZES, "seed": 2})
    assert (again.starts == found.starts).all() and (other.starts != found.starts).any()


def test_a_short_text_gives_fewer_windows(model, book, tmp_path):
    (tmp_path / "short.txt").write_text(book.read_text()[:700])
    found = read_windows(model, tmp_path / "short.txt", **{**SIZES, "windows": 50})
    assert 1 <= len(found.starts) < 50


def test_texts_that_cannot_be_used_are_refused(model, book, tmp_path):
    (tmp_path / "tiny.txt").write_text("The code.")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    cases = [
        (tmp_path / "none.txt", {}, "cannot be read"),
        (tmp_path / "bytes.txt", {}, "cannot be read"),
        (tmp_path / "tiny.txt", {}, "tokens, expected at least 44"),
        (book, {"length": 1020}, "expected at most 1011"),
    ]
    for path, change, message in cases:
        with pytest.raises(InputError, match=message):
            read_windows(model, path, **{**SIZES, **change})
    with pytest.raises(InputError, match="no tokenizer"):
        read_windows(dataclasses.replace(model, tokenizer=None), book, **SIZES)


def test_the_shipped_model_reads_words_of_its_language(tmp_path):
    shipped = load("recall-tiny")
    path = write_recall_text(tmp_path / "text.txt")
    found = read_windows(shipped, path, **SIZES)
    words = path.read_text().split()
    for start, tokens in zip(found.starts, found.tokens, strict=True):
        assert [recall.WORDS[t] for t in tokens] == words[start : start + len(tokens)]
    path.write_text(path.read_text() + " unheard")
    with pytest.raises(InputError, match="knows no word 'unheard'"):
        read_windows(shipped, path, **SIZES)


# --- runs ------------------------------------------------------------------------------------------------


@pytest.fixture
def short_steps(monkeypatch):
    monkeypatch.setattr(streaming, "STEPS", STEPS)
    original = stream_text
    monkeypatch.setattr(streaming, "stream_text", lambda *a, **k: original(*a, steps=STEPS, **k))


@pytest.mark.rotating
def test_a_killed_run_goes_on_where_it_stopped(model, book, tmp_path, monkeypatch, short_steps):
    options = {"length": LENGTH, "windows": WINDOWS, "seed": 1}
    entries, out = [FULL, INT8, HALF], StringIO()
    console = Console(file=out, width=100)
    whole = compare_text(model, entries, book, folder=tmp_path / "whole", console=console, **options)
    assert "snapkv" in out.getvalue() and "nats" in out.getvalue()

    done, original = [], streaming.UnitLog.add

    def add(self, key, unit, until=1):
        if len(done) == until:
            raise KeyboardInterrupt
        done.append(key)
        original(self, key, unit)

    monkeypatch.setattr(streaming.UnitLog, "add", add)
    with pytest.raises(KeyboardInterrupt):
        compare_text(model, entries, book, folder=tmp_path / "cut", console=console, **options)
    monkeypatch.setattr(streaming.UnitLog, "add", functools.partialmethod(add, until=None))
    units = (tmp_path / "cut" / "units.jsonl").read_text().splitlines()
    assert len(units) == 1
    resumed = compare_text(
        model, entries, book, folder=tmp_path / "cut", resume=True, console=console, **options
    )
    assert resumed == whole
    assert len(done) == len(set(done)) == len(entries), "what was done is not done again"
    assert (tmp_path / "cut" / "units.jsonl").read_text().startswith(units[0])

    lines = [json.loads(x) for x in (tmp_path / "cut" / "results.jsonl").read_text().splitlines()]
    assert len(lines) == len(entries) * WINDOWS and len({(r["id"], r["method"]) for r in lines}) == len(lines)
    metrics = json.loads((tmp_path / "cut" / "metrics.json").read_text())
    assert metrics["text"] == whole and metrics["settings"]["length"] == LENGTH
    with pytest.raises(InputError, match="seed differ"):
        compare_text(model, entries, book, folder=tmp_path / "cut", resume=True, **{**options, "seed": 2})


def test_a_text_that_is_refused_leaves_no_folder(model, tmp_path):
    with pytest.raises(InputError):
        compare_text(model, [FULL], tmp_path / "none.txt", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_table_shows_every_row_in_80_columns(two_rows):
    """Methods whose numbers are those of others have rows of their own."""
    wanted = two_rows | {
        (one.label, None): two_rows["full", None] | {"method": one.label} for one in (SAME, H2O)
    }
    out = StringIO()
    print_stream(list(wanted.values()), Console(file=out, width=80))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert len([x for x in lines if any(x.startswith(f"{label} ") for label, _ in wanted)]) == len(wanted)
    assert "…" not in out.getvalue() and f"{WINDOWS * STEPS} tokens after {WINDOWS}" in lines[0]


def test_a_byte_order_mark_is_no_text(model, book, tmp_path):
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + Path(book).read_bytes())
    plain, same = (read_windows(model, path, **SIZES).tokens for path in (book, marked))
    assert np.array_equal(plain, same)
