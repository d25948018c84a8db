"""Traces are read or refused by line and field; drawn requests are like them; figures are vLLM's."""

import csv
import dataclasses
import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp

import kvjax
from kvjax.serve.grammar import System, words
from kvjax.serve.load.metrics import Slo, metrics, pages_up_to, waste
from kvjax.serve.load.synth import fit, statistics, synthetic
from kvjax.serve.load.texts import scaled
from kvjax.serve.load.traces import read_trace
from kvjax.serve.requests import Request
from kvjax.serve.sim import Compression, Costs, read_costs, simulate
from tests.serve.test_loop import COSTS, clean, crowd

TRACES = Path(os.environ.get("KVJAX_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
SAMPLE = Path(__file__).parent / "sample.jsonl"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="set KVJAX_TRACES to the folder of traces")
AZURE = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def test_both_forms_of_azures_trace_are_the_same_requests(tmp_path):
    seconds = AZURE + "0.0,374,44\n4.314579,396,109\n"
    days = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    for name, text in (("a.csv", seconds), ("b.csv", days)):
        (tmp_path / name).write_text(text)
    one, other = (read_trace(tmp_path / name) for name in ("a.csv", "b.csv"))
    assert one == [Request(0, 0.0, 374, 44), Request(1, 4.314579, 396, 109)]
    assert [(r.prompt, r.output) for r in one] == [(r.prompt, r.output) for r in other]
    assert other[1].arrived == pytest.approx(4.314579, abs=2e-6)


def test_the_sample_of_mooncakes_form_has_blocks_that_are_shared():
    found = read_trace(SAMPLE)
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    assert [one.prompt for one in found] == [row["input_length"] for row in rows]
    assert found[1].arrived == (rows[1]["timestamp"] - rows[0]["timestamp"]) / 1e3
    assert found[0].keys[0] == found[1].keys[0] and found[0].page_keys(512) != found[1].page_keys(512)
    assert len(read_trace(SAMPLE, count=2)) == 2


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.csv", "when,in,out\n1,2,3\n", "line 1: the columns are when, in, out"),
        ("a.csv", AZURE + "0.0,374,44\n1.0,0,3\n", "line 3: num_prefill_tokens is '0'"),
        ("a.csv", AZURE + "0.0,374,many\n", "line 2: num_decode_tokens is 'many'"),
        ("a.csv", AZURE + "soon,374,1\n", "line 2: arrived_at is 'soon'"),
        ("a.csv", AZURE + "5.0,374,1\n1.0,374,1\n", "line 3: arrived_at is before the first"),
        ("a.csv", AZURE, "has no request"),
        ("a.csv", AZURE + "0.0,374\n", "line 2: num_decode_tokens is None"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5}\n', "line 1 has no field 'output_length'"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1.5, "hash_ids": [1]}\n',
            "line 1: output_length is 1.5",
        ),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n',
            "hash_ids does not have one id",
        ),
        ("a.txt", "", "neither .csv"),
        ("none/a.csv", None, "cannot be read"),
    ],
)
def test_another_schema_is_refused_by_file_line_and_field(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(kvjax.InputError) as error:
        read_trace(tmp_path / name)
    assert said in str(error.value) and name in str(error.value)


@pytest.mark.parametrize(
    "text, said",
    [
        ("azure-con", "did you mean azure-conv?"),
        ("tree:request=5", "did you mean requests?"),
        ("tree:rate=0", "rate='0', expected a number above 0"),
        ("azure-conv:rate=nan", "expected a number above 0"),
        ("azure-conv:requests=0", "expected a whole number from 1 up"),
        ("tree:groups=some", "expected a whole number"),
    ],
)
def test_a_wrong_workload_is_answered_with_what_it_takes(text, said):
    with pytest.raises(kvjax.InputError) as error:
        synthetic(text)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["azure-conv", "azure-code"])
