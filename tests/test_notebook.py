"""The notebook of the first hour runs from its first cell to its last in a kernel of its own."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from operant.storage.hub import builtin_models

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "first_steps.ipynb"


def shown(cell: Any) -> dict[str, str]:
    """What a cell shows, by kind; standard error is not compared."""
    kinds: dict[str, str] = {}
    for output in cell.outputs:
        kinds |= output.get("data", {})
        if output.get("name") == "stdout":
            kinds["stdout"] = output.text
    return kinds


@pytest.mark.slow
def test_it_runs_to_its_end(tmp_path: Path) -> None:
    """One chart ends with the verdict and the report; saving and loading give the same reply."""
    if "reviews-lm" not in builtin_models():
        pytest.skip("the built-in model is not in this checkout")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "runs/first-steps/report.html").is_file() and (tmp_path / "runs/model/config.json").is_file()
    train = next(cell for cell in notebook.cells if "operant.train(" in cell.source)
    (chart,) = [output for output in train.outputs if output.output_type == "display_data"]  # updated in place
    html = chart["data"]["text/html"]
    assert html.count("<svg") == 2 and "step 12/12" in html and 'href="runs/first-steps/report.html"' in html
    assert "reward 0." in html and "step 12" in chart["data"]["text/plain"]
    again = shown(next(cell for cell in notebook.cells if "Learner.load" in cell.source))
    assert again["text/plain"].startswith("(Learner(ppo, reference=copy, step=3") and "True)" in str(again)


def test_it_is_stored_with_small_outputs_of_its_own() -> None:
    """A git host shows them. They name no folder of the machine that made them."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert NOTEBOOK.stat().st_size < 200_000
    assert all(shown(cell) for cell in notebook.cells if cell.cell_type == "code" and "diagnose" not in cell.source)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "/tmp/" not in text and "/root/" not in text and "/home/" not in text
