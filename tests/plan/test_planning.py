"""A plan from end to end, on eight virtual devices: what is found, and what is said of mistakes."""

import json
import pickle

import jax
import pytest

from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.grammar import Method
from kvjax.mesh.rules import as_rules
from kvjax.models.config import Config
from kvjax.plan import picture as picturing
from kvjax.plan import planning
from kvjax.plan.compiling import compiled, refused
from kvjax.plan.largest import Search, beside, largest_rows, largest_tokens, last
from kvjax.plan.layouts import abstract
from kvjax.plan.picture import curve, tokens_in_words
from kvjax.plan.planning import Planner, PlanRequest
from kvjax.plan.sizes import DeviceSizes
from kvjax.plan.topologies import topology_of

CONFIG = Config(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=16, d_ff=64, max_positions=1024)
EIGHT = topology_of("cpu:8")
MIB = 2**20


def asked(**changed):
    given = dict(model="tiny", config=CONFIG, topology=EIGHT, context=512, batch=8, dtype="float32", chunk=32)
    return PlanRequest(**{**given, **changed})


@pytest.fixture
def here(monkeypatch):
    """Jobs run in this process, which has eight devices."""
    monkeypatch.setattr(
        planning, "in_child", lambda job: json.loads(json.dumps(compiled(pickle.loads(pickle.dumps(job)))))
    )


def test_a_plan_names_its_method_by_a_text_that_builds_it():
    for text, label in (("snapkv + int8", "snapkv(budget=0.25) + int8"), ("int4(group=16)", "int4:group=16")):
        assert asked(method=text).label == label
        assert asked(method=label).sentence == asked(method=text).sentence


@pytest.mark.rotating
def test_a_plan_holds_what_the_compiler_says_of_a_step_and_a_chunk(here):
    plan = Planner(asked()).plan()
    assert json.loads(json.dumps(plan)) == plan
    assert plan["mesh"] == {"data": 4, "model": 2} and plan["parameters"] == 64 * 32 * 2 + 32 + 2 * (
        32 * 64 * 2 + 32 * 32 * 2 + 32 * 64 * 3 + 64
    )
    for name in ("decode", "prefill"):
        found = plan[name]
        assert (found["weights"], found["cache"]) == (plan["weights"], plan["cache"])
        beside = 4 * (2 * 32 + 2) if name == "prefill" else 2 * (4 + 1)
        assert found["arguments"] == plan["weights"] + plan["cache"] + beside
        assert found["aliases"] == plan["cache"]
        assert found["needs"] == found["arguments"] + found["temporaries"] + found["outputs"] - plan["cache"]
        # After attention and feed-forward of both layers, and for the embeddings.
        assert sum(count for _, count, _ in found["collectives"]) >= 5
        assert found["fits"] is None and found["compile_seconds"] >= 0
    assert plan["fits"] is None and plan["largest"] is None and plan["notes"] == []


@pytest.mark.rotating
def test_a_job_runs_in_a_process_of_its_own_as_it_does_here():
    planner = Planner(asked(method="kivi:bits=4,group=16,residual=32"))
    there = planner.compiled(8, 512, 0)
    assert "error" not in there
    assert there["cache"] == planner.sizes.cache(planner.layout.on, 8, 512)


@pytest.mark.rotating
def test_what_cannot_be_compiled_leaves_sizes_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(planning, "missing", lambda topology: "the compiler is not here: pip install it")
    monkeypatch.setattr(planning, "in_child", lambda job: pytest.fail("compiled all the same"))
    v5e = topology_of("v5e:4x4")
    plan = Planner(asked(topology=v5e, dtype="bfloat16", context=2048)).plan()
    assert plan["decode"] is plan["prefill"] is None and plan["fits"] is True
    assert plan["notes"] == [
        "2048 tokens are beyond the 1024 positions that tiny was made for",
        "not compiled, so temporaries, collectives and seconds are not known: "
        "the compiler is not here: pip install it",
    ]
    most = plan["largest"]
    assert most["rows"] > 8 and most["tokens"] > 2048 and not most["rows_confirmed"]
    small = Planner(asked(topology=v5e._replace(memory=1000), dtype="bfloat16")).plan()
    assert small["fits"] is False and (small["largest"]["rows"], small["largest"]["tokens"]) == (0, 0)


def test_the_last_that_fits_is_found():
    for answer in (0, 1, 2, 7, 99, 100):
        assert last(lambda n, answer=answer: n <= answer, 100) == answer
    for guess in (1, 300, 54000, 60000, 10**6):
        near = last(lambda n: n <= 54321, 10**6, near=0.01, guess=guess)
        assert 54321 / 1.01 - 1 <= near <= 54321
        assert last(lambda n: n <= 0, 10**6, guess=guess) == 0


