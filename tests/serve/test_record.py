"""What a run measures is what the simulator's costs are fitted to."""

import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax.commands.main import main
from kvjax.commands.serve_requests import served
from kvjax.serve import Prompt, run
from kvjax.serve.device import pages
from kvjax.serve.device.pages import PIECES
from kvjax.serve.device.write import SLICE
from kvjax.serve.loop import RunIteration
from kvjax.serve.loop.programs import ProgramSizes
from kvjax.serve.requests import Request, RequestProgress
from kvjax.serve.sim import Costs, read_costs
from kvjax.serve.sim.calendar import program_sizes
from tests.methods import battery
from tests.serve.test_apart import distserve
from tests.serve.test_engine import PAGE, PAGES, SYSTEMS, crowd


def test_an_iteration_counts_tokens_slots_and_pairs_as_by_hand():
    writes, reads = (
        RequestProgress(Request(0, 0.0, 5, 9), stored=5),
        RequestProgress(Request(1, 0.0, 20, 9), stored=4),
    )
    assert RunIteration([writes], [(reads, 3)], 1, 2).counts() == (1 + 2 + 3, 6 + 7, 6 + 5 + 6 + 7, 1)
    # A method that reads its prompt of 20 again with attention to all of it.
    assert RunIteration([], [(reads, 3)], 1, 0).counts(1) == (6, 7 + 20, 5 + 6 + 7 + 3 * 20, 1)


def test_a_recorded_run_has_every_iteration_that_compiled_nothing(tmp_path):
    # A pool of a size that no other test has, so that the first run compiles.
    prompts, one, pages = crowd(), SYSTEMS["iterations"], PAGES + 1
    model = battery.model("4/2")
    first, done = (run(model, prompts, one, pages=pages, record=True) for _ in range(2))
    rows = np.array(done.measured["iterations"])
    assert len(first.measured["iterations"]) < len(rows)
    assert rows[:, :4].min() >= 1 and (rows[:, 4] > 0).all()
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
    reads = [(entry, 5), (entry, 300), (entry, 16)]
    sizes = ProgramSizes((16, 64, 256))

    def tokens_and_passes(write, read):
        found = sizes.padded(run := RunIteration(write, read, 1, 0), run.counts())
        assert (found.slots, found.pairs) == run.counts()[1:3]
        return found.tokens, found.passes

    # Pieces of 5, 256, 44 and 16 tokens.
    assert tokens_and_passes([], reads) == (16 + 256 + 64 + 16, 4)
    # Beside a step the last ones are one piece of 5 + 44 + 16 = 65 tokens.
    assert tokens_and_passes([entry], reads) == (1 + 256 + 256, 2)
    # Of 256 and 1 only the shorter one fits, and of five prompts four are read beside a step.
    assert tokens_and_passes([entry], [(entry, 256), (entry, 1)]) == (1 + 16 + 256, 2)
    assert tokens_and_passes([entry], [(entry, 4)] * 5) == (1 + 16 + 16, 2)
    assert tokens_and_passes([entry], []) == (1, 1)
    run = RunIteration([entry], reads, 1, 0)
    assert ProgramSizes().padded(run, run.counts(1)) == run.counts(1)


