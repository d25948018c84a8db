"""The study of what reads pick: its figures where they are known by hand, and its page."""

import math

import jax.numpy as jnp
import numpy as np

import kvjax
from scripts.studies import recall


def test_figures_of_picks_are_those_of_a_sort():
    rng = np.random.default_rng(0)
    p, live, read = rng.random((6, 40)), rng.random((6, 40)) < 0.8, rng.random((6, 40)) < 0.3
    read &= live
    read[5] = False
    share, found, held = (np.asarray(x) for x in recall.judged(*map(jnp.asarray, (p, live, read))))
    for row in range(6):
        many = int(read[row].sum())
        assert math.isclose(share[row], many / live[row].sum(), rel_tol=1e-6)
        if not many:
            assert np.isnan(found[row]) and np.isnan(held[row])
            continue
        order = sorted(np.flatnonzero(live[row]), key=lambda s: -p[row, s])[:many]
        assert math.isclose(found[row], len(set(order) & set(np.flatnonzero(read[row]))) / many, rel_tol=1e-6)
        assert math.isclose(held[row], p[row, read[row]].sum() / p[row, order].sum(), rel_tol=1e-5)


def test_reads_of_everything_find_everything_and_exact_ranks_beat_bounds_of_pages():
    model, ids = kvjax.load("recall-tiny"), np.random.default_rng(1).integers(5, 60, 100).tolist()

    def found(text):
        return recall.said(model, ids, kvjax.method(text), after=3)[1]

    for x in found("quest(budget=1.0, page=8, skip_layers=1)"):
        assert x.layer > 0 and x.recall == x.held == x.pages == 1.0 and x.error < 1e-4
    quest, exact = (found(text) for text in ("quest(budget=16, page=8, skip_layers=0)", "kcache(budget=16)"))
    assert all(x.error > 1e-4 and x.read < 0.3 for x in quest)
    recalls = [np.mean([x.recall for x in seen]) for seen in (quest, exact)]
    assert recalls[0] < recalls[1] and recalls[1] > 0.9
    assert all(x.pages == x.recall for x in exact) and any(x.pages != x.recall for x in quest)
    assert np.mean([x.held for x in quest]) < np.mean([x.held for x in exact]) <= 1.0


def test_the_page_shows_its_data():
    rows = recall.DATA.read()["rows"]
    assert set(rows) == set(recall.ROWS) and recall.PAGE.agrees()
    for row in rows.values():
        assert all(math.isfinite(x) for layer in row["layers"].values() for x in layer)
        assert math.isclose(np.mean([x[0] for x in row["layers"].values()]), row["recall"], abs_tol=2e-3)


def test_a_row_is_measured_over_all_slots_wherever_its_method_puts_them():
    assert kvjax.method(recall.sentence("infllm")).host is not None
    assert recall.method_of(kvjax.load("recall-tiny"), "infllm").host is None
    assert recall.sentence("sentencekv") == "sentencekv(budget=1.0, read=0.1, sinks=4)"
