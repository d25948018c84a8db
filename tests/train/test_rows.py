"""Rows cut from texts: their order, their segments, what is held out, and where a restart goes on."""

import json

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.train.data.byte_tokenizer import byte_tokenizer
from kvjax.train.data.packing import Stream, StreamPosition, cut, held_out_rows
from kvjax.train.data.sources import source_of, words_of
from kvjax.train.data.texts import is_held_out, read_texts
from kvjax.train.settings import Data, Loop

TEXTS = ["one two", "drei vier fünf", "six", "sept huit neuf dix", "onze", "dodici tredici"]
END, LENGTH = 256, 8


def encode(text):
    return list(text.encode())


def stream(place=None, held_out=0.0, segments=True, seed=3):
    return Stream(TEXTS, encode, END, held_out=held_out, segments=segments, seed=seed, place=place)


def test_rows_are_the_shuffled_texts_one_after_the_other_and_meet_in_one_token():
    order = [*np.random.default_rng([3, 0]).permutation(6), *np.random.default_rng([3, 1]).permutation(6)]
    ids = [x for i in order for x in [*encode(TEXTS[i]), END]]
    rows = stream().next(11, LENGTH)
    for i, row in enumerate(rows.tokens):
        assert row.tolist() == ids[i * LENGTH : (i + 1) * LENGTH + 1]
    # A token behind an end begins a segment, and is no target.
    begins = np.zeros(rows.tokens.shape, bool)
    begins[:, 1:] = rows.tokens[:, :-1] == END
    assert np.array_equal(rows.weights, 1.0 - begins)
    assert np.array_equal(np.diff(rows.segments, axis=1), begins[:, 1:])
    assert stream(segments=False).next(1, LENGTH).segments is None


def test_a_stream_goes_on_from_its_place_as_if_it_had_not_stopped():
    whole = stream().next(9, LENGTH).tokens
    first = stream()
    first.next(4, LENGTH)
    second = stream(StreamPosition(**first.place.as_json()))
    assert np.array_equal(second.next(5, LENGTH).tokens, whole[4:])


def test_held_out_texts_are_chosen_by_what_they_say_and_never_read():
    held = [text for text in TEXTS if is_held_out(text, 0.5)]
    assert 0 < len(held) < len(TEXTS)
    ids = [x for text in held for x in [*encode(text), END]]
    found = held_out_rows(TEXTS, encode, END, 4, 100, share=0.5, segments=True)
    rows = [row.tolist() for row in found.rows.tokens]
    assert rows == [ids[i : i + 5] for i in range(0, len(ids) - 1, 4)][: len(rows)] and rows
    assert found.bytes_per_token == 1.0
    read = stream(held_out=0.5).next(20, LENGTH).tokens
    text = bytes(x for row in read for x in row[:-1] if x != END).decode()
    assert not any(each in text for each in held)
    assert held_out_rows(TEXTS, encode, END, 4, 100, share=0.0, segments=True) is None


def test_texts_that_are_all_held_out_are_refused():
    only = Stream([t for t in TEXTS if is_held_out(t, 0.5)], encode, END, held_out=0.5, segments=True, seed=0)
    with pytest.raises(InputError, match="all texts are held out"):
        only.next(1, LENGTH)


def test_bytes_are_ids_and_come_back():
    tokenizer = byte_tokenizer()
    text = "naïve \x00 текст\n\t😀"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == 257 and tokenizer.token_to_id("<|end|>") == 256


def test_json_lines_and_parquet_give_their_field(tmp_path):
    import datasets

    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(f'{{"body": "{text}", "n": {i}}}\n' for i, text in enumerate(TEXTS)))
    table = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"body": TEXTS}).to_parquet(str(table))
    for kind, path in (("json", lines), ("parquet", table)):
        texts = read_texts(Data(kind=kind, files=(str(path),), field="body"))
        assert [texts[i] for i in range(len(texts))] == TEXTS
    with pytest.raises(InputError, match="has no field 'text', only body, n"):
        read_texts(Data(kind="json", files=(str(lines),)))
    lines.write_text('{"body": "x"\n')
    with pytest.raises(InputError, match="a.jsonl, line 1 is no JSON"):
        read_texts(Data(kind="json", files=(str(lines),)))


