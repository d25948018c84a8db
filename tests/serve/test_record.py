"""What a run measures is what the simulator's costs are fitted to."""

import json

import numpy as np
import pytest

import kvjax
from kvjax.commands.main import main
from kvjax.serve import run
from kvjax.serve.device.pages import PIECES
from kvjax.serve.device.write import SLICE
from kvjax.serve.loop import RunIteration
from kvjax.serve.requests import Request, RequestProgress
from kvjax.serve.sim import read_costs
from tests.methods import battery
from tests.serve.test_apart import distserve
from tests.serve.test_engine import PAGE, PAGES, SYSTEMS, crowd


def test_an_iteration_counts_tokens_slots_and_pairs_as_by_hand():
    writes, reads = (
        RequestProgress(Request(0, 0.0, 5, 9), stored=5),
        RequestProgress(Request(1, 0.0, 20, 9), stored=4),
    )
    assert RunIteration([writes], [(reads, 3)], 1, 2).counts() == (1 + 2 + 3, 6 + 7, 6 + 5 + 6 + 7)
    # A method that reads its prompt of 20 again with attention to all of it.
    assert RunIteration([], [(reads, 3)], 1, 0).counts(1) == (6, 7 + 20, 5 + 6 + 7 + 3 * 20)


def test_a_recorded_run_has_every_iteration_that_compiled_nothing(tmp_path):
    # A pool of a size that no other test has, so that the first run compiles.
    prompts, one, pages = crowd(), SYSTEMS["iterations"], PAGES + 1
    model = battery.model("4/2")
    first, done = (run(model, prompts, one, pages=pages, record=True) for _ in range(2))
    rows = np.array(done.measured["iterations"])
    assert len(first.measured["iterations"]) < len(rows)
    # Slots of the tables that steps gather are among those that are read.
    assert rows[:, :3].min() >= 1 and (rows[:, 3] > 0).all()
    assert done.measured["memory"] == pages * done.page_bytes == pages * PAGE * done.measured["slot_bytes"]
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(done.measured))
    assert read_costs(file).seconds(1, 1, 1) > 0 and f"{len(rows)} measured" in read_costs(file).by
    assert (read_costs(file).slice, read_costs(file).pieces) == (SLICE, PIECES)
    assert run(model, prompts, one, pages=pages).measured is None
    with pytest.raises(kvjax.InputError, match="record measures one device"):
        run(model, prompts, distserve(), record=True)


def test_pieces_of_prompts_are_padded_as_by_hand():
    entry = RequestProgress(Request(0, 0.0, 900, 9))
    reads, sizes = [(entry, 5), (entry, 300), (entry, 16)], (16, 64, 256)
    assert RunIteration([], reads, 1, 0).padding(sizes) == 11 + (64 - 44) + 0
    # Beside a step they are one piece of 5 + 44 + 16 = 65 tokens.
    assert RunIteration([entry], reads, 1, 0).padding(sizes) == 256 - 65
    assert RunIteration([entry], [(entry, 256), (entry, 1)], 1, 0).padding(sizes) == 0 + 15
    assert RunIteration([entry], [], 9, 0).padding(sizes) == RunIteration([], reads, 1, 0).padding(()) == 0


def test_tables_are_as_wide_as_the_longest_as_by_hand():
    short, long = (RequestProgress(Request(0, 0.0, n, 40), stored=n) for n in (5, 60))
    # 65 and 99 tokens take 5 and 7 pages of 16, in tables of 8.
    for steps in (5, 99):
        both = RunIteration([short, long], [], steps, 0)
        assert both.widening((4, 16, 512), 3) == 4 * 8 * 16 * (3 + 3) // 3 - 6 - 61
    assert RunIteration([short], [], 1, 0).widening((4, 16, 512)) == 4 * 4 * 16 * 4 - 6
    assert RunIteration([short] * 5, [(long, 9)], 1, 0).widening((4, 16, 512)) == 16 * 512 * 4 - 5 * 6
    assert RunIteration([], [(long, 9)], 1, 0).widening((4, 16, 512)) == 0
    assert RunIteration([short], [], 1, 0).widening(()) == 0


@pytest.mark.rotating
def test_means_of_noisy_iterations_are_kept(tmp_path):
    """A machine that is busy half of the time: the fit is near the mean, not near the fast half."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 100, 2000)
    seconds = (0.01 + 1e-3 * tokens) * draw.choice([0.1, 1.9], 2000)
    rows = [[int(t), int(t), 0, float(s)] for t, s in zip(tokens, seconds, strict=True)]
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"iterations": rows, "memory": 1.0, "slot_bytes": 1.0, "move": 0.0}))
    costs = read_costs(file)
    said = [costs.seconds(int(t), int(t), 0) for t in tokens]
    assert np.mean(said) == pytest.approx(seconds.mean(), rel=0.02)
    assert costs.seconds(50, 50, 0) == pytest.approx(0.06, rel=0.1)


@pytest.mark.rotating
def test_the_command_writes_what_simulate_reads(tmp_path, capsys):
    file, load = tmp_path / "costs.json", "tree:requests=4,prefix=16,suffix=8,output=4"
    assert not main(["serve", "run", "--synthetic", load, "--record", str(file), "--json"])
    assert not main(["simulate", "--system", "vllm", "--synthetic", load, "--costs", str(file)])
    assert "measured iterations" in capsys.readouterr().out
    assert main(["serve", "run", "--synthetic", load, "--system", "distserve", "--record", str(file)])