def test_drawn_requests_have_the_statistics_that_they_were_drawn_from(name):
    known, found = statistics()[name], fit(synthetic(f"{name}:requests=6000,seed=3,cv=1"))
    for field in ("prompt", "output"):
        assert ks_2samp(known[field], found[field]).statistic < 0.05
    assert found["ranks"] == pytest.approx(known["ranks"], abs=0.05)
    assert found["rate"] == pytest.approx(known["rate"], rel=0.1) and found["cv"] == pytest.approx(1, abs=0.1)
    bursts = fit(synthetic(f"{name}:requests=6000,cv=4,rate=2"))
    assert bursts["cv"] == pytest.approx(4, rel=0.25) and bursts["rate"] == pytest.approx(2, rel=0.25)


@needs_traces
@pytest.mark.parametrize("name, file", [("azure-conv", "conv"), ("azure-code", "code")])
def test_drawn_lengths_are_those_of_the_trace(name, file):
    real, made = read_trace(TRACES / f"azure_2023_{file}.csv"), synthetic(f"{name}:requests=10000")
    for field in ("prompt", "output"):
        one, other = ([getattr(r, field) for r in rows] for rows in (real, made))
        assert ks_2samp(one, other).statistic < 0.05
    with (TRACES / f"azure_2023_{file}.csv").open() as text:
        assert len(real) == sum(1 for _ in csv.reader(text)) - 1


# The share of blocks that an LRU cache of so many blocks holds, over Mooncake's conversation trace.
HITS = {1_000: 0.045, 10_000: 0.211, 50_000: 0.355, 10**9: 0.366}


def hits(requests, size):
    """By hand: the leading blocks of every prompt that are held; the oldest leave after each request."""
    held, found = OrderedDict(), 0
    for one in requests:
        known = [key in held for key in one.keys]
        found += (known + [False]).index(False)
        for key in one.keys:
            held[key] = None
            held.move_to_end(key)
        while len(held) > size:
            held.popitem(last=False)
    return found / sum(len(one.keys) for one in requests)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in (1, 2))])
