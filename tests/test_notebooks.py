"""The notebooks run from top to bottom, here on the tiny model."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHKV_NOTEBOOK_MODEL", "tiny")
    monkeypatch.setenv("GRAPHKV_NOTEBOOK_RESULTS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), "clear the outputs before committing"
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    written = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert written and not any(output["output_type"] == "error" for output in written)
