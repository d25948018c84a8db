"""The notebook is committed without outputs, and runs from top to bottom on a CPU without a network."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

QUICKSTART = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def outputs(notebook, id):
    """What a cell printed and showed, as text."""
    cell = next(cell for cell in notebook.cells if cell.id == id)
    return "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)


def pictures(notebook, id):
    cell = next(cell for cell in notebook.cells if cell.id == id)
    return [out for out in cell.outputs if "image/png" in out.get("data", {})]


def test_the_notebook_is_small_and_has_no_outputs():
    notebook = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(notebook)
    assert QUICKSTART.stat().st_size < 20_000
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None and not cell.metadata


@pytest.mark.filterwarnings("default")  # those of Jupyter's libraries are not ours
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling is most of the time
    notebook = nbformat.read(QUICKSTART, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert "cpu" in outputs(notebook, "device")
    assert "kvzip" in outputs(notebook, "compare") and pictures(notebook, "frontier")
    assert "recall-tiny-hf: 503 tokens, ending" in outputs(notebook, "hf-load")
    full, snapkv, chained = outputs(notebook, "hf-generate").splitlines()
    assert full.startswith("full") and chained.startswith("snapkv + int8")
    sizes = [int(line.rpartition(" KiB")[0].split()[-1]) for line in (full, snapkv, chained)]
    assert sizes == sorted(sizes, reverse=True)
    assert "loud values" in outputs(notebook, "own-compare") and pictures(notebook, "own-compare")
    assert len(list(tmp_path.glob("kvjax-results/*/report.html"))) == 2
