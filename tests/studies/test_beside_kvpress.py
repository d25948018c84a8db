"""The study beside kvpress: what its rows say of two runs, what it takes up again, what its page claims."""

import json

import numpy as np
import pytest

from scripts.studies import beside_kvpress, beside_kvpress_table
from scripts.studies.kvpress_sides import Found, Ours, Prompt
from scripts.studies.presses import PRESSES

T = 8


def kept(*slots: int) -> np.ndarray:
    """One layer of one KV head that keeps these."""
    return np.isin(np.arange(T), slots)[None, None]


def found(slots, answer=(1, 2), scores=None, **more) -> Found:
    row = None if scores is None else np.asarray(scores, np.float32)[None, None]
    return Found(kept(*slots), 1.0, list(answer), 2.0, row, gaps=(0.5, 5e-5), **more)


def test_a_row_of_equal_runs_names_no_difference():
    row = beside_kvpress.compared(found((0, 1)), found((0, 1)), "head")
    assert row["heads"] == [1, 1] and row["kept"] == [2, 2] and row["least_logit_gap"] == 5e-5
    assert not {"only", "score_gap", "parts_at", "error"} & set(row)


def test_swapped_slots_are_measured_by_how_far_their_scores_lie_apart():
    scores = [9, 8, 4, 3, 0, 0, 0, 0]
    row = beside_kvpress.compared(found((0, 1, 2), scores=scores), found((0, 1, 3)), "head")
    assert row["heads"] == [0, 1] and row["only"] == [1, 1] and row["score_gap"] == pytest.approx(1 / 4)
    # A smaller budget keeps fewer of the best: no slot outscores one that stays.
    row = beside_kvpress.compared(found((0, 1, 2), scores=scores), found((0, 1)), "head")
    assert row["only"] == [0, 1] and row["score_gap"] < 0.0 + 1e-9
    row = beside_kvpress.compared(found((0, 1)), found((0, 1, 2)), "head")
    assert row["score_gap"] is None


def test_answers_part_at_their_first_other_token_by_the_gap_of_its_logits():
    row = beside_kvpress.compared(found((0,)), found((0,), answer=(1, 3)), "head")
    assert row["parts_at"] == 1 and row["logit_gap"] == 5e-5
    assert beside_kvpress_table.parting([row]) == "1 by a tie of logits"
    broken = found((0,))._replace(answer=None, error="ValueError: no key")
    row = beside_kvpress.compared(broken, found((0,)), "head")
    assert row["error"] == "ValueError: no key" and beside_kvpress_table.equal_answers([row]) == 0
    assert "1 that kvpress cannot write (ValueError)" in beside_kvpress_table.parting([row])


@pytest.mark.parametrize(
    ("gap", "cause"),
    [(0.0, "equal scores"), (2e-7, "float order: swapped scores are 2e-07 of their size apart")]
    + [(0.1, "unexplained"), (None, "unexplained")],
)
def test_a_cause_is_a_tie_only_where_scores_are_near(gap, cause):
    assert beside_kvpress_table.cause("snapkv", [{}, {"only": [1, 1], "score_gap": gap}]) == cause
    assert beside_kvpress_table.cause("snapkv", [{}]) == ""


def test_a_run_makes_only_what_is_missing_and_refuses_data_of_other_settings(tmp_path, monkeypatch):
    made = []

    class Fake:
        settings, prompts = {"length": 8}, {"a": Prompt([1], [2]), "b": Prompt([1], [2])}

        def __init__(self, *_):
            pass

        def row(self, press, context):
            made.append(f"{press} {context}")
            return {"kept": [1, 1]}

    monkeypatch.setattr(beside_kvpress, "Study", Fake)
    out = tmp_path / "rows.json"
    arguments = (out, "model", ["none", "knorm"], 2, 8, 0)
    beside_kvpress.run(*arguments)
    kept_rows = json.loads(out.read_text())
    del kept_rows["rows"]["knorm a"]
    out.write_text(json.dumps(kept_rows))
    beside_kvpress.run(*arguments)
    assert made == ["none a", "none b", "knorm a", "knorm b", "knorm a"]
    again = json.loads(out.read_text())
    assert set(again["rows"]) == set(made) and len(again["runs"]) == 1
    assert again["rows"]["knorm b"] == {"run": 0, "kept": [1, 1]}
    monkeypatch.setattr(Fake, "settings", {"length": 16})
    with pytest.raises(SystemExit, match="choose another file with --out"):
        beside_kvpress.run(*arguments)


def test_an_unknown_press_is_refused_with_the_known_ones(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["beside_kvpress", "run", "--presses", "snap"])
    with pytest.raises(SystemExit):
        beside_kvpress.main()
    assert "--presses snap: expected some of none, knorm" in capsys.readouterr().err


def test_our_side_keeps_the_budget_pads_nothing_in_and_counts_compiling_apart():
    import kvjax

    model = kvjax.load("recall-tiny", dtype="float32")
    ours = Ours(model, (32, 16), ())
    prompt = Prompt(list(range(3, 23)), [5, 6, 7])
    press = PRESSES["snapkv"]._replace(hyper={"variant": "kvpress", "window": 4})
    first, again = (ours.run(press, prompt, 0.5, 3) for _ in range(2))
    assert first.kept.shape[-1] == 20 and (first.kept.sum(-1) == 10).all() and first.kept[..., -4:].all()
    assert first.answer is not None and len(first.answer) == 3 and first.answer == again.answer
    assert first.compile_s > 10 * again.read_s and again.compile_s == 0
    # As a conversation whose question leaves nothing out.
    _, cache = kvjax.prefill(model, [prompt.context], method=press.ours(0.5), room=32)
    logits, cache = kvjax.prefill(model, [prompt.question], cache=cache, compress=False, room=16)
    assert int(np.asarray(logits)[0].argmax()) == first.answer[0]
