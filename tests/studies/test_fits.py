"""The study of fits: pages show its data, fits take minutes at most, and what it measures is so."""

import numpy as np
import pytest
import scipy.special

import kvjax
from kvjax.grammar.fitted import as_fitted
from scripts.fixtures import fits as shipped
from scripts.studies import codes, fits
from scripts.studies.runner import Data
from tests.studies.test_codes import small  # noqa: F401


def test_the_page_shows_the_data():
    assert fits.PAGE.agrees()


def test_every_fit_with_gradients_through_codes_takes_less_than_five_minutes_on_the_shipped_model():
    rows = fits.DATA.read()["rows"][shipped.MODEL]
    assert {*fits.GRADIENTS} <= {*rows}
    assert max(row["seconds"] for row in rows.values()) < 300


def test_a_run_adds_a_row_of_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(fits, "DATA", Data(tmp_path / "fits.json", fits.DATA.empty, depth=3))
    monkeypatch.setattr(fits, "_tasks", lambda model, name, rows: [[*range(3, 67)]] * 2)
    fits.run(kvjax.load("recall-tiny"), ["qserve"])
    row = fits.DATA.read()["rows"]["recall-tiny"]["qserve"]
    assert row["texts"] == 2 and row["seconds"] >= 0


def test_kl_of_what_is_fitted_is_that_of_a_prefill_by_the_method(small):  # noqa: F811
    read, fitted = codes.reading(small), as_fitted("recall-tiny/eigen-attention")
    found = fits.measured("eigen-attention", read, fitted)
    ids = codes.window(small)
    method = kvjax.method("eigen-attention", fitted=fitted)
    _, cache = kvjax.prefill(small, [ids[:64]], room=16, method=method)
    q = scipy.special.log_softmax(np.asarray(kvjax.verify(small, cache, [ids[64:80]])[0][0], np.float64), -1)
    p = np.asarray(read.logp, np.float64)
    assert found["kl"] > 0 and found == {
        "kl": pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3, abs=1e-5)
    }
