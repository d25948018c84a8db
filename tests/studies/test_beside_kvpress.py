"""The study beside kvpress: what its rows say of two runs, what it takes up again, what its page claims."""

import numpy as np
import pytest

from scripts.studies import beside_kvpress, beside_kvpress_table
from scripts.studies.kvpress_sides import Found, Ours, Prompt
from scripts.studies.presses import PRESSES
from scripts.studies.runner import Data

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
    [
        (0.0, "ties: swapped scores are equal"),
        (2e-7, "ties: swapped scores at most 2e-07 of their size apart"),
    ]
    + [(0.1, "unexplained"), (None, "unexplained")],
)
def test_a_cause_is_a_tie_only_where_scores_are_near(gap, cause):
    assert beside_kvpress_table.cause("snapkv", [{}, {"only": [1, 1], "score_gap": gap}]) == cause
    assert beside_kvpress_table.cause("snapkv", [{}]) == ""


class Fake(beside_kvpress.Study):
    """A study whose rows cost nothing."""

    settings, prompts = {"length": 8}, {"a": Prompt([1], [2]), "b": Prompt([1], [2])}

    def __init__(self, *_):
        self.made = []

    def row(self, press, context):
        self.made.append(f"{press} {context}")
        return {"kept": [1, 1], "score_gap": float(press == "knorm")}

    def double(self, press, context):
        self.made.append(f"{press} {context}")
        return {"heads": [1, 2]}


def test_a_run_makes_only_what_is_missing_and_checks_what_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(beside_kvpress, "machine", lambda: {"kvjax": "0", "cores": 1})
    study, data = Fake(), Data(tmp_path / "rows.json", beside_kvpress.EMPTY)
    beside_kvpress.run(study, data, ["none", "knorm"])
    data.change(lambda found: found["rows"].pop("knorm a"))
    beside_kvpress.run(study, data, ["none", "knorm"])
    assert study.made == ["none a", "none b", "knorm a", "knorm b", "knorm a"]
    held = data.read()
    assert set(held["rows"]) == set(study.made) and len(held["runs"]) == 1
    assert held["rows"]["none b"] == {"run": 0, "kept": [1, 1], "score_gap": 0.0}
    study.made.clear()
    for _ in range(2):
        beside_kvpress.check(study, data, ["none", "knorm"])
    assert sorted(study.made) == ["knorm a", "knorm b"]
    assert data.read()["rows"]["knorm b"]["double"] == {"heads": [1, 2]}


def test_data_of_other_settings_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    Data(out).write({"settings": {"length": 16}, "runs": [], "rows": {}})
    monkeypatch.setattr(beside_kvpress, "Study", Fake)
    monkeypatch.setattr("sys.argv", ["beside_kvpress", "run", "--out", str(out)])
    with pytest.raises(SystemExit, match="length': 16.*expected.*length': 8.*choose another with --out"):
        beside_kvpress.main()


def test_the_error_of_scores_is_that_of_slots_near_the_cut():
    single = found((0, 1), scores=[9, 1.001, 0.999, 0.5, 0, 0, 0, 0])
    double = found((0, 1), scores=[8, 1.000, 1.000, 0.9, 0, 0, 0, 0])
    assert beside_kvpress.score_error(single, double) == pytest.approx(1e-3, rel=1e-3)
    assert beside_kvpress.score_error(single, found((0, 1))) is None


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


def test_seconds_are_the_least_of_all_contexts(monkeypatch):
    rows = [
        {"read_s": [3.0, 2.0], "answer_s": [1.0, 2.0], "compile_s": 9.0},
        {"read_s": [30.0, 4.0], "answer_s": [0.5, 0.0], "compile_s": 0.0},
    ]
    monkeypatch.setattr(beside_kvpress_table, "rows_of", lambda name: rows if name == "snapkv" else [])
    (line,) = beside_kvpress_table.seconds_table().splitlines()[2:]
    # An answer that was not written has no seconds.
    assert line == "| `SnapKVPress` | 3.00 | 2.00 | 1.50 | 1.00 | 2.00 | 0.50 | 9 |"


def test_the_page_holds_fifteen_presses_of_which_thirteen_agree_and_none_is_unexplained():
    found_rows = {press: beside_kvpress_table.rows_of(press) for press in PRESSES}
    whole = found_rows.pop("non_causal_whole")
    assert len(found_rows) == 15 and all(found_rows.values())
    causes = {press: beside_kvpress_table.cause(press, rows) for press, rows in found_rows.items()}
    agree = [press for press, why in causes.items() if not why or why.startswith("ties")]
    assert len(agree) >= 13 and "unexplained" not in causes.values()
    assert not any("unexplained" in beside_kvpress_table.parting(rows) for rows in found_rows.values())
    # What shows the causes: an even number of tokens has one half, and whole chunks need no padding.
    assert all(("only" in row) == (row["tokens"] % 2 == 1) for row in found_rows["kvzip"])
    odd = [row for row in found_rows["kvzip"] if "only" in row]
    assert odd and all(row["only"][0] == 0 and row["score_gap"] <= 0 for row in odd)
    assert whole and beside_kvpress_table.cause("non_causal_whole", whole).partition(":")[0] in ("", "ties")
