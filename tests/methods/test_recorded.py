"""Methods keep the slots that their authors' code kept, on the prompts of `recorded.py`."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.methods.recorded import LENGTHS, cases, kept_by_kvjax, numbers
from tests.sweep import sweep

# Recordings of authors' repositories; the other one is of a package.
AUTHORS = (
    "a2sf", "a2sf_first", "cam", "citrus", "criticalkv", "finch", "headkv", "keyformer", "kvcache_factory",
    "l2compress", "nacl", "simlayerkv", "snapkv", "zeromerge",
)  # fmt: skip
# These run every time, the other recordings in turn.
FIRST = [
    name
    for name in cases()
    if name.startswith(("snapkv: ", "l2compress: ", "kvcache_factory: ")) and "budget=0.25" in name
]
SCRIPTS = Path(__file__).parents[2] / "scripts" / "fixtures"


@pytest.mark.parametrize("name", [*AUTHORS, "finch_kvpress"])
def test_a_recording_names_its_commit_and_has_its_script(name):
    source = json.loads(str(numbers(name)["meta"]))["source"]
    assert re.fullmatch(r"[0-9a-f]{40}" if name in AUTHORS else r"kvpress 0\.5\.5", source)
    texts = [path.read_text() for path in SCRIPTS.glob("record_*.py")]
    assert any(f'"{name}": (' in text or f'recorded.write("{name}"' in text for text in texts)


@pytest.mark.parametrize("name", sweep(cases(), *FIRST))
def test_kept_slots_are_those_of_the_authors_code(name):
    case = cases()[name]
    found = kept_by_kvjax(case.id, case.hyper)
    both = found.keys() & case.kept.keys()
    assert 0 in both
    for row in both:
        for layer, want in enumerate(case.kept[row]):
            np.testing.assert_array_equal(found[row][layer], want, err_msg=f"{LENGTHS[row]} tokens, {layer}")
