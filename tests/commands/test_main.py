"""The command line: what it prints, what it passes on, one line and exit code 2 for what it cannot use."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import kvjax
from kvjax.aot import probe as probing
from kvjax.commands import info
from kvjax.commands.generate import SAMPLE
from kvjax.commands.main import main
from kvjax.eval.compare import Comparison
from kvjax.io.load import SHIPPED
from kvjax.methods import METHODS

RUN_MAIN = [
    sys.executable,
    "-c",
    "import sys; from kvjax.commands.main import main; sys.exit(main(sys.argv[1:]))",
]


@pytest.fixture
def columns(monkeypatch):
    return lambda width: monkeypatch.setenv("COLUMNS", str(width))


# --- methods and info --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 140])
def test_methods_prints_a_table_that_fits(width, columns, capsys):
    columns(width)
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    for id in METHODS:
        assert re.search(rf"^{id} ", out, re.MULTILINE)
    assert "arXiv:2404.14469 (2024)" in re.sub(r"\s+", " ", out)
    assert "window=64" in out and "also knorm" in out


def test_methods_as_json_has_every_field(capsys):
    assert main(["methods", "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(METHODS)
    kivi = rows["kivi"]
    assert kivi["hyper"] == {"bits": 2, "group": 32, "residual": 128}
    assert (kivi["url"], kivi["year"], kivi["verbs"]) == ("https://arxiv.org/abs/2402.02750", 2024, ["store"])
    assert kivi["takes_budget"] is False and rows["l2compress"]["aliases"] == ["knorm"]


def test_aot_says_what_does_not_compile_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(probing, "available", lambda platform: "")
    monkeypatch.setattr(probing, "probe", lambda topology, name: {"error": "the stack is too large"})
    for topology, note in (("v5e:2x2", "Compiler model, not measured."), ("h100", "Compiled, not measured.")):
        assert main(["aot", "--case", "paged_decode-int8-h128", "--topology", topology]) == 1
        out = capsys.readouterr().out
        assert f"paged_decode-int8-h128 on {topology}: the stack is too large" in out and note in out


def test_aot_lists_the_cases_of_a_gpu_and_knows_what_is_tuned_for_tpus_alone(capsys):
    assert main(["aot", "--list", "--topology", "a100"]) == 0
    assert "decoder-kivi" in (out := capsys.readouterr().out) and "flash_prefill" not in out
    assert main(["aot", "--tune", "stacked_decode", "--topology", "h100"]) == 2
    assert "h100 is no TPU" in capsys.readouterr().err


@pytest.mark.parametrize("operations", ["", "none"])
def test_aot_tunes_what_can_be_tuned_alone_and_says_so_without_a_compiler(operations, monkeypatch, capsys):
    monkeypatch.setattr(probing, "available", lambda *_: "no compiler")
    assert main(["aot", "--tune", operations]) == 2
    assert f"nothing to tune in '{operations}': expected stacked_decode" in capsys.readouterr().err


def test_info_says_what_runs_here(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for text in (
        f"kvjax {kvjax.__version__}",
        f"jax {jax.__version__}",
        "jaxlib ",
        "numpy ",
        "8 x cpu",
        "GiB",
        "usable",
    ):
        assert text in out
    assert "Pallas kernels wait for a TPU or a GPU: docs/kernels.md" in out


def test_info_says_which_kernels_a_tpu_runs(monkeypatch):
    assert "stacked_decode" in " ".join(info._attention("tpu"))
    assert "over arrays that lie on one device, or within shard_map" in info._attention("tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert "one device" not in " ".join(info._attention("tpu"))


def test_info_says_which_kernels_a_gpu_runs_and_which_gpu_runs_none(monkeypatch):
    lines = info._attention("gpu")
    assert lines[0] == "prompts: cuDNN or XLA; sparse_prompt over picked blocks (Pallas)"
    assert lines[1].startswith("steps: stacked_decode") and "flash_prefill" not in " ".join(lines)
    monkeypatch.setattr("kvjax.ops.base.triton.unable", lambda: "a Tesla T4 of 7.5 capability")
    assert info._attention("gpu")[1] == "no Pallas kernels: a Tesla T4 of 7.5 capability"


def test_help_version_and_no_arguments(capsys):
    assert main([]) == 0
    assert "Start with: kvjax compare" in capsys.readouterr().out
    for arguments, text in ((["--version"], kvjax.__version__), (["generate", "--help"], "--max-new-tokens")):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert text in capsys.readouterr().out


# --- compare -----------------------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch) -> list[dict]:
    calls: list[dict] = []

    def compare(**arguments) -> Comparison:
        calls.append(arguments)
        return Comparison([], [], {}, {"failed": (calls[-1]["methods"] or [])[3:]}, Path())

    monkeypatch.setattr("kvjax.eval.compare.compare", compare)
    return calls


def test_compare_ends_with_1_where_a_method_failed(compared):
    assert main(["compare", "--methods", "int8", "int4", "kivi", "snapkv"]) == 1


def test_compare_without_arguments_leaves_the_defaults(compared):
    assert main(["compare"]) == 0
    (call,) = compared
    assert call == dict(
        model="recall-tiny", methods=None, budgets=None, tasks=None, protocols=None,
        samples=None, length=None, text=None, out=None, resume=False, seed=0, seeds=None, preset=None,
        scores=False, baselines=True, gold=None,
    )  # fmt: skip


def test_compare_of_all_methods_says_so(compared):
    assert main(["compare", "--methods", "all"]) == 0 and compared[0]["methods"] == ["all"]


def test_compare_passes_everything_on(compared, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    words = f"compare --model m --methods knorm snapkv+kivi:bits=4 --budgets 0.5 64 --tasks get \
        --protocol aware --samples 3 --length 600 --text {tmp_path}/a.txt --out o --resume --seed 5 \
        --preset long --scores --no-baselines --gold"
    assert main(words.split()) == 0
    (call,) = compared
    assert call == dict(
        model="m", methods=["knorm", "snapkv+kivi:bits=4"], budgets=[0.5, 64],
        tasks=["get"], protocols=("aware",), samples=3, length=600,
        text=f"{tmp_path}/a.txt", out="o", resume=True, seed=5, seeds=None, preset="long",
        scores=True, baselines=False, gold=True,
    )  # fmt: skip


# --- generate ----------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_generate_streams_text_and_reports_the_cache(capsys):
    assert main(["generate", "--prompt", SAMPLE, "--max-new-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == "17 4 52\n"
    for pattern in (
        r"read +23 tokens",
        r"wrote +3 tokens, \d+ tokens/s",
        r"compiled +in [\d.]+ s",
        r"cache .* 100\.0% of",
    ):
        assert re.search(pattern, err)


@pytest.mark.rotating
@pytest.mark.parametrize(("method", "heavy"), [("corm(newest=4)", True), ("h2o", False)])
def test_generate_says_where_a_cache_weighs_more_than_the_full_one(method, heavy, capsys):
    words = ["--tokens", ",".join(map(str, range(3, 36))), "--method", method, "--budget", "0.5"]
    assert main(["generate", *words, "--max-new-tokens", "2"]) == 0
    assert ("weighs more than the full cache" in capsys.readouterr().err.replace("\n", " ")) == heavy


@pytest.mark.rotating
def test_generate_ends_behind_a_text_and_takes_penalties(capsys):
    words = ["generate", "--prompt", SAMPLE, "--max-new-tokens", "8", "--stop", "nowhere"]
    assert main([*words, "--stop", "4 52"]) == 0
    assert capsys.readouterr().out == "17 4 52\n"
    # Every token of the answer stands in the prompt.
    for penalty in ("--repetition-penalty", "--frequency-penalty"):
        assert main([*words, "--stop", "4 52", penalty, "1000"]) == 0
        assert not {"17", "4", "52"} & set(capsys.readouterr().out.split())


@pytest.mark.rotating
def test_generate_reads_a_file_and_compresses(tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text(SAMPLE)
    words = (
        f"generate --file {tmp_path}/prompt.txt --method snapkv:window=4,variant=kvpress+int8 --budget 0.5 \
        --max-new-tokens 3"
    )
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert out == "17 4 52\n"
    share = re.search(r"([\d.]+)% of the full cache's", err)
    assert share is not None and 10 < float(share[1]) < 30


@pytest.mark.rotating
def test_generate_takes_and_prints_ids_where_there_is_no_tokenizer(tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SHIPPED / "recall-tiny" / name, tmp_path)
    ids = ",".join(map(str, kvjax.load("recall-tiny").tokenizer.encode(SAMPLE).ids))
    assert main(["generate", "--model", str(tmp_path), "--tokens", ids, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == "93,80,128\n"
    assert main(["generate", "--model", str(tmp_path), "--prompt", "a"]) == 2
    assert "has no tokenizer, expected token ids: pass them as --tokens 1,2,3" in capsys.readouterr().err


def test_generate_puts_a_prompt_into_the_chat_template(tmp_path, capsys):
    shutil.copytree(SHIPPED / "recall-tiny", tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }} <get> brave otter")
    words = ["generate", "--chat", "--model", str(tmp_path / "chat"), "--max-new-tokens", "3"]
    assert main([*words, "--prompt", SAMPLE.removesuffix(" <get> brave otter")]) == 0
    assert capsys.readouterr().out == "17 4 52\n"


# --- what cannot be used -----------------------------------------------------------------------------

# (words, what was given, what was expected, what to do); {dir} is a directory with one odd file of each kind.
BAD = {
    "command": ("comapre", "'comapre'", "one of compare, report, methods", "did you mean compare"),
    "option": ("compare --smaples 3", "'--smaples'", "those of `kvjax compare`", "did you mean --samples"),
    "option alone": ("--verison", "'--verison'", "those of `kvjax`", "did you mean --version"),
    "abbreviation": ("compare --sam 3", "'--sam'", "those of", "did you mean --samples|--help"),
    "number": ("compare --samples many", "'many'", "a whole number >= 1", "kvjax compare --help"),
    "protocol": ("compare --protocol awar", "'awar'", "choose from '?agnostic", "kvjax compare --help"),
    "method": ("compare --methods snapvk", "'snapvk'", "unknown method", "did you mean 'snapkv'"),
    "hyper-parameter": (
        "compare --methods snapkv:windw=3",
        "'windw'",
        "no hyper-parameter",
        "did you mean 'window'",
    ),
    "combination": ("compare --methods keepkv+kivi", r"keepkv \+ kivi", "encoded one by one", "use int8"),
    "method file": (
        "compare --methods {dir}/no.py:f",
        r"no\.py cannot be read",
        "Python file of a method",
        "give its path",
    ),
    "budget 0": ("compare --budgets 0", "got 0", "a fraction in", "write a fraction such as 0.25"),
    "budget 1.5": ("compare --budgets 1.5", "got 1.5", "a fraction in", "did you mean"),
    "budget x": ("compare --budgets x", "'x' is not a number", "expected a fraction", "such as 0.25"),
    "commas": ("compare --budgets 0.5,0.25", "0.5,0.25", "expected a fraction", "put spaces between"),
    "task": ("compare --tasks gte", "'gte'", "unknown", "did you mean 'get'"),
    "text": ("compare --text {dir}/no.txt", r"no\.txt is no file", "expected a text", "check the path"),
    "resume": (
        "compare --resume",
        "--resume was given without --out",
        "expected the directory",
        "add --out DIR",
    ),
    "range": ("compare --methods snapkv:window=0", "snapkv: window", "a whole number >= 1", "got 0"),
    "twice": (
        "generate --tokens 1 --method h2o:recent=0.5,recent=0.2",
        "'recent'",
        "given twice",
        "remove one",
    ),
    "preset": ("compare --methods snapkv --preset no", "'no'", "short", "the path of a .gin file"),
    "no prompt": ("generate", "no prompt was given", "expected --prompt", "try kvjax generate --prompt"),
    "two prompts": (
        "generate --prompt a --tokens 1",
        "--tokens",
        "not allowed with",
        "kvjax generate --help",
    ),
    "empty prompt": ("generate --file {dir}/empty", "prompt is empty", "expected some text", "give --prompt"),
    "prompt file": (
        "generate --file {dir}/no.txt",
        r"no\.txt cannot be read",
        "expected a text file",
        "check the path",
    ),
    "binary file": ("generate --file {dir}/bytes", "no UTF-8 text", "expected a text file", "convert it"),
    "words": ("generate --prompt hello", "'hello'", "expected words such as brave", "kvjax generate --help"),
    "ids": ("generate --tokens 1,b", "'1,b'", "expected token ids", "write them like 1,2,3"),
    "id": ("generate --tokens 1,400", "token id 400", r"vocabulary \[0, 220\)", "this model's tokenizer"),
    "chat": ("generate --tokens 1 --chat", "--chat was given", "expected a text", "use --prompt"),
    "no template": ("generate --prompt the --chat", "recall-tiny", "no chat template", "give it plain text"),
    "no budget": (
        "generate --tokens 1 --method h2o",
        "h2o was given",
        "expected a fraction",
        "add --budget 0.25",
    ),
    "budget too much": (
        "generate --tokens 1 --method int8 --budget 0.5",
        "got budget 0.5",
        "takes no budget",
        "leave",
    ),
    "no method": ("generate --tokens 1 --budget 0.5", "--budget 0.5", "expected both", "add --method"),
    "window": (
        "generate --tokens 1,2,3,4 --method snapkv --budget 0.5",
        r"4 of 4 tokens must stay \(Recent\(tokens=64\)\)",
        "more than the budget of 2 slots",
        "raise the budget or lower",
    ),
    "greedy top-k": ("generate --tokens 1 --top-k 2", "--top-k", "expected a draw", "add --temperature"),
    "min-p": ("generate --tokens 1 --temperature 1 --min-p 2", "is 2.0", ">= 0 and <= 1", "generate --help"),
    "penalty": (
        "generate --tokens 1 --repetition-penalty 0",
        "got 0.0",
        "must be > 0",
        "kvjax generate --help",
    ),
    "temperature": (
        "generate --tokens 1 --temperature -1",
        "is -1.0",
        "expected a finite number >= 0",
        "kvjax generate --help",
    ),
    "group": (
        "generate --tokens 1 --method int4:group=48",
        "group=48",
        "must divide the 32",
        "choose other hyper-parameters",
    ),
    "too long": (
        "generate --tokens 1 --max-new-tokens 4000",
        "4000 new tokens would reach position 4001",
        "this model's last is 2048",
        "lower max_new_tokens",
    ),
    "model": (
        "generate --tokens 1 --model recall-tin",
        "recall-tin ",
        "expected a model directory",
        "did you mean",
    ),
    "no model": (
        "generate --tokens 1 --model {dir}",
        "not a model directory",
        "has no config.json",
        "it has",
    ),
    "truncated": (
        "generate --tokens 1 --model {dir}/cut",
        "is truncated",
        "its header says",
        "fetch the file again",
    ),
    "inspect nothing": ("inspect", r"DIR\|GGUF\|NAME\|CACHE_FILE", "are required", "kvjax inspect --help"),
    "inspect folder": (
        "inspect {dir}",
        "is no model directory",
        r"expected a config\.json",
        "check the path",
    ),
    "inspect family": ("inspect {dir}/bert", "'bert'", "not supported", "choose a checkpoint of llama"),
    "inspect text": (
        "inspect {dir}/empty",
        "is truncated|safetensors file",
        "expected a whole file",
        "fetch",
    ),
    "context": ("inspect recall-tiny --context 9999", "is 9999", "at most the model's 2048", "lower it"),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "empty").write_text(" ")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text('{"model_type": "bert"}')
    shutil.copytree(SHIPPED / "recall-tiny", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


@pytest.mark.parametrize(("words", "given", "expected", "todo"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(words, given, expected, todo, odd, capsys):
    assert main(words.format(dir=odd).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvjax: error: ") and err.count("\n") == 1 and err.endswith("\n")
    for part in (given, expected, todo):
        assert re.search(part, err), part


def test_errors_are_red_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["nothing"])
    assert re.fullmatch(r"\x1b\[31mkvjax: error: .*\x1b\[0m\n", capsys.readouterr().err)
    monkeypatch.setenv("NO_COLOR", "1")
    main(["nothing"])
    assert "\x1b" not in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("kvjax.commands.info.run", lambda args: int("not a number of ours"))
    with pytest.raises(ValueError, match="not a number of ours"):
        main(["info"])


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.commands.info.run", interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.rotating
def test_a_reader_that_leaves_is_no_error():
    with subprocess.Popen(
        [*RUN_MAIN, "methods", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_wrong_words_are_answered_before_jax_is_imported():
    script = (
        "import sys; from kvjax.commands.main import main; "
        "print(main(['compare', '--smaples']), 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "did you mean --samples?" in done.stderr
