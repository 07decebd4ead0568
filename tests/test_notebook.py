"""The notebook of the first hour runs from its first cell to its last in a kernel of its own."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from operant.storage.hub import builtin_models

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "first_steps.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if "reviews-lm" not in builtin_models():
        pytest.skip("the built-in model is not in this checkout")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder)}}).execute()
    assert (folder / "runs/first-steps/report.html").is_file() and (folder / "runs/model/config.json").is_file()
    return notebook


def shown(cell: Any) -> dict[str, str]:
    """What a cell shows, by kind; standard error is not compared."""
    kinds: dict[str, str] = {}
    for output in cell.outputs:
        kinds |= output.get("data", {})
        if output.get("name") == "stdout":
            kinds["stdout"] = output.text
    return kinds


@pytest.mark.slow
def test_the_chart_ends_with_the_verdict_and_the_report(executed: Any) -> None:
    train = next(cell for cell in executed.cells if "operant.train(" in cell.source)
    charts = [output for output in train.outputs if output.output_type == "display_data"]
    assert len(charts) == 1, "one chart, updated in place"
    html = charts[0]["data"]["text/html"]
    assert html.count("<svg") == 2 and "step 12/12" in html and 'href="runs/first-steps/report.html"' in html
    assert "reward 0." in html and "step 12" in charts[0]["data"]["text/plain"]


@pytest.mark.slow
def test_saving_and_loading_give_the_same_reply(executed: Any) -> None:
    cell = next(cell for cell in executed.cells if "Learner.load" in cell.source)
    assert shown(cell)["text/plain"].startswith("(Learner(ppo, reference=copy, step=3") and "True)" in str(shown(cell))


def test_it_is_stored_with_small_outputs_of_its_own() -> None:
    """A git host shows them. They name no folder of the machine that made them."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert NOTEBOOK.stat().st_size < 200_000
    assert all(shown(cell) for cell in notebook.cells if cell.cell_type == "code" and "diagnose" not in cell.source)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "/tmp/" not in text and "/root/" not in text and "/home/" not in text
