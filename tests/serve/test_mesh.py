"""A model split over devices (Megatron-LM) answers as on one, and a device has its KV heads' pages."""

import pytest

import kvjax
from kvjax.serve import Prompt, System, run
from kvjax.serve.device.arena import Arena
from kvjax.serve.grammar import words
from tests.methods import battery
from tests.methods.table import BY_LABEL
from tests.serve.test_engine import PAGE, PAGES, SYSTEMS, check_alone, crowd
from tests.serve.test_loop import clean

# What requests get alone is written once, by the process of tests/serve/test_engine.py.
pytestmark = pytest.mark.xdist_group("engine")


@pytest.fixture
def arenas(monkeypatch):
    """Record the arenas of a run."""
    found = []

    class Kept(Arena):
        def __init__(self, *how):
            super().__init__(*how)
            found.append(self)

    monkeypatch.setattr("kvjax.serve.device.engine.Arena", Kept)
    return found


OTHERS = [
    pytest.param(name, marks=pytest.mark.rotating) for name in ("by node", "prompts first", "iterations")
]


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["chunks and a tree", *OTHERS])
def test_requests_get_the_tokens_of_one_device(name, arenas):
    """Under the full cache, a method that selects, and codes; moved to the host and back, too."""
    prompts = crowd((None, BY_LABEL["keydiff"].method(), kvjax.method("int8")))
    split = kvjax.spread(battery.model("4/2"), "model=2", "tensor")
    done = run(split, prompts, SYSTEMS[name], pages=PAGES, watch=clean)
    check_alone(done, prompts)
    assert not any(entry.outside for entry in done.outcome.entries)
    (arena,) = arenas
    for pool in arena.words:
        assert [one.data.nbytes for one in pool.addressable_shards] == [pool.nbytes // 2] * 2


def test_prefill_and_decoding_have_a_slice_of_the_devices_each(arenas):
    prompts = crowd((None, BY_LABEL["keydiff"].method()))
    system = System(words.Blocks(PAGE), batch=words.PrefillFirst(8, 64), split=words.Apart(1, 1))
    split = kvjax.spread(battery.model("4/2"), "model=2", "tensor")
    done = run(split, prompts, system, pages=3 * PAGES, watch=clean)
    check_alone(done, prompts)
    on = [{one.id for one in arena.words[0].sharding.device_set} for arena in arenas]
    assert sorted(map(sorted, on)) == [[0, 1], [2, 3]]
    assert "4 of" in done.outcome.costs


@pytest.mark.parametrize(
    "mesh, method, said",
    [
        ("model=4", None, "2 KV heads do not divide over model=4"),
        ("data=2,model=2", None, "the mesh splits rows, tokens or layers"),
        ("model=2", "h2o(budget=0.5)", "in pages alone, and they cannot hold h2o"),
    ],
)
def test_what_a_mesh_cannot_hold_is_refused_first(mesh, method, said):
    split = kvjax.spread(battery.model("4/2"), mesh, "tensor")
    with pytest.raises(kvjax.InputError, match=said):
        run(split, [Prompt([1, 2], 4, method)])


def test_weights_from_host_memory_go_to_one_device():
    split = kvjax.spread(battery.model("4/2"), "model=2", "tensor")
    with pytest.raises(kvjax.InputError, match="take Resident"):
        run(split, [Prompt([1, 2])], System(words.Blocks(PAGE), weights=words.Brought()))
