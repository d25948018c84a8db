"""What a method scores and keeps, and its agreement with an oracle: against attention in float64 numpy."""

import matplotlib.image
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.report.scores_picture import scores_figure
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.pictures import draw_pictures
from kvjax.eval.run.runner import bare_method
from kvjax.eval.tasks.sample import ForcedSample
from tests.float64.reference import Prompt
from tests.methods.battery import MAIN, decoder, model, positions
from tests.sweep import sweep

PROMPT, AFTER = MAIN.first[1], MAIN.second[1]
T = len(PROMPT)


def attended(lists):
    """Per layer, the attention that AFTER pays to PROMPT [lists, T], summed over a list's queries."""
    whole = Prompt(decoder("4/2"), [*PROMPT, *AFTER])
    return [p[:, T:, :T].reshape(lists, -1, len(AFTER), T).sum((1, 2)) for p in whole.p]


@pytest.fixture(scope="module")
def found():
    """Two prompts of unequal length; the first is the one that is checked."""
    methods = {
        "snapkv": kvjax.method("snapkv", budget=0.5, window=4, variant="paper"),
        "adakv": kvjax.method("adakv", budget=0.5, window=4, page=4),
        "l2compress": kvjax.method("l2compress", budget=0.5, skip_layers=0),
    }
    prompts, after = [PROMPT, MAIN.first[3]], [AFTER, MAIN.second[3]]
    return {
        name: (method, kvjax.scores(model("4/2"), prompts, method, continuation=after))
        for name, method in methods.items()
    }


ASKED = [("snapkv", 4), ("adakv", 2), ("l2compress", 2)]


@pytest.mark.rotating
@pytest.mark.parametrize("name, lists", sweep(ASKED, ("snapkv", 4)))
def test_the_oracle_is_the_attention_of_the_continuation_over_everything(found, name, lists):
    for layer, want in enumerate(attended(lists)):
        np.testing.assert_allclose(found[name][1].oracle[layer][0], want, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name, lists", sweep([("snapkv", 4), ("adakv", 2), ("l2compress", 2)], ("snapkv", 4))
)
def test_agreement_is_counted_on_what_the_cache_holds(found, name, lists):
    method, mine = found[name]
    _, cache = kvjax.prefill(model("4/2"), [PROMPT], method=method, room=1)
    for layer, (held, paid) in enumerate(zip(positions(cache), attended(lists), strict=True)):
        for head, tokens in enumerate(held[0]):
            assert set(np.flatnonzero(mine.kept[layer][0, head]).tolist()) == tokens
            best = set(np.argsort(-paid[head], kind="stable")[: len(tokens)].tolist())
            assert mine.overlap[layer][0, head] == pytest.approx(len(best & tokens) / len(tokens))
            share = paid[head][sorted(tokens)].sum() / paid[head].sum()
            assert mine.mass[layer][0, head] == pytest.approx(share, abs=1e-5)


@pytest.mark.rotating
def test_a_comparison_draws_each_method_once_as_its_protocol_asks():
    m, h2o = model("4/2"), kvjax.method("h2o", budget=0.5)
    entries = [
        PlannedCell("full", None, kvjax.method("full")),
        PlannedCell("h2o", 0.5, h2o),
        PlannedCell("h2o", 0.25, h2o),
    ]
    sample = ForcedSample("0", "get", (*PROMPT[:20],), (*PROMPT[20:],), (*AFTER,), ())
    (picture,) = draw_pictures(m, entries, "aware", sample)
    want = kvjax.scores(m, [PROMPT], bare_method(h2o, len(sample.question)), continuation=[AFTER])
    assert picture.name == "h2o · 0.5" and picture.png[1:4] == b"PNG"
    assert picture.overlap == pytest.approx(np.mean(want.overlap))
    assert picture.mass == pytest.approx(np.mean(want.mass))


def test_scores_are_the_methods_own_and_choose_what_is_kept(found):
    keys = Prompt(decoder("4/2"), PROMPT).k
    for layer, scores in enumerate(found["l2compress"][1].scores):
        np.testing.assert_allclose(scores[0, :, :T], -np.linalg.norm(keys[layer], axis=-1), rtol=1e-4)
        assert (scores[1, :, len(MAIN.first[3]) :] == -np.inf).all()
    mine = found["snapkv"][1]
    for scores, kept in zip(mine.scores, mine.kept, strict=True):
        assert (scores[0, :, T - 4 : T] == np.inf).all()
        chosen, left = np.where(kept[0], scores[0], np.inf), np.where(kept[0], -np.inf, scores[0])
        assert (chosen.min(-1) >= left.max(-1)).all()


@pytest.mark.rotating
def test_a_method_that_drops_nothing_agrees_and_without_a_continuation_the_model_writes_one():
    mine = kvjax.scores(model("4/2"), [PROMPT], "full")
    assert mine.scores == [None, None] and all((x == 1).all() for x in (*mine.mass, *mine.overlap))
    out = kvjax.generate(model("4/2"), [PROMPT], max_new_tokens=16)
    same = kvjax.scores(model("4/2"), [PROMPT], "full", continuation=np.asarray(out.tokens))
    np.testing.assert_array_equal(mine.oracle[0], same.oracle[0])


def test_the_picture_shows_the_numbers(found, tmp_path):
    mine = found["snapkv"][1]
    overlap, mass, attention, kept, _ = scores_figure(mine).get_axes()
    for axis, want in ((overlap, mine.overlap), (mass, mine.mass)):
        np.testing.assert_allclose(axis.images[0].get_array(), 100 * np.stack([x[0] for x in want]))
        assert [t.get_text() for t in axis.texts] == [f"{100 * x:.0f}" for layer in want for x in layer[0]]
    np.testing.assert_array_equal(
        kept.images[0].get_array(), np.concatenate([x[0, :, :T] for x in mine.kept])
    )
    assert attention.images[0].get_array().shape == (8, T)
    kvjax.draw_scores(tmp_path / "scores.png", mine, row=1)
    assert matplotlib.image.imread(tmp_path / "scores.png").shape[1] == 11 * 160


@pytest.mark.rotating
def test_what_cannot_be_looked_at_says_why(found):
    with pytest.raises(InputError, match="1 continuations were given for 2 prompts"):
        kvjax.scores(model("4/2"), MAIN.first[:2], "full", continuation=[[1]])
    with pytest.raises(InputError, match="row is 2, expected one of the 2 prompts: 0 to 1"):
        kvjax.draw_scores("x.png", found["snapkv"][1], row=2)


@pytest.mark.rotating
def test_a_picture_that_cannot_be_written_is_said_in_one_sentence(found, tmp_path):
    with pytest.raises(InputError, match="x.png cannot be written .* expected a file in a writable folder"):
        kvjax.draw_scores(tmp_path / "no" / "x.png", found["snapkv"][1])