def test_a_pattern_stands_for_the_files_that_it_matches_in_their_order(tmp_path):
    names = ("b.txt", "a.txt", "deep/c.txt", "a.md", "odd[1].txt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def said(*files: str) -> list[str]:
        texts = read_texts(Data(kind="text", files=tuple(str(tmp_path / name) for name in files)))
        return [texts[i] for i in range(len(texts))]

    assert said("[ab].txt") == ["a.txt", "b.txt"]
    assert said("a.md", "**/*.txt") == ["a.md", "a.txt", "b.txt", "deep/c.txt", "odd[1].txt"]
    assert said("odd[1].txt") == ["odd[1].txt"], "a file of that very name"


def test_rows_of_a_batch_are_cut_behind_every_end():
    rows = cut(np.asarray([[5, END, END, 6, 7]], np.int32), END, True)
    assert rows.segments.tolist() == [[0, 0, 1, 2, 2]] and rows.weights.tolist() == [[1, 1, 0, 0, 1]]


def lines(path, *rows, ends="\n"):
    path.write_bytes("".join(f"{row}{ends}" for row in rows).encode())
    return path


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"text": null}', "is null or missing"),
        ('{"n": 3}', "is null or missing"),
        ('{"text": 3}', "is '3', no text"),
        ('{"text": ["a"]}', r"is \"\['a'\]\", no text"),
    ],
)
def test_a_row_without_a_text_is_named_by_file_and_line(tmp_path, row, said):
    a = lines(tmp_path / "a.jsonl", '{"text": "one"}', '{"text": "two"}')
    b = lines(tmp_path / "b.jsonl", '{"text": "three"}', "", row, '{"text": null}', ends="\r\n")
    with pytest.raises(InputError, match=f"b.jsonl, line 3: the field 'text' {said}"):
        read_texts(Data(kind="json", files=(str(a), str(b))))


def test_dates_in_json_are_words_like_others(tmp_path):
    date, rows = "2024-01-01T00:00:00Z", [{"text": "one", "at": None}, {"text": "one", "at": "2024-01-01"}]
    # More than what one read takes of a file, so that the last rows come after a guess of their types.
    later = [{"text": "x" * 2**20, "at": date}] * 11 + [{"text": "two", "at": "yesterday", "new": 3}]
    files = {
        "lines.jsonl": "\n".join(map(json.dumps, [*rows, *later])),
        "texts.jsonl": "\n".join(json.dumps({"text": text}) for text in (date, "2024-01-02")),
        "list.json": json.dumps([*later[-1:], {"text": date, "at": date}], indent=1),
    }
    want = {"lines.jsonl": "two", "texts.jsonl": "2024-01-02", "list.json": date}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        texts = read_texts(Data(kind="json", files=(str(tmp_path / name),)))
        assert texts[len(texts) - 1] == want[name]


def test_json_that_was_changed_is_read_again(tmp_path):
    path = lines(tmp_path / "a.jsonl", '{"text": "one"}')
    assert read_texts(Data(kind="json", files=(str(path),)))[0] == "one"
    lines(path, '{"text": "three"}')
    assert read_texts(Data(kind="json", files=(str(path),)))[0] == "three"


@pytest.mark.parametrize("text", ["[]", "\n\n", "[[1]]", "3", '[{"text": 3}]', '{"text": '])
def test_json_without_texts_is_refused(tmp_path, text):
    path = lines(tmp_path / "a.json", text)
    with pytest.raises(InputError, match=r"a.json"):
        read_texts(Data(kind="json", files=(str(path),)))


def test_half_a_pair_of_surrogates_is_named_by_file_and_line(tmp_path):
    path = lines(tmp_path / "a.jsonl", '{"text": "one"}', r'{"text": "tw\ud800o"}')
    with pytest.raises(InputError, match="a.jsonl, line 2 holds half of a pair of surrogates"):
        read_texts(Data(kind="json", files=(str(path),)))


def test_a_row_of_parquet_without_a_text_is_named_by_file_and_row(tmp_path):
    import datasets

    for name, texts in (("a", ["one", "two"]), ("b", ["three", None, None])):
        datasets.Dataset.from_dict({"text": texts}).to_parquet(str(tmp_path / f"{name}.parquet"))
    files = tuple(str(tmp_path / f"{name}.parquet") for name in "ab")
    with pytest.raises(InputError, match=r"b.parquet, row 2: the field 'text' is null or missing"):
        read_texts(Data(kind="parquet", files=files))
    datasets.Dataset.from_dict({"text": [1, 2]}).to_parquet(files[0])
    with pytest.raises(InputError, match=r"a.parquet, row 1: the field 'text' is '1', no text"):
        read_texts(Data(kind="parquet", files=files[:1]))