def test_tables_and_rows_are_padded_as_by_hand():
    short, long = (RequestProgress(Request(0, 0.0, n, 40), stored=n) for n in (5, 60))
    sizes = ProgramSizes((16, 64, 256), 4, 16, 32)

    def padded(write, read, steps=1, most=1):
        run = RunIteration(write, read, most, 0)
        return sizes.padded(run, run.counts(), steps)

    # 65 and 99 tokens take 5 and 7 pages of 16, in tables of 8.
    for most in (5, 99):
        assert padded([short, long], [], 3, most) == (4, 4 * 8 * 16 * (3 + 3) // 3, 4 * 8 * 16, 1)
    assert padded([short], []) == (4, 4 * 4 * 16 * 4, 4 * 4 * 16, 1)
    # Beside 16 rows of the widest table, one piece; without rows, 256 + 44 tokens of one prompt.
    assert padded([short] * 5, [(long, 9)]) == (16 + 16, 17 * 512, (16 + 16) * 512, 1)
    assert padded([], [(long, 300)]) == (256 + 64, 2 * 512, (256 + 64) * 512, 2)
    # Two pieces of 20 and 9 tokens are padded to two of 64 in attention.
    assert padded([short], [(long, 20), (long, 9)]) == (4 + 64, (4 + 2) * 512, (4 + 2 * 64) * 512, 1)
    # A second reading of a prompt is not padded.
    run = RunIteration([], [(long, 16)], 1, 0)
    assert sizes.padded(run, run.counts(1)) == (16 + 16, 512 + 60, (16 * 512) + 16 * 60, 1)


@pytest.mark.rotating
def test_programs_of_a_run_have_the_sizes_that_are_counted(monkeypatch):
    """Tokens outside attention, pairs with tables, and passes, of what the engine gives its programs."""
    ran, counted, padded = [], [], ProgramSizes.padded

    def heard(name, of):
        program = getattr(pages, name)

        def call(step, params, pools, *given):
            ran.append(of(*given))
            return program(step, params, pools, *given)

        monkeypatch.setattr(pages, name, call)

    def of_parts(*parts):
        pairs = sum(part.tokens.size * part.rows.blocks.shape[1] * PAGE for part in parts)
        return sum(part.size for part in parts), pairs, 1

    heard("mixed", lambda rows, pieces, *_: of_parts(rows, pieces))
    heard("read_piece", of_parts)
    heard("gathered_slice", lambda rows, token, *_: (len(token), rows.blocks.size * PAGE, 1))

    def noted(self, *given):
        found = padded(self, *given)
        counted.append((self, (found.tokens, found.pairs, found.passes), np.sum(ran, 0).tolist()))
        ran.clear()
        return found

    monkeypatch.setattr(ProgramSizes, "padded", noted)
    prompts, one = crowd(), SYSTEMS["chunks and a tree"]
    for _ in range(2):
        ran.clear(), counted.clear()
        done = run(battery.model("4/2"), prompts, one, pages=PAGES, record=True)
    assert len(counted) > 9 and all(list(said) == given for _, said, given in counted)
    requests = [entry.request for entry in done.outcome.entries]
    costs = Costs("by hand", 1.0, 0, 0, 0, 0, 0, 1e6, 1.0, SLICE, PIECES, True)
    assert {sizes for sizes, _, _ in counted} == {program_sizes(one, requests, costs, PAGES)}


@pytest.mark.rotating
def test_means_of_noisy_iterations_are_kept(tmp_path):
    """A machine that is busy half of the time: the fit is near the mean, not near the fast half."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 100, 2000)
    seconds = (0.01 + 1e-3 * tokens) * draw.choice([0.1, 1.9], 2000)
    rows = [[int(t), int(t), 0, 1, float(s)] for t, s in zip(tokens, seconds, strict=True)]
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


@pytest.mark.parametrize("times", [1, 2])
def test_commands_serve_twice_and_say_what_compiled_in_the_run_they_show(times, monkeypatch, capsys):
    """`times`: in how many of the runs a program compiles."""
    done = []

    def compiles(model, requests, system, watch, **options):
        if len(done) < times:
            jax.jit(lambda x: x + len(done))(np.ones(times))
        done.append(options)
        return len(done)

    monkeypatch.setattr("kvjax.serve.run", compiles)
    found, late = served(None, [Prompt([1, 2], 3), Prompt([1], 4)], None, "serving", pages=9)
    assert found == 2 and done == [{"pages": 9}] * 2
    assert ("serve again" in late) == (times == 2)
    assert "2 requests of 10 tokens" in capsys.readouterr().err
