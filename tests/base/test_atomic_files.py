"""Files that appear whole: what no file may replace, and where links lead."""

import os

import numpy as np
import pytest

import kvjax
from kvjax.base.atomic_files import check_file, check_kind, check_unwritten, write_atomic
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, save_fitted
from tests.sweep import sweep

WRITERS = {
    "bytes": lambda path: write_atomic(path, b"new"),
    "a report": check_file,
    "an output": lambda path: check_unwritten(path, overwrite=True),
    "a kind": lambda path: check_kind(path, "kvjax cache"),
    "a fit": lambda path: save_fitted(path, Fitted({"x": np.zeros(2)}, "Word", "")),
    "a cache": lambda path: kvjax.save_cache(path, kvjax.prefill(kvjax.load("recall-tiny"), [[1, 2]])[1]),
}


@pytest.mark.parametrize("name", sweep(WRITERS, *(name for name in WRITERS if name != "a cache")))
@pytest.mark.parametrize("through", ["pipe", "link"])
def test_a_pipe_is_no_file_to_replace(name, through, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with pytest.raises(InputError, match=f"{through} is a device or a pipe, expected the path of a file"):
        WRITERS[name](tmp_path / through)
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 2


def test_a_link_goes_on_leading_to_what_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    for text in (b"first", b"second"):
        write_atomic(tmp_path / "link", text)
        assert (tmp_path / "there" / "file").read_bytes() == text
    assert (tmp_path / "link").is_symlink() and len(list((tmp_path / "there").iterdir())) == 1
