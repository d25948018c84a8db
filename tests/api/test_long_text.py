"""A text longer than memory: its numbers in float64, what it forgets of a question, and what is refused."""

import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.rope import Rope
from kvjax.place import block_file
from tests.float64.reference import Decoder, rope, softmax
from tests.models.architectures import TABLE

CONFIG = Config(
    vocab=32, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24, rope=Rope(theta=50.0)
)
SIZES = dict(block=2, newest=8, sinks=3, keys=1, blocks=3, chunk=4)
TOKENS = np.random.default_rng(0).integers(0, 32, 51).tolist()


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG, init(CONFIG, jax.random.key(0)), name="small")


class Reader:
    """The same, token by token and with lists: near holds (k, v, asked) of every layer and KV head.

    kept: how many blocks are read beside the first ones.
    """

    kept = SIZES["blocks"]

    def __init__(self, model):
        self.decoder, self.blocks = Decoder(model), [[[], []] for _ in range(CONFIG.layers)]
        self.near = [[[], []] for _ in range(CONFIG.layers)]

    def make_room(self, tokens):
        while len(self.near[0][0]) + tokens > SIZES["newest"] + 2 * SIZES["chunk"]:
            for layer, head in np.ndindex(CONFIG.layers, 2):
                near = self.near[layer][head]
                old = [near.pop(0) for _ in range(SIZES["chunk"])]
                self.blocks[layer][head] += [old[i : i + 2] for i in range(0, len(old), 2)]

    def read(self, chunk):
        self.make_room(len(chunk))
        x = self.decoder.rest["embed"][chunk]
        for number, layer in enumerate(self.decoder.layers):
            q, k, v = self.decoder.project(layer, x)
            x = self.decoder.finish(layer, x, self.attended(number, q, k, v))
        return self.decoder.logits(x)[-1]

    def attended(self, layer, q, k, v):
        out, t = np.zeros_like(q), q.shape[1]
        for head in range(2):
            near, mine = self.near[layer][head], q[2 * head : 2 * head + 2]
            start = len(near)
            near += [[k[head, i], v[head, i], 0.0] for i in range(t)]
            local = rope(np.array([n[0] for n in near]), range(len(near)), 50.0)
            turned, far = rope(mine, range(start, start + t), 50.0), rope(mine, [8] * t, 50.0)
            blocks = self.blocks[layer][head]
            # A block's representative is the key that was asked most.
            keys = np.array([max(b, key=lambda slot: slot[2])[0] for b in blocks]).reshape(-1, 4)
            order = np.argsort(-(far.sum(1) @ keys.T).max(0)) if blocks else []
            read = {*range(min(2, len(blocks)))}
            read |= {*[b for b in order if b not in read][: self.kept]}
            slots = [slot for b in read for slot in blocks[b]]
            for g, i in np.ndindex(2, t):
                seen = start + i + 1
                s = [turned[g, i] @ y for y in local[:seen]] + [far[g, i] @ slot[0] for slot in slots]
                values = np.array([n[1] for n in near[:seen]] + [slot[1] for slot in slots])
                out[2 * head + g, i] = softmax(np.array(s) / 2) @ values
                for j in range(start + i):
                    near[j][2] += turned[g, i] @ local[j]
        return out


def test_a_text_is_read_as_by_the_equations_in_float64(model, tmp_path, monkeypatch):
    # Three blocks are ranked at a time.
    monkeypatch.setattr(block_file, "AT_ONCE", 3 * 2 * 4 * 4)
    want = Reader(model)
    with kvjax.LongText(model, tmp_path, **SIZES) as text:
        for at in range(0, 48, 4):
            logits = want.read(TOKENS[at : at + 4])
            text.read(TOKENS[at : at + 4])
        asked = TOKENS[48:]
        answer = text.answer(asked, 2)
        # The question left nothing behind.
        assert text.answer(asked, 2) == answer and text.read_tokens == 48
        want.make_room(len(asked) + 2)
        logits = want.read(asked)
        first = int(logits.argmax())
        assert answer == [first, int(want.read([first]).argmax())]
        near, count = text._near, text._count
        got = text._pass(asked, near, count)[2]
        np.testing.assert_allclose(got, logits, atol=1e-4)
        size = (tmp_path / "layer0.blocks").stat().st_size
        assert size == 4 * 2 * (4 + 4) * (48 - count)


