"""The commands on a saved Block Transformer: what runs, what it prints, and what is refused in one line."""

import re

import jax
import numpy as np
import pytest

import kvjax
from kvjax.api.block_transformer import BlockConfig, BlockTransformer, init
from kvjax.commands.generate import SAMPLE
from kvjax.commands.inspect_model import find_config
from kvjax.commands.main import main
from kvjax.io.checkpoint import save_checkpoint
from kvjax.models.config import Config
from kvjax.plan.cache_sizes import BlockTransformerSizes

L, P = 4, 2
SIZES = dict(layers=1, heads=2, kv_heads=1, head_dim=32, d_ff=24)
SLOT = (32 + 32 + 1) * 4  # a key, a value and a position in float32


@pytest.fixture(scope="module")
def model():
    words = kvjax.load("recall-tiny")
    tokens = Config(vocab=words.config.vocab, d_model=20, **SIZES)
    config = BlockConfig(Config(vocab=P * 20, d_model=24, max_positions=64, **SIZES), tokens, L, P)
    text = dict(tokenizer=words.tokenizer, special_tokens=words.special_tokens)
    return BlockTransformer(config, init(config, jax.random.key(0)), **text)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "two"
    save_checkpoint(model, path)
    return str(path)


@pytest.mark.rotating
def test_inspect_describes_both_decoders_and_sizes_their_caches(model, folder, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["inspect", folder, "--context", "64"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    count = sum(x.size for x in jax.tree.leaves(model.params))
    for text in (
        f"parameters {count / 1000:.2f} k, ",
        "a decoder of blocks of 4 tokens",
        "positions 256, 4 per block",
        # Keys and values of one layer with one head: 256 B for a block below, five times that above.
        "KV per token 64 B in float32, 256 B per block; at most 1.2 KiB for the open block: 5 slots in every",
        "blocks: layers 1 of width 24",
        "blocks: KV per block 256 B in float32",
        "tokens: heads 2 query, 1 KV, 32 channels each",
        "tokens: KV per input 256 B",
        f"full {((64 // L + P + L - 1) * SLOT + 4 * L + 4) / 1024:.1f} KiB 100.0%",
        "kvzip: does not fit this model: it repeats the prompt's tokens",
    ):
        assert text in out, text
    assert main(["inspect", folder, "--context", "257"]) == 2
    assert "at most the model's 256 positions" in capsys.readouterr().err


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["full", "adakv", "kivi"])
def test_sizes_are_those_of_the_prefill(model, folder, name):
    method = kvjax.method(name, **({"budget": 0.5, "window": 2, "page": 4} if name == "adakv" else {}))
    _, cache = kvjax.prefill(model, np.ones((1, 60), int), method=method, room=7)
    assert BlockTransformerSizes(find_config(folder)[0], "float32", 60).nbytes(
        method, room=7
    ) == kvjax.nbytes(cache)


@pytest.mark.rotating
def test_inspect_shows_a_saved_cache(model, tmp_path, capsys):
    _, cache = kvjax.prefill(model, [[*range(1, 23)]], method="int8", room=2)
    kvjax.save_cache(tmp_path / "a.cache", cache)
    assert main(["inspect", str(tmp_path / "a.cache")]) == 0
    out = capsys.readouterr().out
    for pattern in ("method +int8", model.fingerprint, "tokens seen: 22", "from 4 to 5", r"states +16 B"):
        assert re.search(pattern, out), pattern


@pytest.mark.rotating
def test_generate_streams_what_the_model_says_and_measures_its_cache(model, folder, capsys):
    assert main(["generate", "--model", folder, "--prompt", SAMPLE, "--max-new-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    ids = model.tokenizer.encode(SAMPLE).ids
    written = kvjax.generate(model, [ids], max_new_tokens=6)
    assert out.strip() == model.tokenizer.decode(written.tokens[0].tolist())
    kept = kvjax.nbytes(written.cache) / 1024
    assert re.search(rf"cache +{kept:.1f} KiB, 100\.0% of the full cache's {kept:.1f} KiB .full", err)
    assert re.search(r"read +23 tokens", err) and re.search(r"wrote +6 tokens", err)


@pytest.mark.rotating
def test_generate_compresses_the_blocks(folder, capsys):
    words = ["generate", "--model", folder, "--prompt", SAMPLE, "--max-new-tokens", "6"]
    assert main([*words, "--method", "sink-recent:sinks=1+int8", "--budget", "0.4"]) == 0
    out, err = capsys.readouterr()
    share = re.search(r"([\d.]+)% of the full cache's", err)
    assert out.strip() and share is not None and 10 < float(share[1]) < 40


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("generate --prompt a --chat", "two has no chat template, or none named default: give it plain text"),
        ("generate --tokens 1,2 --method kvzip --budget 0.5", "kvzip .* repeats the prompt's tokens"),
        ("generate --tokens 1,2,3,4,5,6,7,8 --method snapkv --budget 0.5", "2 of 2 blocks must stay"),
        ("generate --tokens 1,2 --method int4:group=48", "must divide the 32 channels"),
        ("generate --tokens 1,400", r"token id 400 is outside the vocabulary \[0, 220\)"),
        (
            "generate --tokens 1 --max-new-tokens 300",
            "300 new tokens would reach position 300, this model's last is 256",
        ),
        ("compare", "two is a BlockTransformer, .* expected one decoder: compare cannot ask it"),
    ],
)
def test_what_cannot_be_is_one_line(folder, tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--model", folder]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and re.search(why, err)
    assert not list(tmp_path.iterdir())
