"""The study of long texts: where its record stands, what it measures of a short one, and its page."""

from kvjax.eval.tasks.recall import WORDS
from scripts.studies import long_text


def test_the_record_stands_once_at_token_1000_of_any_length():
    record = [WORDS.index(word) for word in long_text.RECORD.split()]
    for tokens in (1500, 5003):
        ids = list(long_text.text(tokens, record))
        assert len(ids) == tokens
        assert ids[long_text.AT : long_text.AT + len(record)] == record
        assert ids.count(record[0]) == 1


def test_a_short_text_is_read_and_its_record_found():
    row = long_text.measure("recall-tiny", 3000)
    assert row["right"] and row["answer"] == long_text.ANSWER and row["peak_mib"] > 100


def test_the_page_shows_its_data_and_memory_does_not_grow_with_the_text():
    rows = long_text.DATA.read()["rows"]
    assert set(rows) == set(map(str, long_text.TOKENS)) and long_text.PAGE.agrees()
    assert all(row["right"] for row in rows.values())
    peaks = [rows[str(tokens)]["peak_mib"] for tokens in long_text.TOKENS]
    assert max(peaks) < 1.05 * peaks[0]