def test_a_text_that_reads_no_older_blocks_is_read_in_the_window_and_the_first_tokens(model, tmp_path):
    with kvjax.LongText(model, tmp_path, text_blocks=0, **SIZES) as text:
        text.read(TOKENS[:40])
        alone = text.answer(TOKENS[48:], 1), np.asarray(text._near.v)
    with kvjax.LongText(model, tmp_path, **SIZES | dict(blocks=1000)) as text:
        text.read(TOKENS[:40])
        assert np.abs(np.asarray(text._near.v) - alone[1])[1].max() > 1e-3
    want = Reader(model)
    want.kept = 0
    for at in range(0, 40, 4):
        want.read(TOKENS[at : at + 4])
    want.make_room(4)
    want.kept = SIZES["blocks"]
    assert alone[0] == [int(want.read(TOKENS[48:]).argmax())]


def test_what_fits_is_dense_attention(model, tmp_path):
    with kvjax.LongText(model, tmp_path, **SIZES) as text:
        text.read(TOKENS[:12])
        got = text._pass(TOKENS[12:15], text._near, text._count)[2]
    np.testing.assert_allclose(got, model(np.array([TOKENS[:15]]))[0, -1], atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(block=3), "expected a chunk of whole blocks"),
        (dict(keys=3), "at most the 2 tokens of a block"),
        (dict(blocks=0), "blocks is 0, expected at least 1"),
        (dict(newest=8192), "has 8192 positions: choose fewer"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model, tmp_path, sizes, message):
    with pytest.raises(InputError, match=message):
        kvjax.LongText(model, tmp_path, **SIZES | sizes)


def test_wrong_folders_models_and_questions_are_refused(model, tmp_path):
    with pytest.raises(InputError, match="is no folder"):
        kvjax.LongText(model, tmp_path / "none", **SIZES)
    other = TABLE["mla"].config
    with pytest.raises(InputError, match="layer 0 is Latent.*needs layers of plain attention"):
        kvjax.LongText(Model(other, init(other, jax.random.key(0))), tmp_path, **SIZES)
    with kvjax.LongText(model, tmp_path, **SIZES) as text:
        with pytest.raises(InputError, match="whole numbers of 0 to 31"):
            text.read([1, 32])
        with pytest.raises(InputError, match="at most 8 in all"):
            text.answer([1] * 8, 1)
        with pytest.raises(InputError, match="the prompt is empty"):
            text.answer([], 1)
    for call in (lambda: text.read([1]), lambda: text.answer([1], 1)):
        with pytest.raises(InputError, match="was closed"):
            call()


def test_a_disk_that_cannot_hold_a_text_is_refused_before_it_is_read(model, tmp_path, monkeypatch):
    """Of 51 tokens 39 may leave memory: 20 blocks of 2 tokens and one key, for 2 heads in 2 layers."""
    need = 2 * 2 * 20 * (2 * (4 + 4) + 4) * 4
    began = []
    monkeypatch.setattr(kvjax.LongText, "_pass", lambda text, chunk, *_, **more: began.append(chunk))
    with kvjax.LongText(model, tmp_path, **SIZES) as text:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=need - 1))
        with pytest.raises(InputError, match=f"39 more tokens .* take {need:,} bytes .* {need - 1:,} free"):
            text.read(TOKENS)
        assert began == []
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=need))
        with pytest.raises(TypeError):
            text.read(TOKENS)
        assert began == [TOKENS[:4]]


@pytest.mark.rotating
def test_files_grow_by_no_more_than_is_asked_of_the_disk(model, tmp_path):
    for tokens in (12, 13, 20, 47, 51):
        with kvjax.LongText(model, tmp_path, **SIZES) as text:
            text.read(TOKENS[:tokens])
            held = sum(file.stat().st_size for file in tmp_path.iterdir())
            asked = 320 * -(-max(0, tokens - 12) // 2)
            assert asked - 320 * 4 < held <= asked
