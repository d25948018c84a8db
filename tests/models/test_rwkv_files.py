"""RWKV-7 as its authors save it: read without torch, by the paper's equations, in turns, and saved."""

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.hf import load_hf, save_hf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_config_out import config_to_hf
from kvjax.models.rwkv_pth import read_pth
from tests.models import rwkv_weights

FILE = Path(__file__).parents[1] / "fixtures" / "rwkv7.pth"
TOKENS = np.random.default_rng(1).integers(0, rwkv_weights.VOCAB, (2, 30)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return kvjax.load(FILE)


@pytest.fixture(scope="module")
def expected():
    return np.stack([rwkv_weights.logits(rwkv_weights.weights(), row) for row in TOKENS])


def test_tensors_are_those_that_torch_saved():
    found, saved = read_pth(FILE), rwkv_weights.weights()
    assert found.keys() == saved.keys()
    assert all(found[n].dtype == x.dtype and np.array_equal(found[n], x) for n, x in saved.items())


def test_logits_are_those_of_the_equations(model, expected):
    assert model.config.layers == 2 * rwkv_weights.LAYERS and model.tokenizer is None
    np.testing.assert_allclose(model(TOKENS), expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.rotating
def test_two_turns_of_unequal_rows_and_steps_are_one_pass(model, expected):
    bar = 2e-4 * np.abs(expected).max()
    rows, read = np.arange(2), np.array([17, 9])
    _, cache = kvjax.prefill(model, TOKENS[:, :17], lengths=read, room=12)
    more = np.stack([row[n : n + 6] for row, n in zip(TOKENS, read, strict=True)])
    logits, cache = kvjax.prefill(model, more, lengths=[6, 2], cache=cache)
    read = read + [6, 2]
    np.testing.assert_allclose(logits, expected[rows, read - 1], atol=bar)
    for _ in range(3):
        logits, cache = kvjax.step(model, cache, TOKENS[rows, read])
        np.testing.assert_allclose(logits, expected[rows, read], atol=bar)
        read = read + 1


def test_what_is_saved_loads_as_the_same_model(model, tmp_path):
    save_hf(model, tmp_path / "hf")
    again = load_hf(tmp_path / "hf")
    assert again.config == model.config and again.fingerprint == model.fingerprint
    assert config_from_hf(config_to_hf(model.config)) == model.config


def test_published_sizes_are_read():
    """Those of fla-hub/rwkv7-0.1B-g1 and others: heads of 64 channels, an eps of 1e-5."""
    sizes = dict(
        model_type="rwkv7", vocab_size=65536, hidden_size=768, num_hidden_layers=12, v_low_rank_dim=32
    )
    config = config_from_hf(sizes)
    assert config.layers == 24 and config.d_ff == 3072
    assert config.mixers[0].v_rank is None and config.mixers[2].v_rank == 32
    with pytest.raises(InputError, match="the eps of the norm over a head"):
        config_from_hf(sizes | {"norm_eps": 1e-6})
    with pytest.raises(InputError, match="is not supported for rwkv7"):
        config_from_hf(sizes | {"attn": {"layers": [1]}})


class Harm:
    def __reduce__(self):
        return print, ("this runs",)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"emb.weight": Harm()}, r"holds a \w+.print, expected tensors of floats alone"),
        ({"emb.weight": 3}, "holds more than tensors by name"),
        ({}, "is no RWKV-7 of its authors"),
    ],
)
def test_nothing_in_a_file_is_run_and_others_are_refused(held, message, tmp_path, capsys):
    file = tmp_path / "some.pth"
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("some/data.pkl", pickle.dumps(held, protocol=2))
    with pytest.raises(InputError, match=message):
        kvjax.load(file)
    assert not capsys.readouterr().out


def test_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / "cut.pth"
    file.write_bytes(FILE.read_bytes()[:2000])
    with pytest.raises(InputError, match="cannot be read as a file of tensors that torch saved"):
        kvjax.load(file)