def test_drawn_prompts_begin_as_those_of_mooncakes_trace(seed):
    """The hit curve is within three points of the trace's, for caches of any size."""
    made = synthetic(f"mooncake-conversation:requests=12031,seed={seed}")
    for size, share in HITS.items():
        assert hits(made, size) == pytest.approx(share, abs=0.03), size
    lengths = statistics()["mooncake-conversation"]["prompt"]
    assert ks_2samp(lengths, [one.prompt for one in made]).statistic < 0.05
    assert all(len(one.keys) == -(-one.prompt // 512) for one in made)
    apart = [dataclasses.replace(one, keys=tuple((one.id, n) for n in range(len(one.keys)))) for one in made]
    assert hits(apart, 10**9) == 0


@needs_traces
def test_the_hits_are_those_of_mooncakes_trace():
    real = read_trace(TRACES / "mooncake_conversation.jsonl")
    for size, share in HITS.items():
        assert hits(real, size) == pytest.approx(share, abs=6e-4)


def test_calls_are_not_left_out_silently_where_lengths_are_divided():
    made = synthetic("azure-conv:requests=20,calls=2")
    count = sum(bool(one.calls) for one in made)
    assert 0 < count < 20
    with pytest.raises(kvjax.InputError, match=f"{count} of 20 requests call other programs"):
        scaled(made, 8)


def test_a_tree_has_popular_groups_first_and_all_come_at_once_without_a_rate():
    found = synthetic("tree:requests=400,groups=4,prefix=32,suffix=8,output=5,seed=2")
    counts = [sum(r.keys[0] == ("group", g) for r in found) for g in range(4)]
    assert counts == sorted(counts, reverse=True) and {r.arrived for r in found} == {0.0}
    assert np.mean([r.output for r in found]) == pytest.approx(5, rel=0.15)


def test_figures_are_those_that_vllm_bench_serve_defines():
    """Each figure again from the times of every token, as its definitions say."""
    system = System(words.Blocks(4), batch=words.Chunked(16, 8))
    requests = crowd(11)
    out = simulate(system, requests, COSTS, pages=64)
    slo = Slo(ttft=0.05, tpot=0.0125)
    figures = metrics(out, slo)
    token_times = {
        e.request.id: [out.ends[i] for a, n in e.spans for i in range(a, a + n)] for e in out.entries
    }
    ttft, tpot, itl, good = [], [], [], 0
    for request in requests:
        got = token_times[request.id]
        assert len(got) == request.output
        latency, first = got[-1] - request.arrived, got[0] - request.arrived
        per_token = (latency - first) / (request.output - 1) if request.output > 1 else 0
        ttft.append(first)
        tpot += [per_token] if request.output > 1 else []
        itl += [b - a for a, b in zip(got, got[1:], strict=False)]
        good += first <= slo.ttft and per_token <= slo.tpot
    duration = max(t[-1] for t in token_times.values()) - requests[0].arrived
    wanted = {
        "mean_ttft_ms": 1e3 * np.mean(ttft), "p99_ttft_ms": 1e3 * np.percentile(ttft, 99),
        "p50_tpot_ms": 1e3 * np.median(tpot), "p90_itl_ms": 1e3 * np.percentile(itl, 90),
        "request_goodput": good / duration, "request_throughput": len(requests) / duration,
        "output_throughput": sum(r.output for r in requests) / duration,
    }  # fmt: skip
    assert 0 < good < len(requests)
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted)


def test_waste_is_what_is_held_and_not_stored_step_by_step():
    assert [pages_up_to(n, 4) for n in range(6)] == [0, 4, 8, 12, 16, 24]
    place = words.Lanes("max", 32, 4)
    system = System(place, batch=words.Whole(2), preempt=words.Never())
    out = simulate(system, [Request(0, 0.0, 5, 3), Request(1, 0.0, 7, 6)], COSTS, pages=64)
    # Two steps of the first and five of the second; the first one's row then stands still for three.
    stored = (6 + 7) + (8 + 9 + 10 + 11 + 12)
    assert waste(out) == pytest.approx(1 - stored / (32 * (2 + 3 + 5)))
    # A reservation that was too short is doubled when its 8 + 4 slots are full.
    place = words.Lanes("predicted", page=4)
    out = simulate(System(place), [Request(0, 0.0, 8, 7, predicted=3)], COSTS, pages=64)
    assert waste(out) == pytest.approx(1 - sum(range(9, 15)) / (4 * 12 + 2 * 16))


def test_what_a_method_evicts_is_neither_held_nor_read_and_counts_as_no_waste():
    costs = Costs("by hand", 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1e6, 1.0)
    system, quarter = System(words.Blocks(4)), Compression(slots=0.25)
    out = simulate(system, [Request(0, 0.0, 24, 4)], costs, pages=8, compression=quarter)
    # The prompt's 24 slots, and then 6 of them with the tokens that are written.
    assert np.diff([0.0, *out.ends]).tolist() == [24, 7, 8, 9]
    assert waste(out) == pytest.approx(1 - (7 + 8 + 9) / (8 + 8 + 12))
    assert metrics(out)["waste"] == waste(out)


def test_who_gives_way_leaves_with_its_slots_and_keeps_what_it_wrote():
    costs = Costs("by hand", 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1e6, 1.0)
    two, half = [Request(i, 0.0, 8, 20) for i in range(2)], Compression(slots=0.5)
    for preempt in (words.Swap(), words.Recompute()):
        away, system = set(), System(words.Blocks(4), preempt=preempt)

        def watch(loop, away=away):
            clean(loop)
            away |= {entry.slots for entry in loop.away}

        out = simulate(system, two, costs, pages=8, compression=half, watch=watch)
        assert [entry.slots for entry in out.entries] == [4 + 19, 4 + 19]
        assert [entry.preempted for entry in out.entries] == [0, 1]
        # Both have written 12 of 20 when 8 pages of 4 slots are full.
        assert away == ({4 + 12} if preempt == words.Swap() else set()) and out.moved == 2 * sum(away)
        assert metrics(out)["recomputed_tokens"] == (0 if away else 8 + 13)


def test_a_method_that_reads_a_prompt_again_is_charged_for_it():
    costs = Costs("by hand", 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1e6, 1.0)
    one = [Request(0, 0.0, 10, 2)]
    batch = words.Chunked(6, 4)
    ends = [
        simulate(System(batch=batch), one, costs, compression=Compression(again=again)).ends
        for again in (0, 1)
    ]
    assert [e.tolist() for e in ends] == [[6, 10, 11], [12, 20, 21]]
    # Each of 10 tokens meets those up to itself, and then all 10.
    costs = dataclasses.replace(costs, token=0.0, pair=1.0)
    out = simulate(System(batch=batch), one, costs, compression=Compression(again=1))
    assert out.ends[1] == 55 + 100


def test_prefill_and_decoding_apart_take_what_they_take_by_hand():
    # A second for each iteration, another for each token; a slot moves in half a second.
    costs = Costs("by hand", 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 1e3, 1.0)
    system = System(words.Blocks(4), batch=words.PrefillFirst(8, 8), split=words.Apart(1, 1))
    two = [Request(0, 0.0, 6, 4), Request(1, 0.0, 4, 2)]
    out = simulate(system, two, costs, pages=20)

    # Prompts of 6 and 4 tokens end at 7 and 12, and their slots are there at 10 and 14. The first decodes
    # alone in 2 s per token until then, and both together in 3 s.
    def times(out):
        return [[float(out.ends[i]) for a, n in e.spans for i in range(a, a + n)] for e in out.entries]

    assert [e.state for e in out.entries] == ["ended", "ended"] and out.moved == 10
    assert times(out) == [[7.0, 12.0, 14.0, 17.0], [12.0, 17.0]]
    assert system.devices == 2 and metrics(out)["recomputed_tokens"] == 0
    # Two decoding devices do not wait for each other.
    more = dataclasses.replace(system, split=words.Apart(1, 2))
    assert times(simulate(more, two, costs, pages=20)) == [[7.0, 12.0, 14.0, 16.0], [12.0, 16.0]]


@pytest.mark.parametrize("compression", [None, Compression(slots=0.5), Compression(bytes=0.5)])
def test_apart_in_a_small_pool_every_request_gets_its_tokens(compression):
    system = System(words.Blocks(4), batch=words.PrefillFirst(8, 64), split=words.Apart(2, 1))
    out = simulate(system, crowd(7, 40, rate=1e3), COSTS, pages=24, compression=compression)
    for entry in out.entries:
        assert entry.state == "ended" and entry.written == entry.request.output
        got = [out.ends[i] for a, n in entry.spans for i in range(a, a + n)]
        assert len(got) == entry.request.output and (np.diff(got) > 0).all()
    assert sum(entry.preempted for entry in out.entries) > 0 or compression is not None
    figures = metrics(out)
    assert figures["completed"] == 40 and figures["hit_rate"] == 0


def test_prefixes_are_shared_where_every_slot_stays():
    requests = synthetic("tree:requests=20,groups=1,prefix=64,suffix=8,output=4,rate=1")
    system = System(share=words.Tree(), evict=words.LRU(), order=words.LongestPrefix())
    hits = {
        how: metrics(simulate(system, requests, COSTS, pages=100, compression=how))["hit_rate"]
        for how in (None, Compression(bytes=0.5), Compression(slots=0.5))
    }
    assert hits[None] == hits[Compression(bytes=0.5)] > 0.4 and hits[Compression(slots=0.5)] == 0


@pytest.mark.parametrize(
    "wrong", [dict(bytes=0), dict(slots=0), dict(slots=1.5), dict(slots=-3), dict(again=-1)]
)
def test_a_compression_out_of_range_is_refused(wrong):
    with pytest.raises(kvjax.InputError, match="expected a share above 0"):
        Compression(**wrong)


@pytest.mark.parametrize(
    "found, said",
    [
        ("{", "is no JSON"),
        ("[1]", "holds a list"),
        ('{"bass": 1}', "unknown field 'bass'"),
        ('{"base": 1, "weights": -1}', "weights=-1, expected a number from 0 up"),
        ('{"iterations": [[1, 2, 3]]}', "other iterations than expected"),
        ('{"iterations": "many"}', "other iterations than expected"),
        (
            json.dumps(vars(Costs("by hand", 1, 1, 1, 1, 1, 1, 1, 1, slice=0))),
            "slice=0, expected a whole number from 1 up",
        ),
        (
            json.dumps(vars(Costs("by hand", 1, 1, 1, 1, 1, 1, 1, 1, pieces=(64, 16)))),
            "pieces=[64, 16], expected whole numbers from 1 up that ascend",
        ),
        (
            json.dumps(vars(Costs("by hand", 1, 1, 1, 1, 1, 1, 1, 1, gathers=True))),
            "gathers=True, expected true, beside sizes of pieces, or false",
        ),
    ],
)
def test_a_costs_file_of_another_shape_is_refused_by_its_field(found, said, tmp_path):
    (tmp_path / "costs.json").write_text(found)
    with pytest.raises(kvjax.InputError, match="costs.json") as error:
        read_costs(tmp_path / "costs.json")
    assert said in str(error.value)
    with pytest.raises(kvjax.InputError, match="cannot be read"):
        read_costs(tmp_path / "none.json")


def test_measured_iterations_give_back_the_costs_that_made_them(tmp_path, rng):
    true = np.array([3e-6, 4e-9, 5e-11, 2e-3])
    rows = rng.integers(1, [2048, 100_000, 10**7, 5], (40, 4))
    file = tmp_path / "costs.json"
    rest = {"memory": 1e9, "slot_bytes": 1e4, "move": 0}
    file.write_text(json.dumps({"iterations": [[*r.tolist(), float(r @ true)] for r in rows], **rest}))
    costs = read_costs(file)
    np.testing.assert_allclose([costs.token, costs.slot, costs.pair, costs.base], true, rtol=1e-6)
    assert costs.seconds(10, 20, 30) == pytest.approx(np.array([10, 20, 30, 1]) @ true)
    assert costs.seconds(10, 20, 30, 4) == pytest.approx(np.array([10, 20, 30, 4]) @ true)
    assert "costs.json" in costs.by and costs.pages(10) == 10_000
    # Written and read again, they are the same.
    file.write_text(json.dumps(vars(dataclasses.replace(costs, slice=16, pieces=(16, 64), gathers=True))))
    again = read_costs(file)
    assert again == dataclasses.replace(costs, by=again.by, slice=16, pieces=(16, 64), gathers=True)
    assert again.seconds(10, 20, 30) == costs.seconds(10, 20, 30)


def test_files_of_measured_iterations_are_fitted_together(tmp_path):
    """In each file all tables are of one width, which two files tell from tokens."""
    true = np.array([3e-4, 2e-6, 2e-7, 1e-2])
    files = [tmp_path / f"{width}.json" for width in (256, 1024)]
    rest = {"memory": 1e9, "slot_bytes": 1e4, "move": 0, "pieces": [16, 64], "gathers": True}
    for file, width in zip(files, (256, 1024), strict=True):
        rows = [[n, width, n * width, 1] for n in (16, 32, 48, 64)]
        file.write_text(json.dumps(rest | {"iterations": [[*r, float(np.dot(r, true))] for r in rows]}))
    costs = read_costs(*files)
    np.testing.assert_allclose([costs.token, costs.slot, costs.pair, costs.base], true, rtol=1e-6)
    assert costs.pieces == (16, 64) and costs.gathers and "fitted to 8 measured" in costs.by
    files[1].write_text(json.dumps(rest | {"iterations": [], "gathers": False}))
    with pytest.raises(kvjax.InputError, match="differ in slice, pieces, gathers"):
        read_costs(*files)
    files[1].write_text(json.dumps(vars(costs)))
    with pytest.raises(kvjax.InputError, match="1024.json has no measured iterations"):
        read_costs(*files)


def test_compressed_slots_are_more_and_are_read_sooner():
    costs = Costs("by hand", 0.0, 1.0, 0.5, 0.0, 0.0, 1.0, 1e3, 10.0)
    half = costs.compressed(0.5)
    assert (costs.pages(1), half.pages(1)) == (100, 200) and half.move == 0.5
    assert (costs.seconds(1, 8, 8), half.seconds(1, 8, 8)) == (5.0, 3.0) and "0.5 of the bytes" in half.by
    for wrong in (0.0, 1.5, -1.0):
        with pytest.raises(kvjax.InputError, match="in \\(0, 1\\]"):
            costs.compressed(wrong)