@pytest.mark.rotating
def test_what_is_largest_fits_by_sizes_and_the_next_does_not():
    topology = topology_of("v5e:4x4")._replace(memory=40 * MIB)
    on = abstract(topology, {"data": 8, "model": 2}, as_rules("tensor", ("data", "model")))
    sizes = DeviceSizes(CONFIG, Method(), topology, "bfloat16")
    search = Search(sizes, on, 40 * MIB, None)
    rows = search.rows(4096)
    assert rows % 8 == 0 and search.needs(rows, 4096) <= 40 * MIB < search.needs(rows + 8, 4096)
    # Two layers of one KV head: keys and values of 16 channels in bfloat16, and a position.
    each = 2 * (2 * 16 * 2 + 4)
    assert rows == 8 * int((40 * MIB - sizes.weights(on)) // (4096 * each + 4))
    tokens = search.tokens(8)
    assert search.needs(8, tokens) <= 40 * MIB < search.needs(8, int(tokens * 1.02))


@pytest.mark.rotating
def test_an_answer_that_the_compiler_refuses_is_looked_for_again():
    topology = topology_of("v5e:4x4")._replace(memory=40 * MIB)
    on = abstract(topology, {"data": 8, "model": 2}, as_rules("tensor", ("data", "model")))
    sizes, tried = DeviceSizes(CONFIG, Method(), topology, "bfloat16"), []

    def compile(batch, context):
        """As if temporaries were as large as the cache."""
        tried.append((batch, context))
        weights, cache = sizes.weights(on), sizes.cache(on, batch, context)
        return {"weights": weights, "cache": cache, "needs": weights + 2 * cache}

    alone = Search(sizes, on, 40 * MIB, None)
    found = largest_rows(alone, 4096, compile)
    assert found.confirmed and len(tried) == 2 and found.rows < alone.rows(4096)
    known = Search(sizes, on, 40 * MIB, beside(8, 4096, compile(8, 4096)))
    tried.clear()
    assert largest_tokens(known, 8, compile).confirmed and len(tried) == 1
    assert not largest_rows(alone, 4096, lambda b, c: {"error": "no"}).confirmed


def test_the_picture_has_a_point_for_every_context_at_which_a_row_fits():
    topology = topology_of("v5e:4x4")._replace(memory=40 * MIB)
    planner = Planner(asked(topology=topology, dtype="bfloat16"))
    points = dict(curve(planner, (1024, 2048, 2**20)))
    assert set(points) == {1024, 2048} and 0.45 < points[2048] / points[1024] < 0.55
    assert curve(Planner(asked()), (1024,)) == []
    assert tokens_in_words(3 * 2**20) == "3M"


def test_compilers_say_how_much_too_large_a_program_is():
    for text in (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm. Exceeded",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(18.50G) exceeds available HBM (15.75G).",
    ):
        assert refused(text) == {"error": text, "too_large": True, "needs": round(18.5 * 2**30)}
    assert refused("INVALID_ARGUMENT: no") == {"error": "INVALID_ARGUMENT: no"}


def test_a_method_that_does_not_suit_the_model_is_refused_before_anything_runs():
    with pytest.raises(InputError, match="unknown method 'snapvk': did you mean 'snapkv'"):
        asked(method="snapvk")
    with pytest.raises(InputError, match="3 rows do not divide"):
        Planner(asked(batch=3, mesh="data=2,model=2", preset="tensor"))


@pytest.mark.rotating
def test_the_command_prints_every_part_and_writes_json_and_picture(monkeypatch, tmp_path, capsys):
    step = {
        "weights": 10 * MIB, "cache": 20 * MIB, "arguments": 31 * MIB, "temporaries": MIB,
        "outputs": 20 * MIB, "aliases": 20 * MIB, "needs": 32 * MIB, "trace_seconds": 1.0,
        "compile_seconds": 9.0, "collectives": [["all-reduce", 7, 3 * MIB]],
        "roofline": {"hbm": 4.0, "mxu": 1.0, "links": 0.5, "ms": 4.5},
    }  # fmt: skip

    def compile(job):
        if job.method.store is None:
            return step
        return {"weights": 10 * MIB, "cache": 5 * MIB, "compile_seconds": 3.0} | refused(
            "Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm."
        )

    monkeypatch.setattr(planning, "in_child", compile)
    monkeypatch.setattr(planning, "missing", lambda topology: "")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(picturing, "CONTEXTS", (1024, 8192))
    file, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    words = ["plan", "--model", "recall-tiny", "--topology", "v5e:2x2", "--context", "512", "--batch", "4"]
    words += ["--chunk", "0", "--no-largest", "--method", "full", "--method", "kivi:bits=4,residual=32"]
    assert main([*words, "--json", str(file), "--picture", str(picture)]) == 1
    out = capsys.readouterr().out
    for text in (
        "4 rows of 512 tokens", "4 devices of v5e:2x2, 15.8 GiB each", "--preset tensor --mesh data=",
        "7 all-reduce 3.0 MiB", "roofline 4.5 ms a step, 889 tokens a second (hbm 4.0, mxu 1.0, links 0.5)",
        "the step was not compiled: Ran out of memory", "18.5 GiB     no", "Roofline: a model, not measured.",
    ):  # fmt: skip
        assert text in out, text
    report = json.loads(file.read_text())
    assert [plan["method"] for plan in report["plans"]] == ["full", "kivi:bits=4,residual=32"]
    assert [plan["fits"] for plan in report["plans"]] == [True, False]
    assert report["versions"]["jax"] == jax.__version__
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "lama-3-70b"], "did you mean llama-3-70b?"),
        (["--topology", "v5p:4x4"], "did you mean v5p:4x4x4?"),
        (["--preset", "tensr"], "did you mean tensor?"),
        (["--rules", "tensr"], "did you mean tensor?"),
        (["--method", "snapvk"], "did you mean 'snapkv'?"),
        (["--rule", "slot=model"], "did you mean slots=model?"),
        (["--context", "1X"], "expected tokens such as 131072, 128k or 1M"),
        (["--json", "nowhere/a.json"], "for nowhere/a.json: make it first"),
        (["--picture", "/"], "/ is a folder, expected the path of a file"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(words, says, monkeypatch, capsys):
    monkeypatch.setattr(planning, "in_child", lambda job: pytest.fail("compiled all the same"))
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvjax: error: ") and error.count("\n") == 1 and says in error


def test_the_list_names_every_model(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "--list"]) == 0
    out = capsys.readouterr().out
    assert "deepseek-v3" in out and "https://huggingface.co/openai/gpt-oss-20b" in out
