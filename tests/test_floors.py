"""The house stands: no import runs upward, nothing goes in a circle, and docs/ shows the house as it is.

Which floors and rooms there are is written in scripts/house_rooms.py. Files are parsed, not imported.
"""

import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import house

    return house


def test_every_file_lies_in_a_room(house):
    files = house.modules().values()
    assert len(files) > 200 and {house.room_of(file) for file in files} == set(house.ROOMS)


def test_no_import_runs_upward(house):
    assert [str(one) for one in house.upward()] == []


def test_no_files_import_each_other_in_a_circle(house):
    assert house.circles(house.file_uses()) == []


def test_imports_of_every_form_are_seen(house, tmp_path, monkeypatch):
    forms = {
        "kvjax/__init__.py": '_HOMES = {"load": "kvjax.c"}',
        "kvjax/a.py": "import kvjax.b",
        "kvjax/b.py": "def f():\n    if True:\n        from kvjax import c\n",
        "kvjax/c.py": "try:\n    x = 1\nexcept ValueError:\n    from kvjax.d.e import x\n",
        "kvjax/d/__init__.py": "",
        "kvjax/d/e.py": "from . import f\nfrom ..a import x",
        "kvjax/d/f.py": "import kvjax\n\ndef g():\n    return kvjax.load",
        "kvjax/d/g.py": "import numpy\nfrom kvjax import load",
        "kvjax/t.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvjax import u",
        "kvjax/u.py": "from kvjax import t",
    }
    for file, text in forms.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    for cached in (house.modules, house.imports, house._homes):
        cached.cache_clear()
    try:
        found = {(one.file, one.of) for one in house.imports()}
        circles = house.circles(house.file_uses())
    finally:
        for cached in (house.modules, house.imports, house._homes):
            cached.cache_clear()
    below = "kvjax/d/"
    assert found == {
        ("kvjax/a.py", "kvjax/b.py"),
        ("kvjax/b.py", "kvjax/c.py"),
        ("kvjax/c.py", f"{below}e.py"),
        (f"{below}e.py", f"{below}f.py"),
        (f"{below}e.py", "kvjax/a.py"),
        (f"{below}f.py", "kvjax/__init__.py"),
        (f"{below}f.py", "kvjax/c.py"),
        (f"{below}g.py", "kvjax/c.py"),
        ("kvjax/t.py", "kvjax/u.py"),
        ("kvjax/u.py", "kvjax/t.py"),
    }
    assert circles == [["kvjax/a.py", "kvjax/b.py", "kvjax/c.py", f"{below}e.py", f"{below}f.py"]]


def test_the_picture_and_the_table_show_the_house(house):
    description = "{http://purl.org/dc/elements/1.1/}description"
    picture = xml.etree.ElementTree.parse(ROOT / "docs/house.svg")
    assert [text.text for text in picture.iter(description)] == [house.data()], "run scripts/house.py --write"
    page = (ROOT / "docs/architecture.md").read_text()
    assert f"<!-- house -->\n{house.table()}\n<!-- end of house -->" in page, "run scripts/house.py --write"