def test_empty_texts_and_byte_order_marks_are_no_texts(tmp_path):
    mark = b"\xef\xbb\xbf"
    files = {"a.txt": mark + "naïve\r\ntext".encode(), "b.txt": b"", "c.txt": mark, "d.txt": b"more"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    texts = read_texts(Data(kind="text", files=(str(tmp_path / "*.txt"),)))
    assert [texts[i] for i in range(len(texts))] == ["naïve\ntext", "more"] and texts.empty == 2
    rows = '{"text": ""}', '{"text": "\ufeffone"}', '{"text": "\ufeff"}', '{"text": "two"}', '{"text": " "}'
    path = lines(tmp_path / "a.jsonl", *rows, ends="\r\n")
    path.write_bytes(mark + path.read_bytes())
    texts = read_texts(Data(kind="json", files=(str(path),)))
    assert [texts[i] for i in range(len(texts))] == ["one", "two", " "] and texts.empty == 2
    for name in ("b.txt", "c.txt"):
        with pytest.raises(InputError, match=f"{name} is empty"):
            read_texts(Data(kind="text", files=(str(tmp_path / name),)))
    only = lines(tmp_path / "empty.jsonl", '{"text": ""}')
    with pytest.raises(InputError, match="the field 'text' holds no texts"):
        read_texts(Data(kind="json", files=(str(only),)))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_files_of_other_encodings_are_refused(tmp_path, encoding):
    path = tmp_path / "a.txt"
    path.write_bytes("é plain\nand é\n".encode(encoding))
    with pytest.raises(InputError, match="a.txt, line 1 (is not UTF-8|holds the character 0)"):
        read_texts(Data(kind="text", files=(str(path),)))


def test_the_rows_of_one_long_text_take_work_of_its_length_and_no_place():
    read = []

    def counted(text):
        read.append(len(text))
        return list(text.encode())

    text = "a line without an end " * 20_000
    long = Stream([text], counted, END, held_out=0.0, segments=True, seed=0)
    ids = [*text.encode(), END]
    rows = long.next(400, 1000).tokens
    assert all(row.tolist() == ids[i * 1000 : (i + 1) * 1000 + 1] for i, row in enumerate(rows))
    assert len(read) == 1 and long.place.as_json() == {"reading": 0, "text": 1, "used": 400_000}
    # A row copies its own tokens alone.
    assert long._rest().base is long._begun[1]
    again = Stream([text], counted, END, held_out=0.0, segments=True, seed=0, place=long.place)
    assert again.next(1, 1000).tokens[0].tolist() == ids[400_000:401_001]


def test_a_source_of_bytes_gives_what_their_tokenizer_gives(tmp_path):
    text = "naïve \x01 текст\n\t😀 <|end|> and <|en more"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text.replace("<|end|>", ""))
    data = Data(kind="text", files=(str(tmp_path / "*.txt"),), held_out=0.0)
    words = words_of(data)
    source, _ = source_of(data, words, Loop(length=8), segments=True)
    texts = read_texts(data)
    ids = [words.tokenizer.encode(texts[i], add_special_tokens=False).ids for i in range(2)]
    order = np.random.default_rng([0, 0]).permutation(2)
    said = [x for i in order for x in [*ids[i], 256]]
    assert source.next(1, 80).tokens[0].tolist() == said[:81]


def test_a_place_of_an_older_form_is_refused_where_it_holds_tokens():
    assert StreamPosition.from_json({"reading": 3, "text": 0, "left": []}) == StreamPosition(3)
    with pytest.raises(InputError, match="older form"):
        StreamPosition.from_json({"reading": 0, "text": 1, "left": [4]})


def test_texts_of_which_there_are_no_rows_are_refused_with_the_source(tmp_path):
    """Not when they are first read, which is in the folder of the run."""
    some = [text for text in TEXTS if is_held_out(text, 0.5)]
    for i, text in enumerate(some):
        (tmp_path / f"{i}.txt").write_text(text)
    data = Data(kind="text", files=(str(tmp_path / "*.txt"),), tokenizer="bytes", held_out=0.5)
    with pytest.raises(InputError, match="all texts are held out"):
        source_of(data, words_of(data), Loop(steps=1, batch=1, length=4), segments=True)


def test_a_source_begins_at_its_place_after_its_first_rows_were_tried(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    data = Data(kind="text", files=(str(tmp_path / "*.txt"),), tokenizer="bytes", held_out=0.0, seed=3)
    loop = Loop(steps=1, batch=2, length=LENGTH)
    source, _ = source_of(data, words_of(data), loop, segments=True)
    assert np.array_equal(source.next(9, LENGTH).tokens, stream().next(9, LENGTH).tokens)
    place = StreamPosition(**source.place.as_json())
    assert np.array_equal(
        source_of(data, words_of(data), loop, segments=True, place=place)[0].next(1, LENGTH).tokens,
        source.next(1, LENGTH).tokens,
    )
