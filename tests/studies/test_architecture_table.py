"""The table of architectures: its rows, its table, and that what it times is a cache after a prompt."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

import kvjax
from kvjax.api.block_transformer import BlockConfig, BlockTransformer, init, prefill
from kvjax.io.gin_bindings import training_files
from kvjax.models.config import Config
from kvjax.state.cache import nbytes
from scripts.studies import architecture_measures as am
from scripts.studies import architecture_picture as ap
from scripts.studies import architecture_table as at
from tests.models.conversation import TEXTS, model
from tests.sweep import sweep


def result(bits):
    some = {str(n): n for n in (1024, 8192, 65536)}
    return {
        "name": "X", "bits_per_byte": bits, "parameters": 1000, "tokens": 4096,
        "recall_bits": [bits, bits / 2],
        "state_bytes": some, "decode_tokens_per_second": some, "training_tokens_per_second": 2000,
    }  # fmt: skip


def test_the_table_has_every_row_that_is_there_and_marks_the_best(tmp_path):
    text = at.table({"rows": {"gqa": result(2.5), "mha": result(2.25)}})
    lines = [line for line in text.splitlines() if line.startswith("| X")]
    assert ["**2.250**" in line for line in lines] == [True, False]  # in the order of ROWS, not of the data
    assert "Trained on 4,096 bytes" in text and "| 2.250 / 1.125 |" in lines[0]
    assert "No row is measured yet" in at.table({"rows": {}})
    at.draw({"rows": {"gqa": result(2.5)}}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"
    # A row whose file is not there yet is left out when they are trained.
    assert {row.gin for row in at.ROWS.values()} - set(training_files()) <= {"bytes-lckv"}


def test_names_of_dots_that_lie_close_touch_neither_each_other_nor_other_dots():
    axes = Figure(figsize=(7.5, 5.0)).subplots()
    axes.set(xlim=(0, 100), ylim=(0, 100))
    dots = {"MixAttention": (50, 50), "YOCO": (50.2, 50.5), "MQA": (50, 50), "alone": (10, 90)}
    texts = ap.write_names(axes, dots)
    boxes = [text.get_window_extent() for text in texts]
    assert [text.get_text() for text in texts] == list(dots)
    for i, (box, own) in enumerate(zip(boxes, dots.values(), strict=True)):
        assert box.count_overlaps([other for j, other in enumerate(boxes) if j != i]) == 0
        others = [axes.transData.transform(dot) for dot in dots.values() if dot != own]
        assert not any(box.contains(*at) for at in others)
    assert (boxes[3].x0, boxes[3].y0) > tuple(
        axes.transData.transform((10, 90))
    )  # to the right, a little higher


def test_what_is_not_measured_is_an_empty_cell():
    row = result(2.25)
    for name in ("decode_tokens_per_second", "training_tokens_per_second"):
        del row[name]
    line = next(x for x in at.table({"rows": {"mha": row}}).splitlines() if x.startswith("| X"))
    assert line.endswith("|  |  |  |  |") and "| 2.250 / 1.125 |  | 1,024 |" in line
    text = at.table({"rows": {"mha": row | {"answered": {"4": 0.5, "8": 0.25, "16": 0.125}}}})
    assert "| 2.250 / 1.125 | 50% / 25% / 12% | 1,024 |" in text and "recall of 4 / 8 / 16 pairs" in text


def test_a_row_that_read_fewer_bytes_is_marked_and_not_in_the_picture(tmp_path, monkeypatch):
    rows = {id: result(2.0) | {"name": id.upper(), "tokens": n} for id, n in (("mha", 900), ("gqa", 400))}
    text = at.table({"rows": rows})
    assert "| MHA |" in text and "| GQA* |" in text and "Trained on 900 bytes of text, with * on 400." in text
    drawn = []
    monkeypatch.setattr(ap, "write_names", lambda axes, dots: drawn.extend(dots))
    ap.draw({"rows": rows}, tmp_path / "picture.png")
    assert drawn == ["MHA"]


def test_speed_is_that_of_a_core_and_its_compiling_no_part_of_it():
    log = [{"tokens": n * 100, "cpu_seconds": s} for n, s in ((1, 90.0), (2, 92.0), (3, 94.0), (4, 99.0))]
    assert at.speed_of(log) == 50


def test_a_measure_is_added_to_what_a_row_has_and_depends_on_its_own_settings(tmp_path, monkeypatch):
    asked, data = [], tmp_path / "data.json"

    def apart(id, place, args):
        asked.append((args.what, id))
        return {"train": result(3.0), "recall": {"answered": {"4": 0.25}}}[args.what]

    monkeypatch.setattr(at, "_apart", apart)
    words = ["--jobs", "1", "--data", str(data), "--rows", "gqa"]
    at.main(["train", "--steps", "7", *words])
    at.main(["recall", *words])
    at.main(["recall", *words])
    at.main(["train", "--steps", "7", *words])
    assert asked == [("train", "gqa"), ("recall", "gqa")]
    row = json.loads(data.read_text())["rows"]["gqa"]
    assert row["answered"] == {"4": 0.25} and row["bits_per_byte"] == 3.0
    assert row["recall_budget"] == {"set": [*at.RECALL]}
    at.main(["recall", "--set", "data.seed=5", *words])
    assert asked[2:] == [("recall", "gqa")]


def test_answers_count_where_the_value_of_the_key_is_likeliest(monkeypatch):
    def knows_what_was_told_first(tokens):
        """Look keys up among the first 4 pairs, and say 0 of all others and everywhere else."""
        said = np.zeros_like(tokens)
        for row, out in zip(tokens, said, strict=True):
            asked = 1 + len(row) // 2
            known = row[1 : min(9, asked)].reshape(-1, 2)
            told = {key: value for key, value in known}
            out[asked::2] = [told.get(key, 0) for key in row[asked::2]]
        return jax.nn.one_hot(said, 256)

    monkeypatch.setattr(am, "_loaded", lambda path: knows_what_was_told_first)
    assert am.answered(Path("x"), (2, 4, 16)) == {"2": 1.0, "4": 1.0, "16": 0.25}


def test_a_text_that_stood_there_before_is_measured_apart():
    seen = {}

    def says_what_stood_120_bytes_before(tokens):
        seen["tokens"] = np.asarray(tokens)
        before = np.concatenate([tokens[:, :1].repeat(119, 1), tokens], 1)[:, : tokens.shape[1]]
        return jax.nn.one_hot(before, 257) * 50.0

    first, again = am.recall(says_what_stood_120_bytes_before)
    assert again < 1e-3 and first > 5 and seen["tokens"].shape == (64, 239)


def test_a_row_that_is_there_under_the_same_budget_is_left_out(tmp_path, monkeypatch, capsys):
    asked, data = [], tmp_path / "data.json"
    monkeypatch.setattr(at, "_apart", lambda id, place, args: asked.append(id) or result(3.0))
    words = ["train", "--steps", "7", "--jobs", "1", "--data", str(data), "--rows"]
    at.main([*words, "gqa"])
    at.main([*words, "gqa", "mamba"])
    assert asked == ["gqa", "mamba"] and "1 rows are there; 1 to do" in capsys.readouterr().out
    assert json.loads(data.read_text())["rows"]["mamba"]["budget"] == {"steps": 7, "set": []}
    at.main(["train", "--steps", "8", "--jobs", "1", "--data", str(data), "--rows", "gqa"])
    assert asked[2:] == ["gqa"]


def test_a_row_of_whose_texts_none_is_held_out_is_refused_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(at, "_apart", lambda *_: pytest.fail("it trains"))
    (tmp_path / "a.txt").write_text("one text")
    words = ["train", "--steps", "7", "--data", str(tmp_path / "data.json"), "--rows", "gqa", "--set"]
    files = f"data.files=['{tmp_path}/a.txt']"
    with pytest.raises(SystemExit, match="no text is held out with data.held_out=0.05"):
        at.main([*words, "data.kind=text", files])
    with pytest.raises(SystemExit, match="'recall', of which no text is held out"):
        at.main([*words, "data.kind=recall"])
    with pytest.raises(SystemExit, match="b.txt"):
        at.main([*words, "data.kind=text", files.replace("a.txt", "b.txt")])


def test_a_block_transformer_is_measured_as_other_models_are():
    width = dict(layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    blocks, above = Config(vocab=32, d_model=16, **width), Config(vocab=20, d_model=16, **width)
    config = BlockConfig(blocks, above)
    model = BlockTransformer(config, init(config, jax.random.key(0)))
    made = am._blocks_after(am._cache_of(config, model.params, 18, 40), config, model.params, 18)
    ids = np.arange(18, dtype=np.int32)[None]
    _, real = prefill(model.params, ids, np.asarray([18]), config=config, method=am.Method(), room=40)
    for a, b in zip(jax.tree.leaves(made.groups), jax.tree.leaves(real.groups), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    for a, b in zip(made.groups, real.groups, strict=True):
        for mine, theirs in zip(a.parts, b.parts, strict=True):
            np.testing.assert_array_equal(np.sort(mine.pos), np.sort(theirs.pos))
    assert am.state_bytes(config, 1024) < am.state_bytes(blocks, 1024) and am.decode_speed(model, 18) > 0


@pytest.mark.parametrize("name", sweep(("pod", "yoco", "kimi linear", "transformer-vq")))
def test_what_is_timed_has_the_shape_of_a_cache_after_a_prompt(name):
    m, tokens = model(name), 16
    _, real = kvjax.prefill(m, TEXTS[:1, :tokens], room=am.STEPS + 2)
    run = am.Run(m.config, am.Method())
    made = am.after(am.shapes(run, m.params, 1, tokens, am.STEPS + 2), tokens)
    for a, b in zip(jax.tree.leaves(made.groups), jax.tree.leaves(real.groups), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    for a, b in zip(kvjax.kept_positions(made), kvjax.kept_positions(real), strict=True):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))
    assert am.state_bytes(m.config, tokens) < nbytes(real.groups) and am.decode_speed(m, tokens) > 0
