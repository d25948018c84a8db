"""The study of drafts: its page shows its data, and what it measures of a draft is what the model writes."""

import kvjax
from scripts.studies import drafts


def test_the_page_shows_the_data_of_all_drafts():
    assert set(drafts.DATA.read()["rows"]) == set(drafts.ROWS) and drafts.PAGE.agrees()


def test_a_draft_of_nearly_the_same_model_is_taken_and_needs_few_passes(monkeypatch):
    monkeypatch.setattr(drafts, "NEW", 12)
    model = kvjax.load("recall-tiny")
    tokens = [[1, 2, 3, 4] * 6]
    plain = drafts.written(model, tokens, None, None, None)
    out = drafts.written(model, tokens, "int8", None, None)
    assert plain["passes"] == 12 and plain["acceptance"] == 0 and plain["rate"] > 0
    # A pass takes up to DRAFTED tokens and adds one.
    assert out["acceptance"] > 0.9 and 12 / (drafts.DRAFTED + 1) <= out["passes"] <= 4 and out["rate"] > 0
