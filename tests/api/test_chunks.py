"""A prompt read in chunks takes three programs, and leaves what reading it in turns leaves."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.chunks import plan
from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import with_fitted
from kvjax.grammar.kinds import Pattern
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.scores.score import Position
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.pure import bind
from kvjax.state.cache import nbytes
from kvjax.steps import Run
from tests.methods import battery
from tests.methods.battery import off, positions
from tests.methods.table import BY_LABEL

CHUNK, ROOM, VOCAB = 16, 16, 32
make = kvjax.method
METHODS = {
    "no method": Method(),
    "an int budget": make("snapkv", budget=24, window=4),
    "a share": make("snapkv", budget=0.5, window=4),
    "kivi": make("kivi", residual=32),
    "pages": make("adakv", budget=0.5, window=4),
    "one pool": make("kvzip", budget=0.5),
    "evicting at every step": make("h2o", budget=0.5),
    "evicting at every step to an int": make("h2o", budget=24),
    "evicting after some tokens": make("r-kv", budget=24, window=4, buffer=2),
    "pages whose counts follow from the text": BY_LABEL["kvzap"].method(),
    "codes of what is kept": kvjax.chain(make("snapkv", budget=64, window=4), make("kivi", residual=32)),
}
# Real programs compile in the plain suite for one method.
RUN = ("no method",)
ran = pytest.mark.parametrize(
    "how", [pytest.param(x, marks=() if x in RUN else pytest.mark.rotating) for x in METHODS]
)


def model(**sizes):
    config = Config(vocab=VOCAB, d_model=32, heads=2, kv_heads=1, head_dim=32, d_ff=16, **sizes)
    return Model(config, init(config, jax.random.key(3)))


MODELS = {"global": model(layers=1), "windowed": model(layers=2, windows=(40, None))}
M = MODELS["global"]


def fits(how, m):
    """Return the model, or the one that the gates of a method were fitted to."""
    return battery.model("4/2") if "follow from the text" in how else m


# A model, whether a prefill compresses, and the number of chunks.
READINGS = [
    ("global", True, 8),
    ("global", True, 2),
    ("global", True, 4),
    ("windowed", True, 4),
    ("windowed", False, 4),
    ("global", False, 8),
]


def always(how, reading):
    """One reading of every method, and a prefill that keeps all of a group that evicts in steps."""
    return reading == READINGS[0] or (how, reading) == ("evicting at every step", READINGS[-1])


readings = pytest.mark.parametrize(
    ("how", "name", "compress", "chunks"),
    [
        pytest.param(how, *reading, marks=() if always(how, reading) else pytest.mark.rotating)
        for how in METHODS
        for reading in READINGS
    ],
)


def signatures(m, method, lengths, compress):
    """Return what distinguishes the programs of a prompt's chunks, each time one is called; nothing runs.

    For each chunk, the sizes and the cache that it is stored in; reading depends on the cache alone.
    """
    run = Run(m.config, bind(method, m))
    lengths = np.asarray(lengths, np.int32)
    params = with_fitted(m.params, method)
    cache, sizes = plan(run, params, None, lengths, width=CHUNK, room=ROOM, compress=compress)
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((len(lengths), CHUNK), lengths.shape)]
    known, calls = {}, []
    for size in sizes:
        key = (size, str(jax.tree.map(jax.typeof, cache)))
        if key not in known:
            call = partial(steps.prefill, run, **size._asdict(), compress=compress)
            known[key] = jax.eval_shape(call, params, *ids, cache)[1]
        cache = known[key]
        calls.append(key)
    return calls


@readings
def test_a_prompt_of_any_number_of_chunks_takes_three_programs(how, name, compress, chunks):
    lengths = [CHUNK * chunks - 5, 3, CHUNK * chunks]
    calls = signatures(fits(how, MODELS[name]), METHODS[how], lengths, compress)
    assert (len(calls), len(set(calls))) == (chunks, min(chunks, 3))
    # Where reading is apart, it takes two: over no cache, and over the one that all but the last leave.
    assert len({cache for _, cache in calls}) == 2


@pytest.mark.rotating
@ran
def test_chunks_leave_what_turns_with_room_for_the_next_leave_to_the_byte(how):
    rng, m = np.random.default_rng(0), fits(how, M)
    prompt = rng.integers(0, VOCAB, (2, 4 * CHUNK))
    programs = steps.prefill, steps.read, steps.compress
    for one in programs:
        one.clear_cache()
    logits, cache = kvjax.prefill(m, prompt, method=METHODS[how], room=ROOM, chunk=CHUNK)
    compiled = [one._cache_size() for one in programs]
    assert compiled == ([0, 2, 3] if steps.chooses(METHODS[how]) else [3, 0, 0])
    past = None
    for start in range(0, 4 * CHUNK, CHUNK):
        part, room = prompt[:, start : start + CHUNK], ROOM if start == 3 * CHUNK else CHUNK
        given = dict(method=METHODS[how]) if past is None else dict(cache=past)
        want, past = kvjax.prefill(m, part, room=room, **given)
    assert off(logits, want) < 1e-5
    assert positions(cache) == positions(past)
    assert nbytes(cache) == nbytes(past)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, past)


@dataclasses.dataclass(frozen=True)
class Middle(Pattern):
    """Tokens 20 to 39."""

    def __call__(self, pos, length, n):
        return (pos >= 20) & (pos < 40)


def test_what_stays_of_a_row_must_fit_the_budget_after_every_chunk():
    # 11 slots of 32 tokens, of which 12 must stay; before and behind, there are enough.
    keep = Method(Keep(Position(), Budget(0.35), Uniform(), (Middle(),)))
    prompt = [[1] * 64]
    with pytest.raises(InputError, match="12 of 32 tokens must stay"):
        kvjax.prefill(M, prompt, method=keep, chunk=CHUNK)
    with pytest.raises(InputError, match="20 of 48 tokens must stay"):
        kvjax.prefill(M, [[1] * 64, [1] * 48], method=keep)
