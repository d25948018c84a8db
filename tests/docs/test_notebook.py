"""The notebooks are committed without outputs, and run from top to bottom on a CPU without a network."""

import re
import warnings
from pathlib import Path

import huggingface_hub
import IPython.display
import nbformat
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
QUICKSTART, TRAIN, TPU = (NOTEBOOKS / f"{name}.ipynb" for name in ("quickstart", "train", "tpu"))


def outputs(notebook, id):
    """Return what a cell printed and showed, as text."""
    cell = next(cell for cell in notebook.cells if cell.id == id)
    return "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)


def pictures(notebook, id):
    cell = next(cell for cell in notebook.cells if cell.id == id)
    return [out for out in cell.outputs if "image/png" in out.get("data", {})]


@pytest.mark.parametrize("path", [QUICKSTART, TRAIN, TPU], ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 20_000
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None and not cell.metadata


@pytest.mark.parametrize("path", [QUICKSTART, TRAIN, TPU], ids=lambda path: path.stem)
def test_the_cell_that_installs_asks_where_from_unless_it_lies_in_a_checkout(path, tmp_path, monkeypatch):
    cell = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.id == "install").source
    ran = []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("subprocess.run", lambda words, check: ran.append(words))
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    with pytest.raises(ValueError, match="set SOURCE above to where this notebook came from: git"):
        exec(cell, {})
    assert not ran and "OWNER" not in cell
    (tmp_path / "pyproject.toml").touch()
    exec(cell, {})
    exec(cell.replace('SOURCE = ""', 'SOURCE = "git+https://mine"'), {})
    assert [words[-1] for words in ran if "--no-deps" in words] == ["..", "git+https://mine"]


# What the comparisons of a plain run ask less of: (cell, what it says, what runs instead).
SHORTER = [
    ("compare", '["snapkv:variant=kvpress", "kvzip", "kivi"]', '["kvzip"]'),
    (
        "own-compare",
        '[("loud values", True, loud), "snapkv:variant=kvpress"]',
        '[("loud values", True, loud)]',
    ),
    *((cell, "[0.5, 0.25]", "[0.5]") for cell in ("compare", "own-compare")),
    *((cell, "samples=4", "samples=1") for cell in ("compare", "own-compare")),
]


def offline(*_, **__):
    raise LocalEntryNotFoundError("no connection")


@pytest.mark.rotating
def test_the_cells_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """In this process, which shares what other tests compiled; the notebook itself runs below."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(IPython.display, "display", lambda shown: pictures.append(shown.data))
    monkeypatch.chdir(tmp_path)
    cells = {c.id: c.source for c in nbformat.read(QUICKSTART, as_version=4).cells if c.cell_type == "code"}
    for cell, long, short in SHORTER:
        assert cells[cell].count(long) == 1
        cells[cell] = cells[cell].replace(long, short)
    names, printed, pictures = {}, {}, []
    with warnings.catch_warnings():
        for cell, source in cells.items():
            exec(compile(source, f"quickstart.ipynb, {cell}", "exec"), names)
            printed[cell] = capsys.readouterr().out
    assert_shows(printed, tmp_path)
    assert len(pictures) == 2 and all(data[:4] == b"\x89PNG" for data in pictures)


def assert_shows(printed, folder):
    """Check what the cells print and write, whatever they compare."""
    assert "cpu" in printed["device"] and "kvzip" in printed["compare"]
    assert "recall-tiny-hf: 503 tokens, ending" in printed["hf-load"]
    full, snapkv, chained = printed["hf-generate"].splitlines()
    assert full.startswith("full") and chained.startswith("snapkv + int8")
    sizes = [int(line.rpartition(" KiB")[0].split()[-1]) for line in (full, snapkv, chained)]
    assert sizes == sorted(sizes, reverse=True)
    assert "loud values" in printed["own-compare"]
    assert len(list(folder.glob("kvjax-results/*/report.html"))) == 2


def ran(path, folder, monkeypatch, **instead):
    """Execute a notebook. instead: by the id of a cell, what it says, and what it says instead."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(path, as_version=4)
    for id, (said, new) in instead.items():
        cell = next(cell for cell in notebook.cells if cell.id == id)
        assert said in cell.source
        cell.source = cell.source.replace(said, new)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.mark.rotating
@pytest.mark.filterwarnings("default")  # those of Jupyter's libraries are not ours
def test_the_notebook_of_training_runs_and_uptraining_makes_up_for_a_conversion(tmp_path, monkeypatch):
    # Training takes most of the time here, not compiling.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    notebook = ran(TRAIN, tmp_path, monkeypatch)
    assert pictures(notebook, "curve") and "b'def " in outputs(notebook, "generate")

    def bits(text):
        lines = [line.rpartition(" KiB")[2].split() for line in text.splitlines() if " bits/byte" in line]
        return [float(words[0]) for words in lines]

    original, converted, uptrained = bits(outputs(notebook, "uptrain"))
    assert original < 6 and uptrained < converted
    assert len(bits(outputs(notebook, "convert"))) == 5


@pytest.mark.rotating
@pytest.mark.filterwarnings("default")
def test_the_notebook_of_a_tpu_runs_on_a_small_model_and_20_steps_lower_the_loss(tmp_path, monkeypatch):
    """The real model's own 20 steps are in tests/models/test_smollm2.py, which needs its weights."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    methods = 'methods=["kvzip", "tova", "snapkv", "int4"],'
    notebook = ran(
        TPU,
        tmp_path,
        monkeypatch,
        model=('MODEL = "smollm2-135m"', 'MODEL = "recall-tiny"'),
        compare=(methods, 'methods=["kvzip"], tasks=["get"], protocols=["aware"],'),
        convert=("rank=96", "rank=24"),
        uptrain=('"train.distil=1.0",', '"train.distil=1.0", "data.kind=recall",'),
        after=('"def add(a, b):"', '"<bos> the <set> brave otter 17 "'),
    )
    assert pictures(notebook, "frontier") and pictures(notebook, "uptrain")
    said = re.search(r"loss ([\d.]+) at first, ([\d.]+) at last", outputs(notebook, "uptrain"))
    assert float(said[2]) < float(said[1])
    original, converted, uptrained = outputs(notebook, "after").splitlines()
    size = lambda line: int(line.rpartition(" KiB")[0].split()[-1])  # noqa: E731
    assert size(converted) == size(uptrained) < size(original)


@pytest.mark.rotating
@pytest.mark.filterwarnings("default")
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling is most of the time
    notebook = ran(QUICKSTART, tmp_path, monkeypatch)
    assert_shows({c.id: outputs(notebook, c.id) for c in notebook.cells if c.cell_type == "code"}, tmp_path)
    assert pictures(notebook, "frontier") and pictures(notebook, "own-compare")
