"""NoLiMa: needles stand where the authors' code places them; what is theirs is read from a clone."""

import hashlib
import json

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.eval.tasks.published.nolima import placed, read_book
from kvjax.eval.tasks.reader import reader_of
from kvjax.eval.tasks.suite import make_suite
from tests.eval.published_rows import CHAT, NEEDLES, TEMPLATE, chatting

NEEDLE = "Actually, Yuki lives next to the old tower."
BOOK = "\n".join(f"Line {i} of the book is about the sea." + " It rains." * (i % 7) for i in range(200))
# size, depth -> what data/book_haystack.py at 7532e4e writes, by the tokens of the tests' tokenizer: 16
# digits of a SHA-256 of the text.
PLACED = {
    (250, 0.0): "6b21324378242bf5",
    (250, 0.04): "275dd800c40a3ac7",
    (250, 0.48): "d8cc019ee1ae92e2",
    (250, 0.72): "0921f8861aba9682",
    (250, 1.0): "4489440949ee4073",
    (1000, 0.0): "8e718ba7778d16ab",
    (1000, 0.04): "54d741b79c7319f5",
    (1000, 0.48): "91b77f76b21fc32c",
    (1000, 0.72): "d3182f4e226ea86b",
    (1000, 1.0): "5c8dad8f21b81df8",
}


@pytest.fixture(scope="module")
def model():
    return chatting(CHAT)


def clone(folder, needles=NEEDLES, books=2, template=TEMPLATE):
    """Write a clone's files: our needles, our books, and a file that assigns our prompt."""
    (folder / "data/needlesets").mkdir(parents=True)
    (folder / "data/haystack/rand_shuffle").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    (folder / "data/needlesets/needle_set.json").write_text(json.dumps(needles))
    for i in range(books):
        (folder / f"data/haystack/rand_shuffle/book_{i}.txt").write_text(
            BOOK.replace("sea", ("sea", "lake")[i])
        )
    code = f"raise SystemExit('this runs')\nDEFAULT_TASK_TEMPLATE = {template!r}\n"
    (folder / "evaluation/run_tests.py").write_text(code)
    return folder / "data/needlesets/needle_set.json"


@pytest.mark.parametrize(("size", "depth"), PLACED)
def test_a_needle_stands_where_the_authors_code_places_it(model, size, depth):
    reader = reader_of(model)
    text = placed(reader, read_book(reader, BOOK), NEEDLE, size, depth)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == PLACED[size, depth]


def test_samples_spread_over_tests_and_depths_and_repeat(model, tmp_path):
    path = clone(tmp_path)
    suite = make_suite(model, [f"nolima:{path},tokens=250"], contexts=8)
    samples = [row[0] for i in range(8) for row in suite.rows(i, "agnostic")]
    text = lambda ids: model.tokenizer.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    assert suite.tasks == ("nolima_250",) and len(samples) == 8
    assert [s.id.split("-", 2)[2] for s in samples[:3]] == [
        "0401_T10_C02_onehop-book-1-depth-0", "0401_T10_C02_twohop-book-1-depth-5",
        "0401_T10_C02_onehop-book-1-depth-1",
    ]  # fmt: skip
    for sample in samples:
        (name,) = sample.references
        needle = f"Actually, {name} lives next to the old tower."
        whole = text([*sample.context, *sample.question])
        assert whole.count(needle) == 1 and name in NEEDLES[0]["character_set"]
        assert whole.startswith(
            "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nRead"
        )
        assert "Question: Who has been" in text(sample.question) and "{" not in whole
        assert "".join(text(sample.context[a:b]) for a, b in sample.spans).strip() == needle
        assert sample.max_new_tokens == 192
        assert suite.grade(sample, model.tokenizer.encode(f"It is {name}.").ids).score == 1
        assert suite.grade(sample, model.tokenizer.encode("It is Kurt.").ids).score == 0
    again = make_suite(model, [f"nolima:{path},tokens=250"], contexts=8)
    assert again.rows(3, "agnostic") == suite.rows(3, "agnostic")
    names = {s.references[0] for s in samples}
    rng = np.random.RandomState(42 + 401)
    draws = [rng.choice(NEEDLES[0]["character_set"]) for _ in range(9)]
    assert samples[0].references == (draws[0],) and samples[2].references == (draws[1],) and len(names) > 1


def test_the_longest_published_length_that_fits_is_taken(model, tmp_path):
    path = clone(tmp_path)
    assert make_suite(model, [str(path)], length=1000, contexts=1).tasks == ("nolima_500",)
    assert make_suite(model, [str(path)], contexts=1).tasks == ("nolima_2000",)
    with pytest.raises(InputError, match="shortest prompt takes about .* and 300 were given"):
        make_suite(model, [str(path)], length=300)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"template": "no places"}, "", "no prompt with .haystack. and .question. was found beside"),
        ({"books": 0}, "", "holds no book, expected .txt files"),
        ({}, ",tokens=9000", "book_0.txt has .* tokens, expected at least 9"),
        ({}, ",tokens=none", "tokens is 'none', expected a whole number"),
        ({"needles": [{**NEEDLES[0], "distractors": {"a": "b"}}]}, "", "row 1 has distractors"),
        (
            {"needles": [{**NEEDLES[0], "id": "x"}]},
            "",
            "row 1: field 'id' is 'x'; expected a text that opens with four",
        ),
        (
            {"needles": [{**NEEDLES[0], "character_set": []}]},
            "",
            "'character_set' is \\[\\]; expected a list of names",
        ),
        ({"needles": [{**NEEDLES[0], "tests": []}]}, "", "'tests' is \\[\\]; expected an object"),
    ],
)
def test_what_is_missing_in_a_clone_is_named(model, tmp_path, change, options, message):
    with pytest.raises(InputError, match=message):
        make_suite(model, [f"nolima:{clone(tmp_path, **change)}{options}"], contexts=1)
