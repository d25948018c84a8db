"""Every method answers, keeps and costs what the golden record says; `golden.py` says what that is."""

import io
import re

import numpy as np
import pytest

from tests.methods.golden import RECORD, cases, converse, expected_programs
from tests.methods.table import BY_LABEL

# An array is unpacked when a case asks for it; numbers of programs follow from the method.
RECORDED = np.load(io.BytesIO(RECORD.read_bytes()))
KEYS = [key for key in RECORDED.files if not key.endswith("/programs")]
# A method joins the record by `python -m tests.methods.golden --write --missing`.
CASES = dict.fromkeys(tuple(key.split("/")[:2]) for key in KEYS)
# In the plain suite; the other cases take turns.
PLAIN = {("h2o", "groups")}

# Weights that differ in their last bit move one code of 4 bits, and with it logits by 2.3e-3 of the largest.
NOISY = {("adakv + int4", "groups"): 3e-3}


def params():
    for label, name in CASES:
        marks = () if (label, name) in PLAIN else (pytest.mark.rotating,)
        yield pytest.param(label, name, id=f"{label} on {name}", marks=marks)


def test_what_is_recorded_is_a_case():
    assert PLAIN <= set(CASES) <= set(cases())


@pytest.mark.parametrize(("label", "name"), list(params()))
def test_a_conversation_is_as_recorded(label, name):
    done, mine = converse(label, name), f"{label}/{name}/"
    want = {key.removeprefix(mine): RECORDED[key] for key in KEYS if key.startswith(mine)}
    if isinstance(done, str):
        assert reason(done) == reason(str(want["refused"]))
        return
    assert done.programs == expected_programs(label)
    assert done.found.keys() == want.keys()
    for part, x in done.found.items():
        if part.endswith("/logits"):
            # Codes: float noise moves one to its neighbour now and then.
            bound = NOISY.get((label, name), 2e-3) if coded(label) else 2e-5
            np.testing.assert_allclose(x, want[part], atol=bound * np.abs(x).max(), err_msg=part)
        else:
            np.testing.assert_array_equal(x, want[part], err_msg=part)


def reason(refusal):
    """Cut a layer's fields and the method to use instead out of a refusal: these come and go."""
    before, hint, _ = refusal.rpartition(". Use ")
    return re.sub(r"Latent\(.*?\)", "Latent", before if hint else refusal)


def coded(label):
    """Whether a method encodes slots, in one tier or in two."""
    method = BY_LABEL[label].method()
    return method.store is not None or (method.keep is not None and method.keep.lower is not None)
