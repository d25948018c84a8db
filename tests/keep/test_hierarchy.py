"""HOMER's word: how many tokens stay, biases in float64, what is refused, texts beyond positions."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.keep.prompts.hierarchy import Hierarchy
from tests.float64.reference import Prompt
from tests.methods.battery import MAIN, PACKED, ROOM, decoder, model, off, packed, positions
from tests.methods.learned import BIAS, LAYERS, MERGING, homer_goes_on
from tests.methods.table import BY_LABEL

HOMER = BY_LABEL["homer"].method()


def left_by_hand(word, tokens, level):
    """Token by token: every block keeps half a chunk of what the level below left of it."""
    chunks = 2**word.height
    inside = [min(max(tokens - word.prefix - i * word.chunk, 0), word.chunk) for i in range(chunks)]
    rest = tokens - sum(inside)
    for at in range(level + 1):
        if at:
            inside = [a + b for a, b in zip(inside[::2], inside[1::2], strict=True)]
        inside = [min(n, word.chunk // 2) for n in inside]
    return rest + sum(inside)


@pytest.mark.parametrize("word", [Hierarchy(3, 6, 2, 0.6), Hierarchy(0, 5, 3, 0.6), Hierarchy(2, 2, 1, 0.6)])
def test_what_is_left_of_the_first_tokens_is_what_blocks_leave(word):
    for level in range(word.height):
        got = [word.left(n, level) for n in range(60)]
        assert got == [left_by_hand(word, n, level) for n in range(60)]
    assert [word.most(n) for n in range(60)] == got


def test_levels_share_the_lower_layers_as_the_authors_do():
    # 32 layers of which 12 run behind all merges: 20 // 3 a level, and what is left over for the first.
    assert Hierarchy(1, 4, 2, 0.625).levels(32) == (7, 13)
    assert Hierarchy(1, 4, 1, 0.625).levels(32) == (9,)


@pytest.mark.rotating
def test_upper_layers_and_logits_are_those_of_merged_chunks():
    rows = [Prompt(decoder("deep"), tokens, homer_goes_on, ranges=MERGING) for tokens in PACKED]
    assert off(packed("homer").logits, np.stack([row.all_logits[-1] for row in rows])) < 1e-5
    # Which neither the biases nor the chunks leave as they are.
    for other in (Prompt(decoder("deep"), PACKED[0]), Prompt(decoder("deep"), PACKED[0], ranges=MERGING)):
        assert off(rows[0].all_logits[-1], other.all_logits[-1]) > 1e-3


def test_biases_are_mean_logits_at_a_distance():
    texts = [MAIN.first[1], MAIN.first[3]]
    found = kvjax.fit(model("4/2"), "homer", texts)
    prompts, longest = [Prompt(decoder("4/2"), text) for text in texts], max(map(len, texts))
    for layer in range(LAYERS):
        sums, count = np.zeros(longest), np.zeros(longest)
        for prompt in prompts:
            keys = np.repeat(prompt.k[layer], prompt.group, 0)
            s = (prompt.q[layer] @ keys.swapaxes(1, 2)).max(0) / np.sqrt(keys.shape[-1])
            for i, j in zip(*np.tril_indices(prompt.length), strict=True):
                sums[i - j] += s[i, j]
                count[i - j] += 1
        np.testing.assert_allclose(found.arrays["bias"][layer], sums / count, rtol=1e-4, atol=1e-5)


def test_sizes_that_make_no_chunks_and_biases_of_other_models_are_refused():
    with pytest.raises(ValueError, match="chunks of 1 tokens after a prefix of 2, merged 1 times"):
        Hierarchy(2, 1, 1, 0.5)
    with pytest.raises(InputError, match=r"the \(layers\) of its biases are \(3,\), this model's are \(2,\)"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("homer", height=1, fitted=BIAS))
    with pytest.raises(InputError, match="tokens are chosen at layer 1, expected one of 0 to 0"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("homer"))


@pytest.mark.rotating
def test_a_text_has_more_tokens_than_the_model_has_positions():
    """Chunks share theirs: 32 tokens stand at 14 positions, and two more follow."""
    m = model("deep")
    short = dataclasses.replace(m, config=dataclasses.replace(m.config, max_positions=16))
    rows = [MAIN.first[0]]
    want, cache = kvjax.prefill(m, rows, method=HOMER, room=ROOM)
    got, mine = kvjax.prefill(short, rows, method=HOMER, room=2)
    assert off(got, want) < 1e-6 and positions(mine) == positions(cache)
    for token in (1, 2):
        want, cache = kvjax.step(m, cache, [token])
        got, mine = kvjax.step(short, mine, [token])
        assert off(got, want) < 1e-6
    with pytest.raises(InputError, match="the prompt reaches position 35, this model's last is 34"):
        kvjax.prefill(short, [[1]], cache=mine)
    with pytest.raises(InputError, match="the prompt reaches position 35, this model's last is 34"):
        kvjax.prefill(short, [[*rows[0], 1, 2, 3]], method=HOMER)
